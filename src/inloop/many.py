"""One operation on many tensors, element by element. A device does it in one kernel (``torch._foreach``); a CPU does it tensor by tensor.

So on a CPU many small tensors are put into one first. The numbers are the same.
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor

_SMALL = 1 << 16  # elements of all tensors, from which on a copy costs more than the operations that it saves

Column = Sequence[Tensor]


def together(compute: Callable[..., Column], *columns: Column) -> Column:
    """Return ``compute(*columns)``, a tensor for each row of the columns, in the shapes of the first column.

    Args:
        compute: An operation on lists of tensors, element by element.
        columns: Lists of tensors; those of a row have the same shape.
    """
    if not all([are_small(column) for column in columns]):
        return compute(*columns)
    (results,) = compute(*([joined(column)] for column in columns))
    return torch._C._nn.unflatten_dense_tensors(results, list(columns[0]))


def are_small(tensors: Sequence[object]) -> TypeGuard[Column]:
    """Whether they are several tensors, of one type, on a CPU, that are better put into one."""
    if len(tensors) < 2 or not all([type(tensor) is Tensor for tensor in tensors]):
        return False
    found = cast(Column, tensors)
    kinds = {(tensor.dtype, tensor.is_cpu, tensor.layout) for tensor in found}
    return kinds == {(found[0].dtype, True, torch.strided)} and sum([tensor.numel() for tensor in found]) <= _SMALL


def joined(tensors: Column) -> Tensor:
    """Return the elements of all tensors, one after the other."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))
