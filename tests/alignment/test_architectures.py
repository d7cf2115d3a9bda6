"""Whatever people build is exact, without their doing anything."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inloop import capture
from inloop.alignment import call as call_module
from inloop.alignment.kept import ExampleGradients
from inloop.alignment.oracles import align_by_loss
from tests.alignment.architectures import ARCHITECTURES, Model, N
from tests.alignment.exactness import assert_exact, per_example_losses, random_direction, relative_error


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, reduction):
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    assert_exact(model.double(), *inputs, reduction=reduction)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_recomputed(name):
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    assert_exact(model.double(), *inputs, retain="recompute")


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_that_form_gradients_themselves(reentrant):
    """Recomputing a forward pass must put the same nodes into the graph."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1)).double()
    model = Model(lambda m, x: m.out(checkpoint(m.block, m.stem(x), use_reentrant=reentrant)), block=block)
    model.stem, model.out = nn.Conv2d(3, 3, 3).double(), nn.Conv2d(3, 2, 3).double()
    x = torch.randn(N, 3, 12, 12, dtype=torch.float64)
    direction = random_direction(model)
    with capture(model, verify=True) as tape:
        per_example_losses(model(x)).mean().backward()
    assert all(isinstance(call, ExampleGradients) for call in tape.calls)
    oracle_N = align_by_loss(model, per_example_losses(model.out(block(model.stem(x)))), direction)
    assert relative_error(tape.align(direction), oracle_N) < 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_in_parts(name, monkeypatch):
    """Large calls are aligned a few examples at a time."""
    monkeypatch.setattr(call_module, "_PART_BYTES", 64)
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    assert_exact(model.double(), *inputs)
