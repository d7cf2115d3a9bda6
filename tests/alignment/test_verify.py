"""Gradients that the recorded examples do not add up to are refused, and the parameter is named."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment import verify
from inloop.errors import VerificationError
from tests.alignment.architectures import UnseenProduct
from tests.alignment.exactness import labels, small_net, x
from tests.training import num_hooks


def test_a_penalty_in_the_loss_is_named():
    model = small_net()
    with pytest.raises(VerificationError, match=r"(?s)'0.weight'.*penalty"), capture(model, verify=True):
        (F.cross_entropy(model(x(5)), labels()) + 0.01 * model[0].weight.square().sum()).backward()
    assert num_hooks(model) == 0


@pytest.mark.parametrize("cleared", ["", "set_to_none", "zeroed"])
def test_gradients_that_were_there_before_do_not_count(cleared):
    model = small_net()
    model(x(5)).sum().backward()
    with capture(model):
        if cleared:
            model.zero_grad(set_to_none=cleared == "set_to_none")
        model(x(5)).square().sum().backward()
    with pytest.raises(VerificationError, match="zero_grad"), capture(model):
        model(x(5)).sum().backward()
        model[0].weight.grad.mul_(2)


def test_a_recording_is_checked_unless_that_is_turned_off():
    model = small_net()

    def backward():
        (model(x(5)).square().sum() + model[0].weight.square().sum()).backward()

    with pytest.raises(VerificationError, match="0.weight"), capture(model):
        backward()
    with capture(model, verify=False):
        backward()


def test_all_parameters_are_looked_at_together_and_each_error_is_found(monkeypatch):
    """One alignment accepts a right step; an error of a percent in any parameter is not accepted."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with capture(model) as tape:
        model(x(5)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    monkeypatch.setattr(verify, "_units", lambda *_: pytest.fail("looked at one by one"))
    tape.verify(gradients)
    monkeypatch.undo()
    for name, gradient in gradients.items():
        with pytest.raises(VerificationError, match=name):
            tape.verify(gradients | {name: 1.01 * gradient})
        with pytest.raises(VerificationError):
            tape.verify({other: 1.01 * g if other == name else 0.99 * g for other, g in gradients.items()})


def test_weights_used_where_nothing_can_be_seen_are_named():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(5, 5)
            self.bypassed = nn.Linear(5, 3)

        def forward(self, batch):
            return UnseenProduct.apply(self.used(batch), self.bypassed.weight[0])

    model = Hidden().double()
    with (
        pytest.raises(VerificationError, match=r"(?s)'bypassed.weight'.*its module is not called"),
        capture(model, verify=True),
    ):
        model(x(5)).square().sum().backward()


@pytest.mark.parametrize(("factor", "is_seen"), [(1e-30, False), (1e-6, True)])
def test_what_is_missing_of_a_gradient_that_is_next_to_nothing(factor, is_seen):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    batch = torch.randn(5, 3, dtype=torch.float64)
    expected = pytest.raises(VerificationError, match=r"'0\.bias'") if is_seen else nullcontext()
    with expected, capture(model):
        model(batch).square().mean().backward()
        with torch.no_grad():
            model[0].bias.grad.zero_()
            model[0].bias.grad[0] = factor
