"""Keeping less: where an example's gradient is smaller than what it is made of, it is formed at once.

A recorded call holds x and dout until the next step. For layers with few parameters on many positions (the first convolutions of
a network, normalisation layers) the per-example gradient ``∂l_i/∂θ``, shape [N, *θ], is smaller than both; then it is computed as soon as
the layer's backward pass is over (by a fused layer within it), x and dout are let go, and the alignment is its dot product with the direction.
The result is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inloop.alignment.call import LayerCall
from inloop.alignment.half import Half, Halves
from inloop.alignment.spare import Spare

if TYPE_CHECKING:
    from inloop.alignment.rules import Rule

PRECISE = (torch.float32, torch.float64)
MOST = 0.75  # times the memory of x and dout up to which gradients are worth the time to form them


@dataclass(frozen=True, slots=True, eq=False)
class ReducedCall:
    """A call of which only the examples' gradients are left.

    Attributes:
        gradients: Of each of the layer's own parameters, [N, *shape].
        magnitudes: Sums of magnitudes in place of sums, for parameters whose gradient may cancel within an example.
    """

    call: LayerCall  # without its tensors: name, layer, which batch
    gradients: Mapping[str, Tensor]
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    num_positions: int = 0
    absolute: bool = False
    consecutive_ids: int = 0

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def rule(self) -> "Rule":
        return self.call.rule

    @property
    def batch(self) -> int:
        return self.call.batch

    @property
    def output_index(self) -> int:
        return self.call.output_index

    @property
    def parameter_names(self) -> Mapping[str, str]:
        return self.call.parameter_names

    @property
    def num_examples(self) -> int:
        return len(next(iter(self.gradients.values())))

    @property
    def num_recorded(self) -> int:
        """Examples of the batch that it was called with."""
        return self.num_examples if self.call.taken_from is None else self.call.taken_from

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.gradients.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.gradients.values())).device

    def align(self, direction: Mapping[str, Tensor | None]) -> Tensor:
        """``sum_θ <∂l_i/∂θ, direction_θ>`` for every example; missing entries of ``direction`` are zero."""
        full = self.full()
        total = torch.zeros(self.num_examples, dtype=full.dtype, device=self.device)
        for name, gradient in full.gradients.items():
            along = direction.get(name)
            if along is None:
                continue
            along = along.detach().to(gradient.dtype).flatten()
            if self.absolute:
                gradient, along = full.magnitudes.get(name, gradient).abs(), along.abs()
            total += gradient.reshape(len(gradient), along.numel()) @ along
        return total

    def in_half(self, halves: Halves) -> "ReducedCall":
        return self._with(tree_map_only(Tensor, halves.of, (dict(self.gradients), dict(self.magnitudes))))

    def full(self) -> "ReducedCall":
        return self._with(tree_map_only(Half, Half.full, (dict(self.gradients), dict(self.magnitudes))))

    def _with(self, tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> "ReducedCall":
        return replace(self, gradients=tensors[0], magnitudes=tensors[1])

    def give_back(self, spare: Spare) -> None:
        """Nobody reads the gradients any more."""
        for gradient in self.gradients.values():
            spare.give(gradient)

    def with_magnitudes(self) -> "ReducedCall":
        return replace(self, absolute=True)


AnyCall = LayerCall | ReducedCall


def is_worthwhile(call: LayerCall, fused: bool) -> bool:
    """Whether the rule can form the examples' gradients, and they take little enough memory; ``fused``: without extra time."""
    form = call.rule.per_example
    if (
        form is None
        or call.dout.numel() == 0
        or call.batch_axis != 0
        or call.example_of_row is not None
        or len(call.args) != 1
        or call.kwargs
        or call.autocast.enabled
        or call.dout.dtype not in PRECISE
    ):
        return False
    size = sum(p.numel() for name, p in call.layer.named_parameters() if name in call.parameter_names)
    freed = call.args[0].numel() + (0 if form.shares_dout(call) else call.dout.numel())
    most = form.most_if_fused if fused else MOST
    return len(call.dout) * size <= most * freed and form.when(call)


def reduced(call: LayerCall, spare: Spare, fused: bool = False) -> LayerCall | ReducedCall:
    """The call, or its examples' gradients if that is worthwhile."""
    form = call.rule.per_example
    if form is None or not is_worthwhile(call, fused):
        return call
    with torch.no_grad():
        gradients = {name: form.gradient(name, call, spare) for name in call.parameter_names}
        magnitudes = {"bias": form.bias_magnitude(call)} if "bias" in gradients else {}
    return ReducedCall(
        replace(call, args=(), dout=call.dout.new_empty(0), versions=()), gradients, magnitudes, call.num_positions
    )
