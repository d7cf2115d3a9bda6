"""Search spaces: their operations, and the magnitude of each strength 0..30.

With k the strength, as in the authors' code (``int`` truncates):

    rotate, translate      int(k max / 30)                 degrees, pixels
    shear, cutout          k max / 30                      cutout: share of the width
    solarize               256 - int(256 k / 30)           threshold
    posterize              high - int((high - low) k / 30) bits
    blends                 low + (high - low) k / 30       factor

The paper's table of WideLong has three errors: equalize takes no strength, posterize keeps 2 to 8 bits, and brightness has the
range of the other blends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inloop.augment.registry import STRENGTHS, get_operation
from inloop.errors import UsageError

_TOP = STRENGTHS - 1


@dataclass(frozen=True)
class Space:
    """Operations in order, with the 31 magnitudes of each."""

    name: str
    magnitudes: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for operation, values in self.magnitudes.items():
            get_operation(operation)
            if len(values) != STRENGTHS or not all(math.isfinite(value) for value in values):
                raise UsageError(
                    f"Space '{self.name}', operation '{operation}': give {STRENGTHS} finite magnitudes; got {values}."
                )

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(self.magnitudes)

    def __len__(self) -> int:
        return len(self.magnitudes)

    def __repr__(self) -> str:
        return f"Space({self.name!r}: {', '.join(self.magnitudes)})"


def _each_strength(magnitude: Callable[[int], float]) -> tuple[float, ...]:
    return tuple(magnitude(k) for k in range(STRENGTHS))


def whole(top: float) -> tuple[float, ...]:
    return _each_strength(lambda k: int(k * top / _TOP))


def real(top: float) -> tuple[float, ...]:
    return _each_strength(lambda k: k * top / _TOP)


def bits(high: int, low: int) -> tuple[float, ...]:
    return _each_strength(lambda k: high - int((high - low) * k / _TOP))


def factor(low: float, high: float) -> tuple[float, ...]:
    return _each_strength(lambda k: low + (high - low) * k / _TOP)


SOLARIZE = _each_strength(lambda k: 256 - int(256 * k / _TOP))
NO_STRENGTH = (0.0,) * STRENGTHS


def _magnitudes(
    *,
    degrees: float,
    shear: float,
    pixels: float,
    most_bits: int,
    least_bits: int,
    blend: tuple[float, float],
    box: float,
) -> dict[str, tuple[float, ...]]:
    """The magnitudes of the built-in operations, for the spaces to choose from."""
    return {
        "identity": NO_STRENGTH,
        "auto_contrast": NO_STRENGTH,
        "equalize": NO_STRENGTH,
        "rotate": whole(degrees),
        "solarize": SOLARIZE,
        "color": factor(*blend),
        "posterize": bits(most_bits, least_bits),
        "contrast": factor(*blend),
        "brightness": factor(*blend),
        "sharpness": factor(*blend),
        "shear_x": real(shear),
        "shear_y": real(shear),
        "translate_x": whole(pixels),
        "translate_y": whole(pixels),
        "blur": NO_STRENGTH,
        "invert": NO_STRENGTH,
        "flip_lr": NO_STRENGTH,
        "flip_ud": NO_STRENGTH,
        "cutout": real(box),
    }


_SAME_AS = {"cutout_grey": "cutout", "cutout_centered": "cutout"}  # operations with the magnitudes of another
_NARROW = _magnitudes(degrees=30, shear=0.3, pixels=10, most_bits=8, least_bits=4, blend=(0.1, 1.9), box=0.2)
_WIDE = _magnitudes(degrees=135, shear=0.99, pixels=32, most_bits=8, least_bits=2, blend=(0.01, 2.0), box=0.6)
_STANDARD = (
    *("identity", "auto_contrast", "equalize", "rotate", "solarize", "color", "posterize", "contrast", "brightness"),
    *("sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
_WIDE_LONG = (*_STANDARD, "blur", "invert", "flip_lr", "flip_ud", "cutout")
_UNIFORM_AUGMENT = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "auto_contrast", "invert", "equalize"),
    *("solarize", "posterize", "contrast", "color", "brightness", "sharpness", "cutout"),
)
_AUTO_AUGMENT = (
    *("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "auto_contrast", "invert", "equalize"),
    *("solarize", "posterize", "contrast", "color", "brightness", "sharpness", "cutout"),
)


def _space(name: str, operations: Sequence[str], table: dict[str, tuple[float, ...]]) -> Space:
    return Space(name, {operation: table[operation] for operation in operations})


SPACES = {
    space.name: space
    for space in (
        _space("ra", _STANDARD, _NARROW),
        _space("wl", _WIDE_LONG, _WIDE),
        _space("wide", _STANDARD, _WIDE),
        _space("standard", _STANDARD, _NARROW | {"posterize": bits(4, 0)}),
        _space("uniaug", _UNIFORM_AUGMENT, _NARROW | {"translate_x": whole(14.4), "translate_y": whole(14.4)}),
        _space("autoaugment", _AUTO_AUGMENT, _NARROW),
    )
}


def get_space(space: str | Space) -> Space:
    """A space by its name. Translations are in pixels, and meant for images of about 32 x 32.

    ``ra``: RandAugment's 14 operations; ``wl``: WideLong, 19 with wide ranges; ``wide``: the 14 with wide ranges; ``standard``: the
    14 with the posterize of early code, 4 to 0 bits, which leaves nothing at the top; ``uniaug``: UniformAugment's 16;
    ``autoaugment``: AutoAugment's, without its pairing of two images.
    """
    if isinstance(space, Space):
        return space
    if not isinstance(space, str) or space not in SPACES:
        raise UsageError(
            f"space={space!r}: allowed are {', '.join(SPACES)}, or a Space from inloop.augment.make_space."
        )
    return SPACES[space]


def make_space(operations: Sequence[str], base: str | Space = "wl", name: str = "own") -> Space:
    """A space of the named operations, with the magnitudes of ``base``; your own operations have their registered ones.

    Built-in operations that ``base`` lacks have the wide magnitudes of ``wl``.

    Example:
        >>> make_space(["identity", "rotate", "shear_x"], base="ra").operations
        ('identity', 'rotate', 'shear_x')
    """
    base = get_space(base)
    if len(set(operations)) < len(operations) or not operations:
        raise UsageError(f"operations={list(operations)}: name at least one, and each only once.")
    magnitudes = {}
    for operation in operations:
        own = get_operation(operation).magnitudes
        magnitudes[operation] = base.magnitudes.get(
            operation, own if own is not None else _WIDE[_SAME_AS.get(operation, operation)]
        )
    return Space(name, magnitudes)
