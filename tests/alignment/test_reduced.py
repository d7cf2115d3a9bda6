"""Where an example's gradient is smaller than x and dout it is formed at once; the rewards are the same."""

import pytest
import torch
from torch import nn

import inloop
from inloop.alignment import rules
from inloop.alignment.call import LayerCall
from inloop.alignment.kept import ExampleGradients
from tests.alignment.exactness import assert_exact

CASES = {
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 9, 8)),
    "stride, dilation": (nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=(2, 1)), (5, 3, 11, 12)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, bias=False), (5, 4, 9, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), (5, 4, 9, 8)),
    "conv1d": (nn.Conv1d(3, 4, 5, padding=2), (5, 3, 30)),
    "conv3d": (nn.Conv3d(2, 3, 2), (5, 2, 6, 5, 4)),
    "1 x 1": (nn.Conv2d(3, 4, 1, stride=2), (5, 3, 9, 8)),
    "group norm": (nn.GroupNorm(2, 4), (5, 4, 6, 6)),
    "layer norm": (nn.LayerNorm(6), (5, 7, 6)),
    "layer norm, two axes": (nn.LayerNorm((3, 6)), (5, 7, 3, 6)),
    "layer norm without bias": (nn.LayerNorm(6, bias=False), (5, 7, 6)),
    "rms norm": (nn.RMSNorm(6), (5, 7, 6)),
    "linear on positions": (nn.Linear(3, 4), (5, 20, 3)),
    "linear on two axes of positions": (nn.Linear(3, 4, bias=False), (5, 4, 6, 3)),
}


def recorded(layer, shape):
    with inloop.capture(layer) as tape:
        layer(torch.randn(shape, dtype=torch.float64)).square().mean().backward()
    return tape


@pytest.mark.parametrize("case", CASES)
def test_reduced_calls_are_exact(case, monkeypatch):
    monkeypatch.setattr(rules, "MOST", 1e9)
    layer, shape = CASES[case]
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    assert isinstance(recorded(layer, shape).calls[0], ExampleGradients)
    assert_exact(layer, torch.randn(shape, dtype=torch.float64))


def test_a_shortcut_counts_on_its_input_alone():
    """The gradient of a sum is one tensor for both terms: the branch holds it anyway."""
    assert isinstance(recorded(nn.Conv2d(3, 4, 1).double(), (5, 3, 3, 3)).calls[0], ExampleGradients)
    assert isinstance(recorded(nn.Conv2d(3, 12, 1).double(), (5, 3, 3, 3)).calls[0], LayerCall)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (5, 3, 9, 8)),
        (nn.Conv2d(3, 4, 3, padding="same"), (5, 3, 9, 8)),
        (nn.ConvTranspose2d(3, 4, 3), (5, 3, 9, 8)),
        (nn.Linear(3, 4), (5, 3)),
    ],
)
def test_what_has_no_form_is_kept_whole(layer, shape, monkeypatch):
    monkeypatch.setattr(rules, "MOST", 1e9)
    assert isinstance(recorded(layer.double(), shape).calls[0], LayerCall)


def test_only_what_becomes_smaller_is_reduced():
    """A wide convolution on few positions keeps x and dout, a narrow one on many its gradients."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(8), nn.Conv2d(8, 64, 3, padding=1)).double()
    kinds = {call.name: type(call) for call in recorded(model, (2, 3, 32, 32)).calls}
    assert kinds == {"0": ExampleGradients, "2": LayerCall}


def test_frozen_parameters_are_left_out():
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    layer.weight.requires_grad_(False)
    (call,) = recorded(layer, (5, 3, 9, 8)).calls
    assert set(call.gradients) == {"bias"}


def test_a_gradient_that_cancels_within_an_example_is_no_error():
    """A bias before GroupNorm with one group: its gradient is nothing but rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.Flatten(), nn.Linear(4 * 256, 3))
    with inloop.capture(model, verify=True) as tape:
        nn.functional.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.arange(8) % 3).backward()
    assert isinstance(next(call for call in tape.calls if call.name == "0"), ExampleGradients)


def test_backward_twice_counts_twice():
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    x = torch.randn(5, 3, 9, 8, dtype=torch.float64)
    direction = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    rewards = []
    for times in (1, 2):
        with inloop.capture(layer) as tape:
            loss = layer(x).square().mean()
            for _ in range(times):
                loss.backward(retain_graph=True)
        rewards.append(tape.align(direction))
    torch.testing.assert_close(2 * rewards[0], rewards[1])
