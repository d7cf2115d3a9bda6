"""Lower precisions, with the tolerance that each is good for (of the largest reward)."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment.call import LayerCall
from inloop.alignment.kept import ExampleGradients
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


class Attention(nn.Module):
    """Three layers share an input, as queries, keys and values do."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 4)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.out(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))


def under_autocast(model, x, dtype=torch.bfloat16):
    """The tape of a pass, and the loss of each example of the same pass."""
    with capture(model, reduction="sum") as tape:
        with torch.autocast("cpu", dtype=dtype):
            out = model(x).float()
        losses_N = (out.square() * torch.linspace(-1, 1, out[0].numel()).view(out[0].shape)).flatten(1).sum(1)
        losses_N.sum().backward(retain_graph=True)
    return tape, losses_N


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize(
    ("model", "shape", "forms"),
    [
        (Attention(), (6, 16, 8), {"norm": torch.float32, "q": torch.bfloat16, "out": torch.bfloat16}),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
            (6, 3, 16, 16),
            {"0": torch.bfloat16, "1": torch.float32},
        ),
    ],
)
def test_gradients_of_examples_under_autocast(model, shape, forms):
    """Those that sum over positions alone are in float32. Products of matrices are summed in float32, and rounded once."""
    direction = random_direction(model)
    tape, losses_N = under_autocast(model, torch.randn(shape))
    kept = {call.name: call.gradients["weight"].dtype for call in tape.calls if isinstance(call, ExampleGradients)}
    assert kept.items() >= forms.items()
    oracle_N = align_by_loss(model, losses_N, direction)
    assert tape.align(direction).dtype == torch.float32
    assert relative_error(tape.align(direction), oracle_N) < BFLOAT16


def test_autocast_keeps_the_input_that_a_layer_sees():
    model, x = Attention(), torch.randn(6, 2, 8)  # two positions: no gradient is smaller than its layer's input
    tape, _ = under_autocast(model, x)
    inputs = {call.name: call.args[0] for call in tape.calls if isinstance(call, LayerCall)}
    assert inputs["q"].dtype == torch.bfloat16
    assert inputs["q"].data_ptr() == inputs["k"].data_ptr() == inputs["v"].data_ptr()
    torch.testing.assert_close(inputs["q"], model.norm(x).bfloat16())


def test_an_input_that_changes_between_two_layers_is_cast_again():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = x.clone()
            return self.a(x) + self.b(x.mul_(2))

    model, x = Model(), torch.randn(5, 4)
    tape, _ = under_autocast(model, x)
    inputs = {call.name: call.args[0] for call in tape.calls}
    assert torch.equal(inputs["b"], 2 * inputs["a"])


@pytest.mark.usefixtures("nothing_is_small")
def test_float16_keeps_no_gradients_of_examples():
    tape, _ = under_autocast(Attention(), torch.randn(6, 16, 8), torch.float16)
    assert not any(isinstance(call, ExampleGradients) for call in tape.calls)


def test_a_buffer_that_numpy_fills_again_is_cast_again():
    buffer = np.zeros((4, 3), np.float32)
    x, model = torch.from_numpy(buffer), nn.Linear(3, 2)
    tapes = []
    for value in (1.0, 2.0):
        buffer[:] = value
        tapes.append(under_autocast(model, x)[0])
    assert [float(tape.calls[0].args[0].mean()) for tape in tapes] == [1.0, 2.0]


def test_an_input_of_inference_mode_is_cast():
    with torch.inference_mode():
        x = torch.randn(4, 3)
    model = nn.Linear(3, 2)
    direction = random_direction(model)
    tape, losses_N = under_autocast(model, x)
    assert relative_error(tape.align(direction), align_by_loss(model, losses_N, direction)) < BFLOAT16
