"""Recording by ``capture``: its options, and that nothing is left behind when it ends."""

import pytest
import torch
from torch import nn

import inloop
from inloop import capture
from inloop.errors import UsageError
from tests.alignment.exactness import random_direction, small_net, x
from tests.training import num_hooks


def test_hooks_leave_with_the_context_also_after_an_exception():
    model = nn.Sequential(small_net(), nn.LSTM(3, 2, batch_first=True).double())
    with pytest.raises(RuntimeError, match="mine"), capture(model):
        assert num_hooks(model) > 0
        raise RuntimeError("mine")
    assert num_hooks(model) == 0
    with pytest.raises(RuntimeError), capture(model):
        model(torch.randn(3, 4, 99))
    assert num_hooks(model) == 0


def test_a_backward_pass_after_the_context_is_not_recorded():
    model = small_net()
    with capture(model) as tape:
        out = model(x(5)).sum()
    out.backward()
    assert tape.calls == []


def test_evaluation_and_abandoned_forward_passes_leave_nothing():
    model = small_net()
    with capture(model) as tape:
        with torch.no_grad():
            model(x(5))
        model.eval()(x(5))
        model(x(5)).sum()
    assert tape.calls == []
    with pytest.raises(UsageError, match="Nothing was recorded"):
        tape.align(random_direction(model))


def test_nothing_is_written_on_the_users_modules():
    model = small_net()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with capture(model) as tape:
        model(x(5)).sum().backward()
    tape.align(random_direction(model))
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_copied_inputs_may_be_overwritten():
    model = small_net()
    batch = x(5)
    direction = random_direction(model)
    with capture(model, copy_inputs=True) as tape:
        model(batch).sum().backward()
    expected = tape.align(direction)
    batch.copy_(x(5))
    assert torch.equal(tape.align(direction), expected)


def test_an_unknown_reduction_is_named():
    with pytest.raises(UsageError, match="reduction='max'"), capture(small_net(), reduction="max"):
        pass


def test_unknown_retention():
    with (
        pytest.raises(UsageError, match="retain='quarter': allowed are 'exact'"),
        inloop.capture(nn.Linear(2, 2), retain="quarter"),
    ):
        pass
