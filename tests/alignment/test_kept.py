"""The forms in which calls are kept: gradients of examples where these are smaller than x and dout, and halves."""

import pytest
import torch
from torch import nn

import inloop
from inloop import InLoop, MixturePolicy
from inloop.alignment import rules
from inloop.alignment.call import LayerCall
from inloop.alignment.kept import ExampleGradients, Half, Halves
from tests.alignment.exactness import assert_exact, relative_error, rewards_and_oracle
from tests.alignment.replayed import MODELS, make

pytestmark = pytest.mark.usefixtures("nothing_is_small")

# ------------------------------------------------------------------ gradients of examples


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


def test_two_learners_on_layers_that_form_their_own_gradients():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    learners = [InLoop(net, MixturePolicy(2), update=False) for _ in range(2)]
    for _ in range(3):
        for learner in learners:
            learner.sample(8)
        loss = net(torch.randn(8, 20, 3, dtype=torch.float64)).square().mean()
        loss.backward()
        means = [learner.step(loss).reward_mean for learner in learners]
        net.zero_grad()
    assert means[0] == pytest.approx(means[1], rel=1e-12)


# ------------------------------------------------------------------ half precision


@pytest.mark.parametrize("name", [name for name in MODELS if name != "black box"])
def test_half_precision_loses_little(name):
    """2**-11 of a number; of a reward, which is a sum of many, less than a hundredth."""
    model, x = make(name)
    rewards_N, oracle_N = rewards_and_oracle(model, x, retain="half")
    assert 0 < relative_error(rewards_N, oracle_N) < 1e-2


def test_half_precision_keeps_gradients_of_any_size():
    """float16 alone has nothing below 6e-8."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(5, 4).double()
    for factor in (1e-30, 1.0, 1e30):
        with inloop.capture(model, reduction="sum", retain="half") as tape:
            (model(x).square().sum() * factor).backward()
        with inloop.capture(model, reduction="sum") as exact:
            (model(x).square().sum() * factor).backward()
        direction = {"0.weight": torch.randn(3, 4).double()}
        assert relative_error(tape.align(direction), exact.align(direction)) < 1e-2


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * torch.sigmoid(self.gate)


def test_a_rule_that_reads_the_parameters_is_kept_in_half_too(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @inloop.alignment_rule(Gate, parameters=("gate",), keeps_parameters=True)
    def align(call, direction):
        share = torch.sigmoid(call.layer.gate)
        return call.dot(call.args[0] * share * (1 - share) * direction["gate"])

    model, x = Gate(), torch.randn(6, 5)
    with inloop.capture(model, retain="half") as tape:
        model(x).square().mean().backward()
    (call,) = tape.calls
    assert isinstance(call.dout, Half)
    assert isinstance(call.args[0], Half)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5, 7), (1, 3_000_000)])
def test_a_half_is_close_and_takes_half_of_float32(shape):
    tensor = torch.randn(shape)
    half = Half.of(tensor)
    assert half.full().dtype == torch.float32
    assert half.shape == tensor.shape
    assert half.nbytes == tensor.nbytes
    assert half.values.nbytes == tensor.nbytes // 2
    close = tensor.abs() * 2.0**-11 + 2.0**-25 * (tensor.abs().max() if tensor.numel() else 0)
    assert bool(((half.full() - tensor).abs() <= close).all())


def test_zeros_and_infinities_survive_as_halves():
    assert torch.equal(Half.of(torch.zeros(3)).full(), torch.zeros(3))
    assert not bool(Half.of(torch.tensor([1.0, float("inf")])).full().isfinite().all())
    assert not bool(Half.of(torch.tensor([1.0, float("nan")])).full().isfinite().all())


def test_what_layers_share_is_halved_once():
    halves, shared = Halves(), torch.randn(4, 3)
    assert halves(shared) is halves(shared.detach())
    assert halves(shared) is not halves(shared[:2])
    before = halves(shared)
    shared.mul_(2)
    assert halves(shared) is not before
    whole = torch.arange(3)
    assert halves(whole) is whole


def test_a_freed_tensor_is_not_taken_for_its_successor():
    halves = Halves()
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        assert float(halves(tensor).full()[0]) == value
