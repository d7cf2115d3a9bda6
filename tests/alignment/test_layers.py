"""Every layer with a rule, with all its options, equals one backward pass for each example (float64, 1e-9)."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from inloop.errors import UnsupportedLayerError
from tests.alignment.exactness import assert_exact, random_direction, rewards_and_oracle, rule_names

N = 4


def x(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


LINEAR_LAYERS = {
    "Linear": (lambda: nn.Linear(5, 3), lambda: x(5)),
    "Linear without bias": (lambda: nn.Linear(5, 3, bias=False), lambda: x(5)),
    "Linear on positions": (lambda: nn.Linear(5, 3), lambda: x(2, 7, 5)),
    "Linear to one feature": (lambda: nn.Linear(5, 1), lambda: x(5)),
    "Linear that widens": (lambda: nn.Linear(3, 5), lambda: x(3)),
    "Linear that widens, on positions": (lambda: nn.Linear(3, 90), lambda: x(2, 7, 3)),
    "Linear that widens, without bias": (lambda: nn.Linear(3, 90, bias=False), lambda: x(7, 3)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), lambda: x(4, 11)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3), lambda: x(4, 7, 6)),
    "Conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), lambda: x(4, 5, 5)),
    "Conv2d same": (lambda: nn.Conv2d(4, 6, (2, 4), padding="same"), lambda: x(4, 7, 6)),
    "Conv2d valid": (lambda: nn.Conv2d(4, 6, (2, 4), padding="valid"), lambda: x(4, 7, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, (1, 3, 2), stride=(1, 2, 1), padding=1), lambda: x(2, 3, 5, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), lambda: x(4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=2), lambda: x(4, 4, 3)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2, bias=False), lambda: x(2, 2, 3, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda: x(3, 6)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm([3, 6]), lambda: x(3, 6)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(6, bias=False), lambda: x(6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), lambda: x(3, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), lambda: x(6, 3, 3)),
    "GroupNorm on vectors": (lambda: nn.GroupNorm(3, 6), lambda: x(6)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda: x(4, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), lambda: x(4, 5, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), lambda: x(2, 3, 2, 3)),
    "InstanceNorm tracking": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: x(4, 5, 3),
    ),
    "InstanceNorm eval": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(),
        lambda: x(4, 5, 3),
    ),
    "BatchNorm1d eval": (lambda: nn.BatchNorm1d(5).eval(), lambda: x(5)),
    "BatchNorm2d eval": (lambda: nn.BatchNorm2d(5).eval(), lambda: x(5, 2, 3)),
    "BatchNorm3d eval": (lambda: nn.BatchNorm3d(5).eval(), lambda: x(5, 2, 3, 2)),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", LINEAR_LAYERS)
def test_layer_that_is_linear_in_its_parameters(case, reduction):
    make_layer, make_input = LINEAR_LAYERS[case]
    layer = make_layer().double()
    with torch.no_grad():  # weights and running statistics away from their initial ones and zeros
        for value in itertools.chain(layer.parameters(), layer.buffers()):
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
    assert rule_names(layer) == {"": "align_linear" if isinstance(layer, nn.Linear) else "linear_in_parameters"}
    assert_exact(layer, make_input(), reduction=reduction, batchnorm_affine=True)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("layer_type", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_every_padding_mode(layer_type, mode):
    space = {nn.Conv1d: (6,), nn.Conv2d: (6, 5), nn.Conv3d: (4, 5, 4)}[layer_type]
    assert_exact(layer_type(4, 2, 3, padding=2, padding_mode=mode, groups=2).double(), x(4, *space))


@given(data=st.data())
def test_any_convolution(data):
    groups = data.draw(st.integers(1, 3), "groups")
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)), "kernel")
    layer = nn.Conv2d(
        groups * data.draw(st.integers(1, 2), "in"),
        groups * data.draw(st.integers(1, 2), "out"),
        kernel,
        stride=data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)), "stride"),
        padding=data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)), "padding"),
        dilation=data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)), "dilation"),
        groups=groups,
        bias=data.draw(st.booleans(), "bias"),
        padding_mode=data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]), "mode"),
    ).double()
    batch = data.draw(st.integers(1, 3), "batch")
    space = (data.draw(st.integers(5, 8), "height"), data.draw(st.integers(5, 8), "width"))
    assert_exact(layer, torch.randn(batch, layer.in_channels, *space, dtype=torch.float64))


@given(data=st.data())
def test_any_transposed_convolution(data):
    groups = data.draw(st.integers(1, 3), "groups")
    stride = data.draw(st.integers(1, 3), "stride")
    dilation = data.draw(st.integers(1, 2), "dilation")
    layer = nn.ConvTranspose2d(
        groups * data.draw(st.integers(1, 2), "in"),
        groups * data.draw(st.integers(1, 2), "out"),
        data.draw(st.tuples(st.integers(2, 3), st.integers(2, 3)), "kernel"),
        stride=stride,
        padding=data.draw(st.integers(0, 1), "padding"),
        output_padding=data.draw(st.integers(0, max(stride, dilation) - 1), "output padding"),
        groups=groups,
        bias=data.draw(st.booleans(), "bias"),
        dilation=dilation,
    ).double()
    batch = data.draw(st.integers(1, 3), "batch")
    assert_exact(layer, torch.randn(batch, layer.in_channels, 3, 4, dtype=torch.float64))


def test_transposed_convolution_with_an_output_size():
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2).double()
    assert_exact(layer, x(2, 4, 4), [10, 10])


@given(
    batch=st.integers(1, 4),
    positions=st.lists(st.integers(1, 3), max_size=3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
)
def test_any_linear(batch, positions, sizes, bias):
    layer = nn.Linear(*sizes, bias=bias).double()
    assert_exact(layer, torch.randn(batch, *positions, sizes[0], dtype=torch.float64))


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias):
    layer = nn.Bilinear(3, 4, 2, bias=bias).double()
    assert rule_names(layer) == {"": "linear_in_parameters"}
    assert_exact(layer, x(3), x(4))


@pytest.mark.parametrize(("num_parameters", "shape"), [(1, (5,)), (5, (5, 3)), (1, ())])
def test_prelu_is_affine(num_parameters, shape):
    layer = nn.PReLU(num_parameters).double()
    assert rule_names(layer) == {"": "affine_in_parameters"}
    assert_exact(layer, x(*shape))


EMBEDDING_OPTIONS = {
    "plain": {},
    "padding": {"padding_idx": 0},
    "negative padding": {"padding_idx": -6},
    "sparse": {"sparse": True},
    "max_norm": {"max_norm": 0.5},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
    "all": {"padding_idx": 1, "max_norm": 0.5, "scale_grad_by_freq": True},
}


@pytest.mark.parametrize("option", EMBEDDING_OPTIONS)
@pytest.mark.parametrize("shape", [(N,), (N, 7), (N, 2, 3)])
def test_embedding(option, shape):
    layer = nn.Embedding(6, 3, **EMBEDDING_OPTIONS[option]).double()
    ids = torch.randint(0, 6, shape)
    ids.view(-1)[:2] = 0  # the padding row is met, and an id is repeated
    assert rule_names(layer) == {"": "align_embedding"}
    if layer.scale_grad_by_freq:
        # The count is over the batch, so one backward an example through the same graph still holds.
        rewards_N, oracle_N = rewards_and_oracle(layer, ids)
        counts = torch.bincount(ids.flatten(), minlength=6)
        assert counts.max() > 1
        torch.testing.assert_close(rewards_N, oracle_N, rtol=1e-9, atol=1e-12)
    else:
        assert_exact(layer, ids)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"max_norm": 0.5}, {"sparse": True}], ids=str)
def test_embedding_bag(mode, options):
    layer = nn.EmbeddingBag(6, 3, mode=mode, **options).double()
    ids = torch.tensor([[0, 1, 1], [2, 2, 2], [5, 0, 3], [4, 1, 0]])  # repeated ids in a bag, and padding
    assert rule_names(layer) == {"": "align_embedding_bag"}
    assert_exact(layer, ids)
    assert_exact(layer, ids.flatten(), torch.tensor([0, 2, 5, 9]))  # offsets


def test_embedding_bag_with_weights():
    layer = nn.EmbeddingBag(6, 3, mode="sum").double()
    ids = torch.randint(0, 6, (N, 3))
    assert_exact(layer, ids, forward=lambda m: m(ids, per_sample_weights=x(3)))


def test_embedding_bag_max_goes_through_the_fallback():
    layer = nn.EmbeddingBag(6, 3, mode="max").double()
    assert rule_names(layer) == {"": "run again"}
    assert_exact(layer, torch.randint(0, 6, (N, 5)))


def test_embedding_bag_with_scale_grad_by_freq_is_refused_by_name():
    with pytest.raises(UnsupportedLayerError, match=r"'' \(EmbeddingBag\): scale_grad_by_freq"):
        rule_names(nn.EmbeddingBag(6, 3, scale_grad_by_freq=True))


def test_keyword_inputs():
    layer = nn.Linear(5, 3).double()
    batch = x(5)
    assert_exact(layer, forward=lambda m: m(input=batch))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (3,)),
        (nn.Conv2d(2, 3, 1), (2, 4, 4)),
        (nn.ConvTranspose1d(2, 3, 1), (2, 4)),
        (nn.LayerNorm([2, 3]), (2, 3)),
        (nn.InstanceNorm2d(2, affine=True), (2, 4, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_input_without_a_batch_axis_is_refused(layer, shape):
    from inloop import capture

    with pytest.raises(UnsupportedLayerError, match="examples first|examples in their order"), capture(layer):
        layer(torch.randn(shape))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("layer", [nn.Linear(6, 3), nn.LayerNorm(6), nn.Conv1d(6, 2, 1)], ids=str)
def test_a_frozen_parameter_counts_as_zero(layer, frozen):
    layer = layer.double()
    layer.requires_grad_(True)
    getattr(layer, frozen).requires_grad_(False)
    batch = x(6, 1) if isinstance(layer, nn.Conv1d) else x(6)
    assert_exact(layer, batch)
    layer.requires_grad_(True)


def test_the_direction_may_be_sparse():
    from inloop import capture

    layer = nn.Embedding(6, 3).double()
    direction = random_direction(layer)
    with capture(layer) as tape:
        layer(torch.randint(0, 6, (N, 2))).square().mean().backward()
    dense = tape.align(direction)
    torch.testing.assert_close(tape.align({"weight": direction["weight"].to_sparse(1)}), dense)
