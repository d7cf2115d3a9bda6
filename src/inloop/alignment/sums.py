"""Adds up contributions with few kernels: products of small tensors are multiplied, and summed, many at once.

    c_i = sum over calls of <dout_i, out_i>        out = J_θ f(x; θ_t)[g], N examples on the first axis

Small tensors share kernels: one multiplication for a list of tensors (``torch._foreach_mul``), one concatenation, one sum. Large ones are summed
by themselves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.alignment import sizes

_PRECISE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Dot:
    """``<dout_i, out_i>`` for every example i, not computed yet.

    Attributes:
        batch_axis: The axis of both that counts examples.
        absolute: Whether magnitudes are added up instead of values.
    """

    dout: Tensor
    out: Tensor
    batch_axis: int = 0
    absolute: bool = False

    def __post_init__(self) -> None:
        dtype = self.out.dtype
        if self.dout.dtype is not dtype or dtype not in _PRECISE:  # half precision cannot hold sums
            dtype = torch.promote_types(torch.promote_types(self.dout.dtype, dtype), torch.float32)
            self.dout, self.out = self.dout.to(dtype), self.out.to(dtype)

    def may_wait(self) -> bool:
        """Whether it can be computed together with others."""
        out = self.out
        return not (self.absolute or self.batch_axis) and out.dim() > 1 and out.shape == self.dout.shape

    def rows(self) -> Tensor:
        """Compute it, [N]."""
        product = self.dout * self.out
        product = product.abs() if self.absolute else product
        return product.movedim(self.batch_axis, 0).flatten(start_dim=1).sum(dim=1) if product.dim() > 1 else product


class Sums:
    """The sum of contributions of one micro-batch's examples, [N]. Few kernels add them up."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # [N] each
        self._waiting: list[Dot] = []
        self._bytes = 0

    def copy(self) -> "Sums":
        """Return the same sums, to add other contributions to."""
        self.flush()
        other = Sums()
        other._rows = list(self._rows)
        return other

    def add(self, contributions: Tensor | Dot) -> None:
        """Add contributions, [N], or products of which they are the sums."""
        if isinstance(contributions, Tensor):
            self._rows.append(contributions)
            return
        if not contributions.may_wait():
            self.add(contributions.rows())
            return
        out = contributions.out
        waiting = self._waiting
        if waiting and (waiting[0].out.dtype is not out.dtype or waiting[0].out.device != out.device):
            self.flush()
        self._waiting.append(contributions)
        self._bytes += out.nbytes
        if self._bytes > sizes.of_device(sizes.PRODUCTS, out.device):
            self.flush()

    def flush(self) -> None:
        """Compute all products, so that their tensors can be released."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        products = torch._foreach_mul([dot.out for dot in waiting], [dot.dout for dot in waiting])
        small = [product.flatten(1) for product in products if product.nbytes <= sizes.SMALL_PRODUCT]
        large = [product.flatten(1) for product in products if product.nbytes > sizes.SMALL_PRODUCT]
        if len(small) > 1:
            small = [torch.cat(small, dim=1)]
        self._rows += [product.sum(dim=1) for product in (*small, *large)]

    def total(self) -> Tensor:
        """The sum of all that was added."""
        self.flush()
        if len(self._rows) > 1:
            dtype = max([rows_N.dtype for rows_N in self._rows], key=lambda dtype: dtype.itemsize)
            self._rows = [torch.stack([rows_N.to(dtype) for rows_N in self._rows]).sum(dim=0)]
        return self._rows[0]
