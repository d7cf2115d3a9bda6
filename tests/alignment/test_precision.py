"""Lower precisions, with the tolerance that each is good for (of the largest reward)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment.oracles import align_by_loss
from inloop.errors import VerificationError
from tests.alignment.exactness import random_direction, relative_error

FLOAT32, BFLOAT16 = 1e-5, 3e-2


def net():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2)),
        *(nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 16), nn.Tanh(), nn.Linear(16, 4)),
    )


@pytest.fixture
def problem():
    model = net()
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))
    direction = random_direction(model)
    exact = copy.deepcopy(model).double()
    losses_N = F.cross_entropy(exact(x.double()), y, reduction="none")
    oracle_N = align_by_loss(exact, losses_N, {name: value.double() for name, value in direction.items()})
    return model, x, y, direction, oracle_N


def test_float32(problem):
    model, x, y, direction, oracle_N = problem
    with capture(model, verify=True) as tape:
        F.cross_entropy(model(x), y).backward()
    assert relative_error(tape.align(direction).double(), oracle_N) < FLOAT32


def test_bfloat16(problem):
    """Dot products are accumulated in float32; what is lost is lost in the activations."""
    model, x, y, direction, oracle_N = problem
    model.bfloat16()
    with capture(model, verify=True) as tape:
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    rewards_N = tape.align({name: value.bfloat16() for name, value in direction.items()})
    assert rewards_N.dtype == torch.float32
    assert relative_error(rewards_N.double(), oracle_N) < BFLOAT16


def test_autocast(problem):
    model, x, y, direction, oracle_N = problem
    with capture(model, verify=True) as tape:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    assert any(call.dout.dtype == torch.bfloat16 for call in tape.calls)
    assert relative_error(tape.align(direction).double(), oracle_N) < BFLOAT16  # also outside the autocast block


def test_black_box_under_autocast():
    model = nn.LSTM(6, 5, batch_first=True)
    x = torch.randn(8, 4, 6)
    direction = random_direction(model)
    with capture(model, reduction="sum", verify=True) as tape:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)[0].float().square().sum()
        loss.backward()
    losses_N = model(x)[0].square().flatten(1).sum(1)
    assert relative_error(tape.align(direction), align_by_loss(model, losses_N, direction)) < BFLOAT16


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_float16_autocast_takes_directions_of_any_size(problem, scale):
    """Raw gradients are often smaller than what float16 can hold."""
    model, x, _, direction, _ = problem
    with capture(model, reduction="sum") as tape:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().sum()
        loss.backward()
    unscaled_N = tape.align(direction)
    scaled_N = tape.align({name: value * scale for name, value in direction.items()})
    assert relative_error(scaled_N / scale, unscaled_N) < BFLOAT16


def test_a_norm_whose_gradient_torch_adds_up_in_bfloat16():
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    weights = torch.randn(8)
    with pytest.raises(VerificationError, match="adds up the gradients of norms"), capture(model):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.randn(4, 512, 16))
        (out * weights).sum((1, 2)).mean().backward()
