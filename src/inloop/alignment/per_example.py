"""Per-example gradients of layers with few parameters. Axes: N examples, C channels, O output channels, D features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.alignment.call import LayerCall

Form = Callable[[LayerCall], Tensor]


@dataclass(frozen=True, slots=True)
class PerExample:
    """How the gradients ``∂l_i/∂weight`` and ``∂l_i/∂bias``, [N, *shape], follow from x and dout.

    Attributes:
        positions: A view of dout with the positions that share the bias on one axis, [N, positions, *shape of the bias].
        when: Whether it holds for this call.
        shares_dout: Whether another call is likely to hold the same dout, so that letting go of it frees nothing.
    """

    weight: Form
    positions: Form
    when: Callable[[LayerCall], bool] = lambda call: True
    shares_dout: Callable[[LayerCall], bool] = lambda call: False

    def gradient(self, parameter: str, call: LayerCall) -> Tensor:
        return self.weight(call) if parameter == "weight" else self.positions(call).sum(dim=1)

    def bias_magnitude(self, call: LayerCall) -> Tensor:
        """About the bias gradient with magnitudes added up instead of values, from every 16th position if there are many.

        It is the scale of a rounding error, so an estimate will do.
        """
        positions = self.positions(call)
        every = 16 if positions.shape[1] >= 256 else 1
        return every * positions[:, ::every].abs().sum(dim=1)


def _space_last(call: LayerCall) -> Tensor:
    return call.dout.flatten(2).transpose(1, 2)


def _convolution_weight(call: LayerCall) -> Tensor:
    """On a CPU a few examples at a time, which is faster: eight if the weight is small, else one."""
    layer, x, dout = cast(nn.Conv2d, call.layer), cast(Tensor, call.args[0]), call.dout
    some = len(x) if x.device.type != "cpu" else 8 if layer.weight.numel() < 1 << 16 else 1
    gradients = x.new_empty(len(x), *layer.weight.shape)
    for start in range(0, len(x), some):
        part = slice(start, start + some)
        gradients[part] = _grouped_convolution_weight(layer, x[part], dout[part])
    return gradients


def _grouped_convolution_weight(layer: nn.Conv2d, x: Tensor, dout: Tensor) -> Tensor:
    """The weight gradient of one convolution whose groups are the examples, [N, O, C, *kernel]."""
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


def _plain_padding(call: LayerCall) -> bool:
    layer = cast(nn.Conv2d, call.layer)
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_pointwise(call: LayerCall) -> bool:
    """A shortcut, most likely: the gradient of a sum is the same tensor for both its terms."""
    return set(cast(nn.Conv2d, call.layer).kernel_size) == {1}


def _group_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.GroupNorm, call.layer), call.args
    return (call.dout * F.group_norm(x, layer.num_groups, eps=layer.eps)).flatten(2).sum(dim=2)


def _features_last(call: LayerCall) -> Tensor:
    return _as_features(call, call.dout)


def _as_features(call: LayerCall, values: Tensor) -> Tensor:
    """[N, ..., *normalized_shape] with one axis for all positions."""
    return values.reshape(len(values), -1, *cast(nn.LayerNorm, call.layer).normalized_shape)


def _layer_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.LayerNorm, call.layer), call.args
    return _as_features(call, call.dout * F.layer_norm(x, layer.normalized_shape, eps=layer.eps)).sum(dim=1)


def _rms_norm_weight(call: LayerCall) -> Tensor:
    layer, (x,) = cast(nn.RMSNorm, call.layer), call.args
    return _as_features(call, call.dout * F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)).sum(dim=1)


def _linear_weight(call: LayerCall) -> Tensor:
    """``sum_t dout_t x_tᵀ``, [N, O, D]."""
    (x,) = call.args
    return cast(Tensor, call.dout.flatten(1, -2).transpose(1, 2) @ x.flatten(1, -2))


def _rows(call: LayerCall) -> Tensor:
    return call.dout.flatten(1, -2)


def _has_positions(call: LayerCall) -> bool:
    return call.dout.dim() > 2


CONVOLUTION = PerExample(_convolution_weight, _space_last, _plain_padding, _is_pointwise)
GROUP_NORM = PerExample(_group_norm_weight, _space_last, _has_positions)
LAYER_NORM = PerExample(_layer_norm_weight, _features_last)
RMS_NORM = PerExample(_rms_norm_weight, _features_last)
LINEAR = PerExample(_linear_weight, _rows, _has_positions)
