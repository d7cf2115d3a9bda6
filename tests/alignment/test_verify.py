"""Gradients that the recorded examples do not add up to are refused, and the parameter is named."""

import pytest
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.errors import VerificationError
from tests.alignment.architectures import UnseenProduct
from tests.alignment.exactness import labels, small_net, x
from tests.training import num_hooks


def test_a_penalty_in_the_loss_is_named():
    model = small_net()
    with pytest.raises(VerificationError, match=r"(?s)'0.weight'.*penalty"), capture(model, verify=True):
        (F.cross_entropy(model(x(5)), labels()) + 0.01 * model[0].weight.square().sum()).backward()
    assert num_hooks(model) == 0


def test_gradients_that_were_there_before_are_named():
    model = small_net()
    model(x(5)).sum().backward()
    with pytest.raises(VerificationError, match="zero_grad"), capture(model, verify=True):
        model(x(5)).sum().backward()


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
        pytest.raises(VerificationError, match=r"'bypassed.weight'.*without calling its module"),
        capture(model, verify=True),
    ):
        model(x(5)).square().sum().backward()
