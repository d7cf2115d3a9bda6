"""Hooks that leave no trace: they refer to their owner weakly, and do nothing in a copy of the model or the optimizer."""

import sys
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")
Function = TypeVar("Function", bound=Callable[..., Any])


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


def not_compiled(function: Function) -> Function:
    """Exempt a hook and all it calls from torch.compile, without importing the compiler, which takes seconds."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (_disabled(function) if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(Function, call)


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compiler.disable(function))
