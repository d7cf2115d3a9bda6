"""Inputs in the precision in which autocast runs a layer: half the memory, and the numbers that the layer really saw."""

import weakref
from typing import Any

import torch
from torch import Tensor


class Casts:
    """Casts inputs, each once: layers that are called one after the other often share one (queries, keys and values)."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def cast(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor] | None:
        """Return a layer's one float32 input, detached and in ``dtype``; None for other inputs."""
        if len(args) != 1 or type(args[0]) is not Tensor or args[0].dtype is not torch.float32:
            return None
        x = args[0]
        if self._last is not None:
            original, version, last = self._last
            known = last()
            if original() is x and version == x._version and known is not None and known.dtype is dtype:
                return (known,)
        cast = x.detach().to(dtype)
        self._last = weakref.ref(x), x._version, weakref.ref(cast)
        return (cast,)
