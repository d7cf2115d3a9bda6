"""The forms in which a tape keeps a recorded call until a direction is known, behind one small interface.

    LayerCall           x and dout                                     call.py
    ExampleGradients    the per-example gradients, [N, *θ]             here
    BlackBoxCall        everything needed to run a module again        black_box.py
    ModelCall           the same for a model or a checkpointed part    replay.py

The tape chooses the form by size when the gradient of the output arrives. ``retain="half"`` maps :class:`Half` over the
tensors of any form. Another pair of pack and unpack (offloading) would work in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from inloop.alignment.sums import Sums

_SLICE = 1 << 20  # elements to convert to half precision at a time


class Kept(ABC):
    """One call of a layer, as a tape keeps it.

    Attributes:
        name: The layer's place in the model.
        kind: The layer's type, and how its calls are aligned, in words.
        parameter_names: The layer's trainable parameters: name in the layer -> name in the model.
        batch: The number of the call's micro-batch.
        output_index: The output that the gradient belongs to, for a layer with several.
        num_recorded: The number of examples in the call.
        num_examples: The number of kept examples; fewer than ``num_recorded`` if only a part is rewarded.
        num_positions: The length of the axis of positions, for outputs with more than features; else 0.
        dtype: The precision of the contributions.
        coarsest: The lowest precision that took part.
    """

    # Each form has these as fields or as properties.
    name: str
    kind: str
    parameter_names: Mapping[str, str]
    batch: int
    output_index: int
    num_recorded: int
    num_examples: int
    num_positions: int
    dtype: torch.dtype
    coarsest: torch.dtype
    device: torch.device

    @abstractmethod
    def align(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor:
        """Return ``<dout_i, J_θ f(x; θ_t)[direction]_i>`` for every example i, [N].

        Args:
            direction: By the parameter's name in the layer; a missing entry is zero.
            magnitudes: Add up magnitudes instead of values: rounding errors are relative to their sum.
        """

    def add_to(self, sums: Sums, direction: Mapping[str, Tensor | None]) -> None:
        """Add what :meth:`align` returns to ``sums``, which may compute it together with that of other calls."""
        sums.add(self.align(direction))

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the kept tensors, packed as they are."""

    @abstractmethod
    def map(self, pack: Callable[[Tensor], Any]) -> "Kept":
        """Return the call with packed tensors. A form that needs exact tensors returns itself."""

    @property
    def nbytes(self) -> int:
        """How much memory it keeps."""
        return sum([tensor.nbytes for tensor in self.tensors()])

    def visit_layers(self, visit: Callable[["Kept"], None]) -> None:
        """Call ``visit`` with each layer's call: this one, or those inside the call of a whole model."""
        visit(self)

    def own_parameters(self) -> "Kept":
        """Return the call with copies of all parameters that aligning needs, before an optimizer changes them."""
        return self

    @property
    def needs_backward(self) -> bool:
        """Whether aligning runs a backward pass, which cannot run inside another one."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class ExampleGradients(Kept):
    """The per-example gradients of one call, where they are smaller than x and dout.

    Attributes:
        gradients: By parameter of the layer, [N, *shape].
        coarsest: Of x and dout too.
        sizes: Sums of magnitudes instead of sums, for parameters whose gradient may cancel within an example.
    """

    name: str
    kind: str
    parameter_names: Mapping[str, str]
    batch: int
    num_recorded: int
    num_examples: int
    num_positions: int
    gradients: Mapping[str, Any]
    coarsest: torch.dtype
    sizes: Mapping[str, Any] = field(default_factory=dict)
    output_index: int = 0

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.promote_types(next(iter(self.gradients.values())).dtype, torch.float32)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.tensors()[0].device

    def align(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor:
        """Return ``sum_θ <∂l_i/∂θ, direction_θ>``."""
        total: Tensor | None = None
        for name, packed in self.gradients.items():
            along = direction.get(name)
            if along is None:
                continue
            gradient = full(packed).to(self.dtype)
            along = along.detach().to(self.dtype).flatten()
            if magnitudes:
                gradient, along = full(self.sizes.get(name, packed)).abs().to(self.dtype), along.abs()
            product = gradient.reshape(len(gradient), along.numel()) @ along
            total = product if total is None else total + product
        return torch.zeros(self.num_examples, dtype=self.dtype, device=self.device) if total is None else total

    def tensors(self) -> list[Tensor]:
        return tensors_in((dict(self.gradients), dict(self.sizes)))

    def map(self, pack: Callable[[Tensor], Any]) -> "ExampleGradients":
        gradients, sizes = tree_map_only(Tensor, pack, (dict(self.gradients), dict(self.sizes)))
        coarsest = torch.float16 if any(isinstance(value, Half) for value in gradients.values()) else self.coarsest
        return replace(self, gradients=gradients, sizes=sizes, coarsest=coarsest)


# ---------------------------------------------------------------- half precision


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """A tensor in half the memory: ``values * scale``, float16 numbers and a power of two.

    After scaling, the largest magnitude is between 1 and 2, so the gradients of a mean loss do not underflow. A number
    loses at most 2**-11 of itself, or 2**-25 of the tensor's largest if it is much smaller.
    """

    values: Tensor
    scale: Tensor
    precision: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Half":
        smallest, largest = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()),) * 2
        scale = _power_of_two(torch.maximum(largest, -smallest))
        values = torch.empty_like(tensor, dtype=torch.float16)
        for part, of in zip(_slices(values), _slices(tensor), strict=True):
            part.copy_(of / scale)
        return cls(values, scale, tensor.dtype)

    def full(self) -> Tensor:
        return self.values.to(self.precision).mul_(self.scale)

    def __getitem__(self, rows: slice) -> "Half":
        return Half(self.values[rows], self.scale, self.precision)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the full tensor."""
        return self.precision

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """The size of the full tensor."""
        return self.values.numel() * self.precision.itemsize


def full(packed: Any) -> Tensor:
    """Return the unpacked tensor, in its own precision."""
    return packed.full() if isinstance(packed, Half) else packed


def _power_of_two(largest: Tensor) -> Tensor:
    """Return the power of two that divides ``largest`` to a number from 1 to 2."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)


def _slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split along the first axis, into about ``_SLICE`` elements each."""
    if tensor.dim() == 0:
        return (tensor,)
    return torch.split(tensor, max(1, len(tensor) * _SLICE // max(1, tensor.numel())))


class Halves:
    """Packs each tensor once: several calls may share it."""

    def __init__(self) -> None:
        # A weakly referenced storage frees its memory but not its address: no other storage can be mistaken for it.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Half]] = {}

    def __call__(self, tensor: Tensor) -> Any:
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        if key not in self._known:
            self._known[key] = storage, Half.of(tensor.detach())
        return self._known[key][1]

    def clear(self) -> None:
        self._known.clear()


# ---------------------------------------------------------------- nests of tensors


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a nest: tuples, lists and dicts much faster than torch does, the rest by torch."""
    leaves, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tensor | Half):
            leaves.append(node)
        elif type(node) is tuple or type(node) is list:
            nodes.extend(reversed(node))
        elif type(node) is dict:
            nodes.extend(reversed(node.values()))
        else:
            leaves.extend(tree_leaves(node))
    return leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a nest; for a :class:`Half`, its values."""
    tensors = []
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, Half):
            tensors.append(leaf.values)
    return tensors


def versions_of(tree: Any) -> tuple[int, ...]:
    """Return how often torch has written into each tensor. A detached tensor shares the count of its original."""
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:
        return (tree[0]._version,)
    return tuple([tensor._version for tensor in tensors_in(tree)])
