"""Compiled models run as they were written while a step is recorded.

The compiler would trace hooks and function modes together with the model, in pieces between the hooks. Torch 2.13 then
computes other outputs for some models, silently: Llama with its cache of keys and values, if the compiler's recompile
limit is raised to 64. For others it fails with an internal error. So a recording asks for uncompiled execution, of all
compiled functions of the process, until the last recording is closed. Outside of recordings compiled code has no trace
of the hooks. The price is what the compiler would gain in the pieces.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from inloop.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])

_recordings: set[int] = set()
_stance: Any = None  # what torch.compiler.set_stance returned, to be left again


def run_uncompiled(recording: int) -> None:
    """Run compiled functions uncompiled until this recording, and all others, are closed. Does not import the compiler, which takes seconds."""
    global _stance
    _recordings.add(recording)
    if _stance is None and "torch._dynamo" in sys.modules:
        _stance = _leave_the_compiler()


def run_compiled_again(recording: int) -> None:
    """A recording is closed."""
    global _stance
    _recordings.discard(recording)
    if not _recordings and _stance is not None:
        stance, _stance = _stance, None
        stance.__exit__(None, None, None)


def _leave_the_compiler() -> Any:
    try:
        if torch.compiler.is_compiling():
            raise RuntimeError
        return torch.compiler.set_stance("force_eager")
    except RuntimeError:
        raise UsageError(
            "A recording was begun inside of a function that is compiled. Fix: compile the model, or the loss, and not the loop around the learner."
        ) from None


def not_compiled(function: Function) -> Function:
    """Leave a hook out of compiled code."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast(Function, call)
