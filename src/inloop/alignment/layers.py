"""Torch's layers that are linear or affine in their parameters, and the few that need a word more."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from inloop.alignment.call import LayerCall
from inloop.alignment.per_example import CONVOLUTION, GROUP_NORM, LAYER_NORM, LINEAR, RMS_NORM
from inloop.alignment.rules import (
    affine_in_parameters,
    alignment_rule,
    alignment_rule_by_name,
    linear_in_parameters,
)


def _channels_and_space(layer: nn.Module) -> int:
    return 1 + len(cast(nn.Conv2d, layer).kernel_size)


@alignment_rule(nn.Linear, per_example=LINEAR, separable=True)
def align_linear(call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """``<dout_i, x_i gᵀ>`` or, for a layer that widens, ``<dout_i g, x_i>``, of which the product is smaller."""
    layer, dout = cast(nn.Linear, call.layer), call.dout
    precise = dout.dtype in (torch.float32, torch.float64) and not call.autocast.enabled
    if layer.out_features <= layer.in_features or not precise or call.absolute or call.batch_axis:
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
    nn.Conv1d, nn.Conv2d, nn.Conv3d, example_dims=_channels_and_space, per_example=CONVOLUTION, separable=True
)(linear_in_parameters)
alignment_rule(
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, example_dims=_channels_and_space, separable=True
)(linear_in_parameters)

# Statistics over the batch are those of step t: recomputed from the recorded input, or the running ones in eval mode.
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
def align_embedding(call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """``sum_t <dout_it, g[id_it]>``: the lookup is linear in its table, with three options that only touch the gradient.

    The padding row receives no gradient; ``scale_grad_by_freq`` divides each row's by its count in the batch;
    ``max_norm`` rescales the table before the lookup, which must not happen to the direction.
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
def align_embedding_bag(call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """``<dout_i, sum or mean of g over bag i>``; the bag leaves its padding out by itself."""
    return call.dot(call.run(direction, max_norm=None))


# Hugging Face's own layers. Its many RMSNorms scale by the weight or by one and the weight; both are affine.
alignment_rule_by_name("transformers", "Conv1D", ("weight", "bias"), linear_in_parameters)
alignment_rule_by_name("transformers", "RMSNorm", ("weight",), affine_in_parameters)
alignment_rule_by_name("transformers", "T5LayerNorm", ("weight",), linear_in_parameters)
