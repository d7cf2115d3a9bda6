"""Hooks that leave no trace: they refer to their owner weakly, and do nothing in a copy of the model or the optimizer."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")


def remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _do_nothing(*_: object) -> None:
    """Replace a hook in copies of the model."""


def _hook_of_a_copy() -> object:
    return _do_nothing


class Hook(Generic[Owner]):
    """A hook that refers to its owner weakly. Copies of a module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)

    def __deepcopy__(self, memo: object) -> object:
        return _do_nothing

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _hook_of_a_copy, ()
