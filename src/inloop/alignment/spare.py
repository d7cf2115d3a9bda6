"""Memory of gradients that have been used up, for the next ones.

While a backward pass goes from layer to layer, each lets go of as much as it keeps. Fresh memory would cost time: the system
clears it first.
"""

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20  # below it an allocator has no need of help

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class Spare:
    """Tensors that nobody reads any more, until they are taken or the step is over."""

    def __init__(self) -> None:
        self._tensors: dict[_Kind, list[Tensor]] = {}

    def take(self, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor with any content."""
        tensors = self._tensors.get((shape, like.dtype, like.device))
        return tensors.pop() if tensors else like.new_empty(shape)

    def give(self, tensor: object) -> None:
        """Let it be overwritten, if it is large and the only one on its memory."""
        if not isinstance(tensor, Tensor) or tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
            return
        if tensor.untyped_storage().nbytes() == tensor.nbytes:
            self._tensors.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)

    def clear(self) -> None:
        self._tensors.clear()
