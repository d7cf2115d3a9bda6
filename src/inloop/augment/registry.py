"""Operations by name, the user's own included.

A record is a dict of tensors, so an operation in it is a number. The number follows from the operation's name alone, and is
the same in every process.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.augment.primitives import replace
from inloop.errors import UsageError

STRENGTHS = 31  # 0..30
Arguments = tuple[Tensor, ...]
Prepare = Callable[[Tensor, Tensor, Tensor], "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Operation:
    """An operation on some of a batch's examples.

    Attributes:
        primitive: ``primitive(examples, *prepared)`` gives the new examples. Operations with the same primitive run together.
        prepare: ``prepare(examples, magnitude_N, center_N2)`` gives the primitive's other arguments, first axis N.
        signed: Whether the magnitude gets a random sign.
        needs_pixels: Whether ``prepare`` gets the examples that belong to the magnitudes. If not, it runs once for all turns, gets
            the whole batch, and must use only the shape of an image (not their number).
        magnitudes: Its own magnitudes of the 31 strengths, for spaces without others; None if it has none.
        builtin: Whether it is inloop's own, for uint8 images [N, C, H, W].
    """

    name: str
    primitive: Callable[..., Tensor]
    prepare: Prepare
    signed: bool = False
    needs_pixels: bool = True
    magnitudes: tuple[float, ...] | None = None
    builtin: bool = True

    def prepared(self, examples: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Arguments:
        """The arguments after ``examples`` in the call of the primitive."""
        arguments = self.prepare(examples, magnitude_N, center_N2)
        return arguments if isinstance(arguments, tuple) else (arguments,)

    @property
    def code(self) -> int:
        return operation_code(self.name)


_operations: dict[str, Operation] = {}
_names: dict[int, str] = {}


def operation_code(name: str) -> int:
    """The operation's number in records; 0 is the identity."""
    return 0 if name == "identity" else zlib.crc32(name.encode())


def add_operation(operation: Operation) -> None:
    taken = _names.setdefault(operation.code, operation.name)
    if taken != operation.name:
        raise UsageError(f"Operation '{operation.name}' has the same number as '{taken}'. Fix: choose another name.")
    _operations[operation.name] = operation


def operation(
    primitive: Callable[..., Tensor], signed: bool = False, needs_pixels: bool = False
) -> Callable[[Prepare], Prepare]:
    """Decorates the ``prepare`` of a built-in operation, which takes its name."""

    def add(prepare: Prepare) -> Prepare:
        add_operation(Operation(prepare.__name__, primitive, prepare, signed, needs_pixels))
        return prepare

    return add


def get_operation(name: str) -> Operation:
    if name not in _operations:
        raise UsageError(
            f"Operation {name!r} is unknown. Known are {', '.join(sorted(_operations))}. Fix: choose one of them, or add your own with "
            "inloop.augment.register_operation."
        )
    return _operations[name]


def operation_with_code(code: int) -> Operation:
    if code not in _names:
        raise UsageError(
            f"The record has an operation with number {code}, which is not known here. Fix: register your own operations before you "
            "use a record."
        )
    return _operations[_names[code]]


def register_operation(
    name: str,
    function: Callable[[Tensor, Tensor], Tensor],
    magnitudes: tuple[float, float] = (0.0, 1.0),
    signed: bool = False,
) -> None:
    """Add an operation of your own, on examples of any kind.

    Args:
        function: ``function(examples, magnitude_N)`` gives new examples of the same shape and dtype; it gets some of a batch's
            examples, each with its magnitude (float64). In :func:`~inloop.augment.apply` it runs without autograd.
        magnitudes: The magnitudes of strength 0 and of strength 30; the others lie evenly between.
        signed: Whether the magnitude gets a random sign.

    Example:
        >>> import torch
        >>> from inloop.augment import AugmentPolicy, apply, make_space, register_operation
        >>> def louder(sound_NT, gain_N):
        ...     return sound_NT * (1 + gain_N.to(sound_NT)).unsqueeze(1)
        >>> register_operation("louder", louder, magnitudes=(0.0, 2.0))
        >>> policy = AugmentPolicy(make_space(["identity", "louder"]), numbers=(1, 2))
        >>> apply(torch.randn(8, 16000), policy.sample(8)).shape
        torch.Size([8, 16000])
    """
    if not isinstance(name, str) or not callable(function):
        raise UsageError(f"register_operation({name!r}, {function!r}): give a name and a function.")
    if (
        not isinstance(magnitudes, (tuple, list))
        or len(magnitudes) != 2
        or not all(math.isfinite(end) for end in magnitudes)
    ):
        raise UsageError(f"Operation '{name}': magnitudes={magnitudes}: give two, of strength 0 and of strength 30.")
    if name in _operations and _operations[name].builtin:
        raise UsageError(f"Operation {name!r} is one of inloop's own. Fix: choose another name.")
    low, high = magnitudes
    steps = tuple(low + (high - low) * strength / (STRENGTHS - 1) for strength in range(STRENGTHS))

    def prepare(examples: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
        return _checked(name, function(examples, magnitude_N), examples)

    add_operation(Operation(name, replace, prepare, signed, magnitudes=steps, builtin=False))


def _checked(name: str, new: Tensor, old: Tensor) -> Tensor:
    if not isinstance(new, Tensor):
        raise UsageError(
            f"Operation '{name}' returned {type(new).__name__}. Fix: return a tensor, one row for each example."
        )
    if new.shape != old.shape or new.dtype != old.dtype:
        raise UsageError(
            f"Operation '{name}' made {list(new.shape)} {new.dtype} of {list(old.shape)} {old.dtype}. Fix: return the shape and dtype "
            "that it got; several operations can follow each other on one example."
        )
    if new.dtype.is_floating_point and bool((~torch.isfinite(new) & torch.isfinite(old)).any()):
        raise UsageError(
            f"Operation '{name}' returned values that are not finite (NaN or infinite). Fix: correct the operation."
        )
    return new
