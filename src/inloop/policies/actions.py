"""Actions: the choices for each example. A tensor, or a nested dict of tensors, with examples on the first axis."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, Union

import torch
from torch import Tensor

from inloop.errors import BatchSizeError, UsageError

Actions: TypeAlias = Union[Tensor, Mapping[str, "Actions"]]


def count_actions(actions: Actions) -> int:
    """N, the number of examples.

    Raises:
        BatchSizeError: If the tensors of a nested choice disagree.
    """
    if isinstance(actions, Tensor):
        return len(actions)
    if not isinstance(actions, Mapping):
        raise UsageError(
            f"Actions are a tensor or a dict of tensors, one entry an example; got {type(actions).__name__}."
        )
    counts = {name: count_actions(part) for name, part in actions.items()}
    if len(set(counts.values())) != 1:
        raise BatchSizeError(
            f"The tensors of the actions have different lengths: {counts}; each must have one entry an example."
        )
    return next(iter(counts.values()))


def concatenate(parts: Sequence[Actions]) -> Actions:
    """Join the actions of several micro-batches, in order."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return {name: concatenate([part[name] for part in parts]) for name in first}  # type: ignore[index]


def part_of(actions: Actions, examples: slice) -> Actions:
    """The actions of some of the examples."""
    return map_actions(lambda tensor: tensor[examples], actions)


def map_actions(function: Callable[[Tensor], Tensor], actions: Actions) -> Actions:
    """``function`` of each tensor, in the same nest."""
    if isinstance(actions, Tensor):
        return function(actions)
    return {name: map_actions(function, part) for name, part in actions.items()}
