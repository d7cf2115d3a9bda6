"""One recorded call of a layer, ``out = f(x; θ_t)``, with the gradient that came back for ``out``.

It is all that is needed to run the layer again later, with any other parameters, exactly as in step t.
Axes: N examples; ``...`` whatever else the output has.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from inloop.alignment.half import Half, Halves
from inloop.alignment.twin import make_twin
from inloop.errors import OverwrittenTensorError

if TYPE_CHECKING:
    from inloop.alignment.rules import Rule


_PART_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Autocast:
    """The mixed-precision state of one moment, to be entered again later."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device: str) -> "Autocast":
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """One call of a layer and, once the backward pass has been there, the gradient of one of its outputs.

    Attributes:
        name: Where the layer stands in the model.
        layer: A twin of the layer as it was in step t: flags, buffers and, if the rule keeps them, parameters.
        parameter_names: The layer's trainable parameters: name in the layer -> name in the model.
        batch: Which micro-batch of the step the call belongs to.
        random_state: The random state before the call, by device; kept for black boxes only.
        output_index: Which of the layer's output tensors ``dout`` belongs to.
        args, kwargs, dout: What the layer was called with, and the gradient of its output; in half precision if so wished.
        batch_axis: The axis of ``dout`` that counts examples.
        example_of_row: Where the axis has several rows for each example (packed or folded sequences), whose they are; else None.
        fingerprints: Of each output of a black box, to see that a replay gives the same.
        absolute: Add up magnitudes instead of values: what rounding errors are relative to.
        taken_from: If only some of its examples are left, how many there were.
    """

    name: str
    layer: nn.Module
    rule: "Rule"
    parameter_names: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    batch: int = 0
    random_state: Mapping[str, Tensor] = field(default_factory=dict)
    output_index: int = 0
    batch_axis: int = 0
    example_of_row: Tensor | None = None
    dout: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: tuple[int, ...] = ()
    fingerprints: tuple[Tensor, ...] = ()
    absolute: bool = False
    taken_from: int | None = None

    def with_gradient(self, dout: Tensor, output_index: int, batch_axis: int) -> "LayerCall":
        return replace(
            self,
            dout=dout,
            output_index=output_index,
            batch_axis=batch_axis,
            versions=(*self.versions, dout._version),
        )

    def in_half(self, halves: Halves) -> "LayerCall":
        """The call with its tensors in half precision, unless it is to be replayed, which must give the same output."""
        if self.rule.replays:
            return self
        return self._with(tree_map_only(Tensor, halves.of, (self.args, self.kwargs, self.dout)))

    def full(self) -> "LayerCall":
        """The call with its tensors in their own precision."""
        if not any(isinstance(leaf, Half) for leaf in leaves_of((self.args, self.kwargs, self.dout))):
            return self
        return self._with(tree_map_only(Half, Half.full, (self.args, self.kwargs, self.dout)))

    def _with(self, tensors: tuple[Any, Any, Any]) -> "LayerCall":
        args, kwargs, dout = tensors
        return replace(self, args=args, kwargs=kwargs, dout=dout, versions=versions_of(tensors))

    def only(self, rows: Tensor, num_rows: int) -> "LayerCall":
        """The call of some of its ``num_rows`` examples, before its gradient is there, if their rows can be taken out."""
        if not self.rule.separable or self.example_of_row is not None:
            return self

        def take(tensor: Tensor) -> Tensor:
            return tensor[rows] if tensor.dim() and len(tensor) == num_rows else tensor

        args, kwargs = tree_map_only(Tensor, take, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, versions=versions_of((args, kwargs)), taken_from=num_rows)

    @property
    def num_recorded(self) -> int:
        """Examples of the batch that it was called with."""
        return self.num_examples if self.taken_from is None else self.taken_from

    @property
    def dtype(self) -> torch.dtype:
        """Of its contributions: sums do not fit into half precisions."""
        return torch.promote_types(self.dout.dtype.to_real(), torch.float32)

    @property
    def device(self) -> torch.device:
        return self.dout.device

    def with_own_parameters(self) -> "LayerCall":
        """With copies of the parameters instead of the model's own."""
        named = dict(self.layer.named_parameters(remove_duplicate=False))
        copies = {value.data_ptr(): value.clone() for value in named.values()}  # one for all names of a tied parameter
        return replace(
            self, layer=make_twin(self.layer, {name: copies[value.data_ptr()] for name, value in named.items()})
        )

    def without_values(self) -> "LayerCall":
        """Its shapes, and the integers it was called with."""
        args = tree_map_only(Tensor, lambda t: t.to("meta") if t.is_floating_point() else t, self.args)
        return replace(self, args=args, kwargs={}, dout=self.dout.to("meta"))

    def with_magnitudes(self) -> "LayerCall":
        return replace(self, absolute=True)

    @property
    def num_positions(self) -> int:
        """Length of the axis after the examples', of outputs that have more than features."""
        return self.dout.shape[1 - self.batch_axis] if self.dout.dim() > 2 else 0

    @property
    def has_examples(self) -> bool:
        """Whether the output has an axis for them at all."""
        return self.dout.dim() > self.batch_axis

    @property
    def consecutive_ids(self) -> int:
        """How many, if the call is a lookup of consecutive rows, [L] and not [N, L]: what positions look like."""
        if not isinstance(self.layer, nn.Embedding) or not self.args:
            return 0
        ids = self.args[0]
        return len(ids) if ids.dim() == 1 and len(ids) > 1 and bool((ids.diff() == 1).all()) else 0

    @property
    def num_examples(self) -> int:
        if self.example_of_row is not None:
            return int(self.example_of_row.max()) + 1
        return self.dout.shape[self.batch_axis]

    def weighted(self, weights_N: Tensor) -> Tensor:
        """``dout`` with each example's part multiplied by its weight."""
        weights = weights_N if self.example_of_row is None else weights_N[self.example_of_row]
        return (self.dout.movedim(self.batch_axis, -1) * weights).movedim(-1, self.batch_axis).to(self.dout.dtype)

    def align(self, direction: Mapping[str, Tensor | None]) -> Tensor:
        """``<dout_i, J_θ f(x; θ_t)[direction]_i>`` for every example i; missing entries of ``direction`` are zero."""
        self._refuse_overwritten_tensors()
        complete: dict[str, Tensor] = {}
        for name, parameter in self.layer.named_parameters(remove_duplicate=False):
            given = direction.get(name)
            if given is None:
                complete[name] = torch.zeros_like(parameter, device=self.dout.device)
            else:
                complete[name] = given.to(parameter.dtype)
        with torch.no_grad():
            if self.autocast.enabled and self.autocast.dtype == torch.float16:
                return self._by_example(self._align_scaled(complete))
            return self._by_example(torch.cat([self.rule.align(part.full(), complete) for part in self.parts()]))

    def _by_example(self, contributions: Tensor) -> Tensor:
        """Contributions [rows] of a layer whose rows are parts of examples, added up to [N]."""
        if self.example_of_row is None or self.rule.replays:
            return contributions
        return contributions.new_zeros(self.num_examples).index_add_(0, self.example_of_row, contributions)

    def _align_scaled(self, direction: dict[str, Tensor]) -> Tensor:
        """The same for a direction of any size, of which float16 would lose the small and overflow on the large."""
        scale = max((float(value.abs().max()) for value in direction.values() if value.numel()), default=0.0) or 1.0
        scaled = {name: value / scale for name, value in direction.items()}
        return scale * torch.cat([self.rule.align(part.full(), scaled) for part in self.parts()])

    def parts(self) -> "Iterator[LayerCall]":
        """The call itself or, if it is large and can be divided, calls of a few examples each.

        A small result is overwritten in the processor's cache by the next, where a large one is fetched as fresh memory: on a
        CPU this is faster (a 3 x 3 convolution of 64 channels on 64 images of 32 x 32: by a third), and it needs less memory.
        """
        rows, leaves = len(self.dout), leaves_of((self.args, self.kwargs, self.dout))
        size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor | Half))
        if not self.rule.separable or self.batch_axis or size <= 2 * _PART_BYTES or self.dout.device.type != "cpu":
            yield self
            return
        some = max(1, rows * _PART_BYTES // size)
        for start in range(0, rows, some):
            part = operator.itemgetter(slice(start, start + some))
            yield self._with(tree_map_only((Tensor, Half), part, (self.args, self.kwargs, self.dout)))

    def run(self, parameters: Mapping[str, Tensor], **attributes: object) -> Any:
        """Call the layer as in step t, but with ``parameters``; ``attributes`` override the layer's own."""
        twin = make_twin(self.layer, parameters)
        twin.__dict__.update(attributes)
        with self.autocast.again():
            for hook in twin._forward_pre_hooks.values():  # only those that are part of the computation
                hook(twin, self.args)
            return twin.forward(*self.args, **self.kwargs)

    def dot(self, out: Tensor) -> Tensor:
        """``<dout_i, out_i>`` for every example; half precisions are accumulated in float32."""
        dtype = torch.promote_types(torch.promote_types(self.dout.dtype, out.dtype), torch.float32)
        product = self.dout.to(dtype) * out.to(dtype)
        product = product.abs() if self.absolute else product
        return product.movedim(self.batch_axis, 0).flatten(start_dim=1).sum(dim=1) if product.dim() > 1 else product

    def _refuse_overwritten_tensors(self) -> None:
        if versions_of((self.args, self.kwargs, self.dout)) != self.versions:
            raise OverwrittenTensorError(
                f"A tensor recorded at layer '{self.name}' ({type(self.layer).__name__}) was changed in place before it "
                "was used. Recorded tensors must keep their values until the next step has paid for them. "
                "Fix: do not write into a batch that was already trained on, or pass copy_inputs=True."
            )


def detached(tree: Any, copy: bool) -> Any:
    """The same nest of arguments with every tensor cut from its graph (and cloned if ``copy``)."""
    return tree_map_only(Tensor, lambda t: t.detach().clone() if copy else t.detach(), tree)


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is in a nest of arguments. For tuples, lists and dicts much faster than torch's own, which it uses for the rest."""
    if isinstance(tree, Tensor | Half):
        yield tree
    elif type(tree) is tuple or type(tree) is list:
        for part in tree:
            yield from leaves_of(part)
    elif type(tree) is dict:
        for part in tree.values():
            yield from leaves_of(part)
    else:
        yield from tree_leaves(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def versions_of(tree: Any) -> tuple[int, ...]:
    """How often torch has written into each tensor; a detached tensor shares the count of its original."""
    return tuple(tensor._version for tensor in tensors_in(tree))
