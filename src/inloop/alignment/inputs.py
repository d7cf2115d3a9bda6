"""The inputs of a model: how many examples they hold, and copies of them in which some examples are exchanged.

Inputs are nests of tuples, lists, mappings, dataclasses and other objects that hold tensors in attributes.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from inloop.alignment.kept import leaves_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_PLAIN = (
    Tensor,
    PackedSequence,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    nn.Module,
)
_NO_NESTS = (nn.Module, type, ModuleType, FunctionType, MethodType, str, bytes, torch.device, torch.dtype)


def num_examples_of(inputs: Any) -> int | None:
    """Return the number of examples of the first tensor, which its first axis counts; None without a tensor."""
    return next((_count(part) for part in _tensors(inputs) if _count(part) is not None), None)


def hold_one_example(inputs: Any, announced: int | None = None) -> bool:
    """Whether the batch has one example: so says the first tensor, and no other with several axes says otherwise.

    If one example was ``announced``, a single tensor with one row is enough: another may have the patches of an image.
    """
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.dim()]
    if announced == 1 and any(len(tensor) == 1 for tensor in tensors):
        return True
    return num_examples_of(inputs) == 1 and all(len(tensor) == 1 for tensor in tensors if tensor.dim() > 1)


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return all tensors; of a packed sequence its data."""
    return [part.data if isinstance(part, PackedSequence) else part for part in _tensors(inputs)]


def copied(inputs: Inputs) -> Inputs:
    """Return a copy of everything, with tensors detached."""
    args, kwargs = _map(_copied, inputs, {})
    return args, kwargs


def exchanged(
    inputs: Inputs, origin_N: Tensor, *, squares: bool = True, folded: Literal["", "together", "apart"] = ""
) -> Inputs:
    """Return a copy in which each example equals another one of the batch, or itself.

    Examples of a packed sequence have different lengths. There a replaced one has other values instead.

    Args:
        origin_N: The number of the example that each one is to equal.
        squares: Also replace in tensors of shape [N, N], which may be masks over positions.
        folded: Also replace in tensors with several rows for each example, such as the patches of all images: rows of an
            example are together, [N * k, ...], or apart, [k * N, ...].
    """
    n = len(origin_N)

    def exchange(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            return _exchanged_packed(part, origin_N) if _count(part) == n else _copied(part)
        if folded and has_several_rows(part, n):
            sizes, axis = ((n, -1), 0) if folded == "together" else ((-1, n), 1)
            return _exchange(part.unflatten(0, sizes), axis).flatten(0, 1)
        if not part.dim() or len(part) != n or (part.shape == (n, n) and not squares):
            return _copied(part)
        return _exchange(part, 0)

    def _exchange(part: Tensor, axis: int) -> Tensor:
        return part.detach().index_select(axis, origin_N.to(part.device)).requires_grad_(part.requires_grad)

    args, kwargs = _map(exchange, inputs, {})
    return args, kwargs


def neighbours(replaced_N: Tensor) -> Tensor:
    """Return the numbers for :func:`exchanged` with which each replaced example equals the one before it in the batch, [N]."""
    places_N = torch.arange(len(replaced_N), device="cpu")
    return torch.where(replaced_N, places_N.roll(1), places_N)


def has_several_rows(part: Any, num_examples: int) -> bool:
    """Whether a tensor may have several rows for each example on its first axis."""
    if not isinstance(part, Tensor) or not part.dim() or num_examples < 1:
        return False
    return len(part) > num_examples and len(part) % num_examples == 0


def with_own_objects(inputs: Inputs) -> Inputs:
    """Return the inputs with tensors detached, and with copies of objects and containers, which a forward pass may change."""
    args, kwargs = _map(lambda part: part if isinstance(part, PackedSequence) else part.detach(), inputs, {})
    return args, kwargs


def have_objects(inputs: Any) -> bool:
    """Whether there are objects besides tensors, plain containers and values, such as a cache of keys and values."""
    return any(not isinstance(leaf, _PLAIN) for leaf in leaves_of(inputs))


def example_of_row(packed: PackedSequence) -> Tensor:
    """Return the example of each row of a packed sequence: every position has the long enough ones, longest first."""
    ranks = torch.cat([torch.arange(int(count), device="cpu") for count in packed.batch_sizes]).to(packed.data.device)
    return ranks if packed.sorted_indices is None else packed.sorted_indices[ranks]


def _exchanged_packed(packed: PackedSequence, origin_N: Tensor) -> PackedSequence:
    data = packed.data.detach()
    replaced_N = origin_N != torch.arange(len(origin_N), device="cpu")
    rows = replaced_N.to(data.device)[example_of_row(packed)].view(-1, *[1] * (data.dim() - 1))
    return packed._replace(data=torch.where(rows, data.flip(0), data))


def _copied(part: Any) -> Any:
    if isinstance(part, PackedSequence):
        return part._replace(data=part.data.detach().clone())
    return part.detach().clone().requires_grad_(part.requires_grad)  # a reentrant checkpoint needs it


def _count(part: Tensor | PackedSequence) -> int | None:
    if isinstance(part, PackedSequence):
        return int(part.batch_sizes[0])
    return len(part) if part.dim() else None


def _tensors(inputs: Any) -> list[Any]:
    """Return the tensors and packed sequences of a nest in their order."""
    found: list[Any] = []
    seen: set[int] = set()
    nodes = [inputs]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tensor | PackedSequence):
            found.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            nodes.extend(reversed(_children(node).values()))
    return found


def _map(change: Callable[[Any], Any], node: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a nest with ``change`` applied to its tensors; ``known`` has the copies of objects so far."""
    if isinstance(node, Tensor | PackedSequence):
        return change(node)
    if id(node) in known:
        return known[id(node)]
    if not _tensors(node):
        return copy.deepcopy(node)
    if isinstance(node, tuple | list):
        values = [_map(change, child, known) for child in node]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    known[id(node)] = new = copy.copy(node)
    for key, child in _children(node).items():
        if isinstance(node, Mapping):
            new[key] = _map(change, child, known)
        else:
            object.__setattr__(new, key, _map(change, child, known))
    return new


def _children(node: Any) -> dict[Any, Any]:
    if isinstance(node, tuple | list):
        return dict(enumerate(node))
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, _NO_NESTS):
        return {}
    if is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in fields(node)}
    return vars(node) if hasattr(node, "__dict__") else {}
