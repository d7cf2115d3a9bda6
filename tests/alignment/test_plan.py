"""Which modules are recorded, which layers count, and modules that cannot be recorded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from inloop import capture
from inloop.errors import UnsupportedLayerError, UsageError
from tests.alignment.architectures import ARCHITECTURES
from tests.alignment.exactness import N, assert_exact, random_direction, rule_names, small_net, x

# ------------------------------------------------------------------ which layers count


def test_layers_by_name_and_by_predicate():
    model = nn.Sequential(small_net(), nn.Linear(3, 2).double())
    direction = random_direction(model)

    def rewards(layers):
        with capture(model, layers=layers, verify=True) as tape:
            model.zero_grad()
            model(x_fixed).square().sum().backward()
        return tape.align(direction)

    x_fixed = x(5)
    torch.testing.assert_close(rewards(["0", "1"]), rewards(None))
    torch.testing.assert_close(rewards(["0"]) + rewards("1"), rewards(None))
    torch.testing.assert_close(rewards(lambda name, module: name == "1"), rewards(["1"]))
    assert not torch.allclose(rewards(["0.0"]), rewards(["0"]))


class Tied(nn.Module):
    """An embedding whose table is also the output layer's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.head = nn.Linear(5, 9)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)).cumsum(1))


def test_tied_weights():
    assert_exact(Tied().double(), torch.randint(0, 9, (N, 4)))


def test_a_part_of_a_tied_parameter():
    model = Tied().double()
    with capture(model, layers=["head"], verify=True) as tape:  # the other use is left out, so nothing can add up
        model(torch.randint(0, 9, (N, 4))).sum().backward()
    assert {call.name for call in tape.calls} == {"head"}


def test_a_layer_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="'encodr', which is no module"), capture(nn.Linear(2, 2), layers=["encodr"]):
        pass
    with pytest.raises(UsageError, match=r"Did you mean '0'\?"), capture(small_net(), layers=["0."]):
        pass


def test_a_part_of_a_black_box_cannot_be_chosen():
    model = nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True))
    with (
        pytest.raises(UsageError, match=r"part of '0' \(MultiheadAttention\).*small module"),
        capture(model, layers=["0.out_proj"]),
    ):
        pass


def test_a_bare_parameter_at_the_top_does_not_make_a_black_box_of_the_model():
    model, _ = ARCHITECTURES["vision transformer"]()
    assert set(rule_names(model)) == {
        "patches",
        "block.self_attn",
        "block.linear1",
        "block.linear2",
        "block.norm1",
        "block.norm2",
        "head",
    }


# ------------------------------------------------------------------ what cannot be recorded


def test_complex_parameters_are_refused_by_name():
    with pytest.raises(UnsupportedLayerError, match="its parameters are complex"):
        rule_names(nn.Linear(3, 2, dtype=torch.complex64))


def test_a_black_box_with_batchnorm_inside_is_refused_by_name():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.norm = nn.BatchNorm1d(5)

        def forward(self, batch):
            return self.norm(batch) * self.scale

    model = nn.Sequential(nn.Linear(5, 5), Mixed()).double()
    parametrize.register_parametrization(model[1], "scale", nn.Softplus())  # so it is run as a whole
    with pytest.raises(UnsupportedLayerError, match=r"'1' \(ParametrizedMixed\).*'norm'"), capture(model):
        model(x(5))
    assert_exact(model.eval(), x(5))


def test_a_forward_replaced_on_the_instance_is_refused_by_name():
    layer = nn.Linear(5, 3)
    layer.forward = lambda batch: F.linear(batch, layer.weight * 2, layer.bias)
    with pytest.raises(UnsupportedLayerError, match="replaced on the instance"):
        rule_names(layer)


def test_lazy_parameters_are_refused_until_they_exist():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(UnsupportedLayerError, match="'0'.*run one forward pass"):
        rule_names(model)
    model(torch.randn(2, 5))
    assert_exact(model.double(), x(5))
