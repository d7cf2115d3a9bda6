"""Rules for torch's layers: which are linear or affine in their parameters, and how to form per-example gradients.

Axes: N examples, C channels, O output channels, D features.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.alignment import sizes
from inloop.alignment.call import LayerCall
from inloop.alignment.named import is_affine_in_its_weight
from inloop.alignment.rules import (
    PerExample,
    Wanted,
    affine_in_parameters,
    alignment_rule,
    alignment_rule_by_name,
    linear_in_parameters,
)
from inloop.alignment.sums import Dot

# ---------------------------------------------------------------- gradients of the examples


def _space_last(call: LayerCall) -> Tensor:
    return call.dout.flatten(2).transpose(1, 2)


def _convolution_weight(call: LayerCall) -> Tensor:
    """Form the gradients; on a CPU eight examples at a time, or one if the weight is large, which is faster."""
    layer, x, dout = cast(nn.Conv2d, call.layer), cast(Tensor, call.args[0]), call.dout
    some = len(x) if x.device.type != "cpu" else 8 if layer.weight.numel() < 1 << 16 else 1
    gradients = dout.new_empty((len(x), *layer.weight.shape))
    for start in range(0, len(x), some):
        part = slice(start, start + some)
        gradients[part] = _grouped_convolution_weight(layer, x[part], dout[part])
    return gradients


def _grouped_convolution_weight(layer: nn.Conv2d, x: Tensor, dout: Tensor) -> Tensor:
    """Return the weight gradient of one convolution whose groups are the examples, [N, O, C, *kernel]."""
    n, weight = len(x), layer.weight
    shape = (n * weight.shape[0], *weight.shape[1:])
    unused = torch.empty(1, dtype=x.dtype, device=x.device).expand(shape)  # the gradient does not depend on the weight
    _, gradient, _ = torch.ops.aten.convolution_backward(
        dout.reshape(1, n * dout.shape[1], *dout.shape[2:]),
        x.reshape(1, n * x.shape[1], *x.shape[2:]),
        unused,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0] * len(layer.kernel_size),
        n * layer.groups,
        [False, True, False],
    )
    return cast(Tensor, gradient).view(n, *weight.shape)


def _convolution_backward(
    layer: nn.Module, x: Tensor, weight: Tensor, dout: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    conv = cast(nn.Conv2d, layer)
    geometry = (conv.stride, conv.padding, conv.dilation, False, [0] * len(conv.kernel_size), conv.groups)
    gradients = torch.ops.aten.convolution_backward(dout, x, weight, [len(weight)], *geometry, list(wanted))
    return cast(tuple[Tensor | None, Tensor | None, Tensor | None], gradients)


def _plain_padding(call: LayerCall) -> bool:
    layer = cast(nn.Conv2d, call.layer)
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_pointwise(call: LayerCall) -> bool:
    """Whether the kernel is 1 x 1: likely a shortcut, and both terms of a sum have the same tensor as gradient."""
    return set(cast(nn.Conv2d, call.layer).kernel_size) == {1}


def _group_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.GroupNorm, call.layer), call.args
    return (call.dout * F.group_norm(x, layer.num_groups, eps=layer.eps)).flatten(2).sum(dim=2)


def _features_last(call: LayerCall) -> Tensor:
    return _as_features(call, call.dout)


def _as_features(call: LayerCall, values: Tensor) -> Tensor:
    """Reshape [N, ..., *normalized_shape] to one axis for all positions."""
    return values.reshape(len(values), -1, *cast(nn.LayerNorm, call.layer).normalized_shape)


def _layer_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.LayerNorm, call.layer), call.args
    normalized = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return _as_features(call, call.dout * normalized).sum(dim=1)


def _rms_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.RMSNorm, call.layer), call.args
    normalized = F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)
    return _as_features(call, call.dout * normalized).sum(dim=1)


def _linear_weight(call: LayerCall) -> Tensor:
    """Return ``sum_t dout_t x_tᵀ``, [N, O, D]."""
    (x,) = call.args
    return torch.bmm(call.dout.flatten(1, -2).transpose(1, 2), x.flatten(1, -2))


def _linear_backward(
    layer: nn.Module, x: Tensor, weight: Tensor, dout: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = dout.flatten(0, -2)
    dx = dout @ weight if wanted[0] else None
    return dx, rows.t() @ x.flatten(0, -2) if wanted[1] else None, rows.sum(dim=0) if wanted[2] else None


def _rows(call: LayerCall) -> Tensor:
    return call.dout.flatten(1, -2)


def _has_positions(call: LayerCall) -> bool:
    return call.dout.dim() > 2


CONVOLUTION = PerExample(
    _convolution_weight, _space_last, _plain_padding, _is_pointwise, _convolution_backward, multiplies=True
)
GROUP_NORM = PerExample(_group_norm_weight, _space_last, _has_positions)
LAYER_NORM = PerExample(_layer_norm_weight, _features_last)
RMS_NORM = PerExample(_rms_norm_weight, _features_last)
LINEAR = PerExample(
    _linear_weight, _rows, _has_positions, backward=_linear_backward, most_if_fused=1.25, multiplies=True
)

# ---------------------------------------------------------------- rules


def _channels_and_space(layer: nn.Module) -> int:
    return 1 + len(cast(nn.Conv2d, layer).kernel_size)


@alignment_rule(nn.Linear, per_example=LINEAR, separable=True, casts_input=True)
def align_linear(call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor | Dot:
    """Return ``<dout_i, x_i gᵀ>`` or, for a layer that widens, ``<dout_i g, x_i>``, whose product is smaller."""
    layer, dout = cast(nn.Linear, call.layer), call.dout
    precise = dout.dtype in (torch.float32, torch.float64) and not call.autocast.enabled
    if (
        layer.out_features <= layer.in_features
        or dout.nbytes <= sizes.SMALL_PRODUCT
        or not precise
        or call.absolute
        or call.batch_axis
    ):
        return linear_in_parameters(call, direction)
    (x,) = (*call.args, *call.kwargs.values())
    contributions_N: Tensor = ((dout @ direction["weight"]) * x).flatten(1).sum(dim=1)
    if layer.bias is not None:
        positions = tuple(range(1, dout.dim() - 1))
        contributions_N += (dout.sum(dim=positions) if positions else dout) @ direction["bias"]
    return contributions_N


alignment_rule(nn.Bilinear)(linear_in_parameters)
alignment_rule(nn.GroupNorm, per_example=GROUP_NORM, separable=True)(linear_in_parameters)

alignment_rule(
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    example_dims=_channels_and_space,
    per_example=CONVOLUTION,
    separable=True,
    casts_input=True,
)(linear_in_parameters)
alignment_rule(
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    example_dims=_channels_and_space,
    separable=True,
    casts_input=True,
)(linear_in_parameters)

# Batch statistics are those of step t: recomputed from the recorded input, or the running ones in eval mode.
alignment_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)(linear_in_parameters)

alignment_rule(nn.InstanceNorm1d, example_dims=2)(linear_in_parameters)
alignment_rule(nn.InstanceNorm2d, example_dims=3)(linear_in_parameters)
alignment_rule(nn.InstanceNorm3d, example_dims=4)(linear_in_parameters)


def _features(layer: nn.Module) -> int:
    return len(cast(nn.LayerNorm, layer).normalized_shape)


alignment_rule(nn.LayerNorm, example_dims=_features, per_example=LAYER_NORM, separable=True)(linear_in_parameters)
alignment_rule(nn.RMSNorm, example_dims=_features, per_example=RMS_NORM, separable=True)(linear_in_parameters)

alignment_rule(nn.PReLU, parameters=("weight",), example_dims=0)(affine_in_parameters)


@alignment_rule(nn.Embedding, parameters=("weight",), example_dims=0)
def align_embedding(call: LayerCall, direction: Mapping[str, Tensor]) -> Dot:
    """Return ``sum_t <dout_it, g[id_it]>``: the lookup is linear in its table. Three options need care.

    The padding row receives no gradient. ``scale_grad_by_freq`` divides each row's gradient by its count in the batch.
    ``max_norm`` rescales the table before the lookup, but must not rescale the direction.
    """
    layer = cast(nn.Embedding, call.layer)
    (ids,) = (*call.args, *call.kwargs.values())
    rows = call.run(direction, max_norm=None)
    if layer.padding_idx is not None:
        rows = rows * (ids != layer.padding_idx).unsqueeze(-1)
    if layer.scale_grad_by_freq:
        rows = rows / torch.bincount(ids.flatten())[ids].unsqueeze(-1)
    return call.dot(rows)


@alignment_rule(
    nn.EmbeddingBag,
    parameters=("weight",),
    example_dims=0,
    when=lambda layer: layer.mode != "max" and not layer.scale_grad_by_freq,
)
def align_embedding_bag(call: LayerCall, direction: Mapping[str, Tensor]) -> Dot:
    """Return ``<dout_i, sum or mean of g over bag i>``; the bag leaves out its padding itself."""
    return call.dot(call.run(direction, max_norm=None))


# Hugging Face's own layers. Its many RMSNorms scale by weight or by 1 + weight; both are affine. One scales before it normalises.
alignment_rule_by_name("transformers", "Conv1D", ("weight", "bias"), linear_in_parameters)
alignment_rule_by_name(
    "transformers", "RMSNorm", ("weight",), affine_in_parameters, partial(is_affine_in_its_weight, is_linear=False)
)
alignment_rule_by_name(
    "transformers", "T5LayerNorm", ("weight",), linear_in_parameters, partial(is_affine_in_its_weight, is_linear=True)
)
