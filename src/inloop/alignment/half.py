"""Keeping tensors in half the memory: float16 numbers with a power of two for each tensor.

The largest magnitude of a tensor lies between 1 and 2 after scaling, so the gradients of a mean loss do not underflow; a number
loses at most 2**-11 of itself, or 2**-25 of the tensor's largest if it is much smaller.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_PART = 1 << 20  # elements that are converted at a time


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """``values * scale``, which was a tensor of ``precision``. It has of a tensor's interface what recorded calls need."""

    values: Tensor
    scale: Tensor
    precision: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Half":
        smallest, largest = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()),) * 2
        scale = _power_of_two(torch.maximum(largest, -smallest))
        values = torch.empty_like(tensor, dtype=torch.float16)
        for part, of in zip(_parts(values), _parts(tensor), strict=True):
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

    def dim(self) -> int:
        return self.values.dim()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Of the full tensor."""
        return self.values.numel() * self.precision.itemsize


def _power_of_two(largest: Tensor) -> Tensor:
    """Such that ``largest`` divided by it is from 1 to 2."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Slices along the first axis."""
    if tensor.dim() == 0:
        return (tensor,)
    return torch.split(tensor, max(1, len(tensor) * _PART // max(1, tensor.numel())))


class Halves:
    """Makes halves, one for each tensor: what several calls share is kept once."""

    def __init__(self) -> None:
        # A storage that is referred to weakly gives back its memory, but not its address: no other can be taken for it.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Half]] = {}

    def of(self, tensor: Tensor) -> Tensor | Half:
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        if key not in self._known:
            self._known[key] = storage, Half.of(tensor.detach())
        return self._known[key][1]

    def forget(self) -> None:
        self._known.clear()
