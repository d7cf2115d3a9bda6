"""Hooks leave no trace, and a layer whose backward pass forms the examples' gradients trains as before."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import inloop
from inloop import capture
from inloop.alignment.capture import Recording, make_recorder
from inloop.alignment.kept import ExampleGradients
from tests.alignment.exactness import assert_exact, small_net, x
from tests.training import num_hooks

pytestmark = pytest.mark.usefixtures("nothing_is_small")


def test_a_forgotten_recorder_takes_its_hooks_along():
    model = small_net()
    recorder = make_recorder(model, Recording())
    recorder.start("mean")
    assert num_hooks(model) > 0
    del recorder
    gc.collect()
    assert num_hooks(model) == 0


def test_hooks_do_nothing_in_copies_of_the_model():
    model = small_net()
    with capture(model) as tape:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(x(5)).sum().backward()
        assert tape.calls == []
        model(x(5)).sum().backward()
        assert len(tape.calls) == 2


def test_a_recorder_leaves_no_hook_on_parameters():
    model = nn.Linear(3, 2)
    with capture(model):
        assert model.weight._post_accumulate_grad_hooks
    assert not model.weight._post_accumulate_grad_hooks


# ------------------------------------------------------------------ fused layers


LAYERS = {
    "conv2d": (nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=(2, 1)), (5, 3, 11, 12)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, bias=False), (5, 4, 9, 8)),
    "conv1d": (nn.Conv1d(3, 4, 5, padding=2), (5, 3, 30)),
    "conv3d": (nn.Conv3d(2, 3, 2), (5, 2, 6, 5, 4)),
    "linear": (nn.Linear(3, 4), (5, 20, 3)),
    "linear on two axes": (nn.Linear(3, 4, bias=False), (5, 4, 6, 3)),
}


def doubled(case):
    layer, shape = LAYERS[case]
    torch.manual_seed(0)
    return copy.deepcopy(layer).double(), torch.randn(shape, dtype=torch.float64)


def is_fused(output):
    return type(output.grad_fn).__name__ == "FusedBackward"


@pytest.mark.parametrize("case", LAYERS)
def test_training_is_the_same(case):
    """Output, gradients of x and of the parameters."""
    layer, x = doubled(case)
    plain_x, recorded_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(plain_x)
    out.square().sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with inloop.capture(layer, reduction="sum", verify=True) as tape:
        recorded = layer(recorded_x)
        assert is_fused(recorded)
        recorded.square().sum().backward()
    assert torch.equal(recorded, out)
    torch.testing.assert_close(recorded_x.grad, plain_x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected, rtol=1e-12, atol=1e-12)
    assert [type(call) for call in tape.calls] == [ExampleGradients]
    assert_exact(layer, x)


@pytest.mark.parametrize("case", LAYERS)
def test_it_can_be_differentiated_twice(case):
    layer, x = doubled(case)

    def penalty():
        gradients = torch.autograd.grad(layer(x).pow(3).sum(), list(layer.parameters()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), list(layer.parameters()))

    expected = penalty()
    with inloop.capture(layer, reduction="sum"):
        assert is_fused(layer(x))
        torch.testing.assert_close(penalty(), expected)


@pytest.mark.parametrize("case", ["conv2d", "linear"])
def test_activations_in_place(case):
    layer, x = doubled(case)
    layer(x).relu_().square().sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with inloop.capture(layer, reduction="sum", verify=True):
        layer(x).relu_().square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected)


@pytest.mark.parametrize("case", ["conv2d", "linear"])
def test_frozen_parameters_stay_without_gradient(case):
    layer, x = doubled(case)
    layer.weight.requires_grad_(False)
    with inloop.capture(layer, reduction="sum", verify=True) as tape:
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert set(tape.calls[0].parameter_names) == {"bias"}


def test_a_graph_may_outlive_its_tape():
    """Passes after the end are as without recording."""
    layer, x = doubled("conv2d")
    with inloop.capture(layer, reduction="sum") as tape:
        out = layer(x)
        out.sum().backward(retain_graph=True)
    first = layer.weight.grad.clone()
    layer.zero_grad()
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, first)
    assert len(tape.calls) == 1


def test_a_hook_on_the_output_is_seen():
    """What a user's hook makes of the gradient is what the examples' gradients are formed from."""
    layer, x = doubled("linear")
    with inloop.capture(layer, reduction="sum", verify=True) as tape:
        out = layer(x)
        out.register_hook(lambda gradient: 3 * gradient)
        out.sum().backward()
    torch.testing.assert_close(tape.align({n: p.grad for n, p in layer.named_parameters()}).sum(), _square(layer))


def _square(layer):
    return sum(p.grad.square().sum() for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # forward_ad itself
def test_other_kinds_of_differentiation_are_left_alone():
    layer, x = doubled("linear")
    with inloop.capture(layer, reduction="sum"):
        jacobian = torch.func.vmap(lambda row: layer(row.unsqueeze(0)))(x)
        with forward_ad.dual_level():
            dual = layer(forward_ad.make_dual(x, x))
            tangent = forward_ad.unpack_dual(dual).tangent
        gradient = torch.func.grad(lambda rows: layer(rows).sum())(x)
        layer(x).sum().backward()
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand_as(x))
    torch.testing.assert_close(jacobian.squeeze(1), layer(x))
    torch.testing.assert_close(tangent, x @ layer.weight.T)


def test_two_calls_of_a_layer():
    layer = nn.Linear(4, 4).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert_exact(model, torch.randn(5, 20, 4, dtype=torch.float64))
