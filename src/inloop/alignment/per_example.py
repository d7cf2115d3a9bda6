"""Per-example gradients of layers with few parameters. Axes: N examples, C channels, O output channels, D features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.alignment.call import LayerCall
from inloop.alignment.spare import Spare

Form = Callable[[LayerCall], Tensor]
Write = Callable[[LayerCall, Tensor], None]  # the second is where to
Wanted = tuple[bool, bool, bool]  # of the gradients of x, weight and bias
Backward = Callable[[nn.Module, Tensor, Tensor, Tensor, Wanted], tuple[Tensor | None, Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True)
class PerExample:
    """How the gradients ``∂l_i/∂weight`` and ``∂l_i/∂bias``, [N, *shape], follow from x and dout.

    Attributes:
        positions: A view of dout with the positions that share the bias on one axis, [N, positions, *shape of the bias].
        when: Whether it holds for this call.
        backward: ``(layer, x, weight, dout, wanted)``, the layer's own backward pass, to be fused with this; None if it is not worth it.
        most_if_fused: Times the memory of x and dout up to which gradients are kept, if they cost no time.
        shares_dout: Whether another call is likely to hold the same dout, so that letting go of it frees nothing.
    """

    weight: Write
    positions: Form
    when: Callable[[LayerCall], bool] = lambda call: True
    shares_dout: Callable[[LayerCall], bool] = lambda call: False
    backward: Backward | None = None
    most_if_fused: float = 0.75

    def gradient(self, parameter: str, call: LayerCall, spare: Spare) -> Tensor:
        if parameter == "bias":
            return self.positions(call).sum(dim=1)
        gradient = spare.take(torch.Size((len(call.dout), *cast(Tensor, call.layer.weight).shape)), call.dout)
        self.weight(call, gradient)
        return gradient

    def bias_magnitude(self, call: LayerCall) -> Tensor:
        """About the bias gradient with magnitudes added up instead of values, from every 16th position if there are many.

        It is the scale of a rounding error, so an estimate will do.
        """
        positions = self.positions(call)
        every = 16 if positions.shape[1] >= 256 else 1
        return every * positions[:, ::every].abs().sum(dim=1)


def _space_last(call: LayerCall) -> Tensor:
    return call.dout.flatten(2).transpose(1, 2)


def _convolution_weight(call: LayerCall, gradients: Tensor) -> None:
    """On a CPU a few examples at a time, which is faster: eight if the weight is small, else one."""
    layer, x, dout = cast(nn.Conv2d, call.layer), cast(Tensor, call.args[0]), call.dout
    some = len(x) if x.device.type != "cpu" else 8 if layer.weight.numel() < 1 << 16 else 1
    for start in range(0, len(x), some):
        part = slice(start, start + some)
        gradients[part] = _grouped_convolution_weight(layer, x[part], dout[part])


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
    """A shortcut, most likely: the gradient of a sum is the same tensor for both its terms."""
    return set(cast(nn.Conv2d, call.layer).kernel_size) == {1}


def _group_norm_weight(call: LayerCall, gradients: Tensor) -> None:
    layer, (x,) = cast(nn.GroupNorm, call.layer), call.args
    torch.sum((call.dout * F.group_norm(x, layer.num_groups, eps=layer.eps)).flatten(2), dim=2, out=gradients)


def _features_last(call: LayerCall) -> Tensor:
    return _as_features(call, call.dout)


def _as_features(call: LayerCall, values: Tensor) -> Tensor:
    """[N, ..., *normalized_shape] with one axis for all positions."""
    return values.reshape(len(values), -1, *cast(nn.LayerNorm, call.layer).normalized_shape)


def _layer_norm_weight(call: LayerCall, gradients: Tensor) -> None:
    layer, (x,) = cast(nn.LayerNorm, call.layer), call.args
    normalized = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    torch.sum(_as_features(call, call.dout * normalized), dim=1, out=gradients)


def _rms_norm_weight(call: LayerCall, gradients: Tensor) -> None:
    layer, (x,) = cast(nn.RMSNorm, call.layer), call.args
    normalized = F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)
    torch.sum(_as_features(call, call.dout * normalized), dim=1, out=gradients)


def _linear_weight(call: LayerCall, gradients: Tensor) -> None:
    """``sum_t dout_t x_tᵀ``, [N, O, D]."""
    (x,) = call.args
    torch.bmm(call.dout.flatten(1, -2).transpose(1, 2), x.flatten(1, -2), out=gradients)


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


CONVOLUTION = PerExample(_convolution_weight, _space_last, _plain_padding, _is_pointwise, _convolution_backward)
GROUP_NORM = PerExample(_group_norm_weight, _space_last, _has_positions)
LAYER_NORM = PerExample(_layer_norm_weight, _features_last)
RMS_NORM = PerExample(_rms_norm_weight, _features_last)
LINEAR = PerExample(_linear_weight, _rows, _has_positions, backward=_linear_backward, most_if_fused=1.25)
