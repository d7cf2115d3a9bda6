"""A direction: one tensor for each trainable parameter of a model, by name. This module checks a user's."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Protocol

import torch
from torch import Tensor, nn

from inloop.distributed import is_sharded, whole
from inloop.errors import DirectionError

Direction = Mapping[str, Tensor | None]
Values = Mapping[str, Tensor]
Compute = Callable[[Values], Direction]  # of many tensors at once: that takes fewer kernels


class Computed(Mapping[str, Tensor | None]):
    """A direction that computes each tensor from another one on access: they never exist all at once.

    Args:
        raw: A tensor for every trainable parameter, by canonical name.
        compute: Called with dense raw tensors, by name; None stays None.
    """

    def __init__(self, raw: Direction, compute: Compute) -> None:
        self.raw, self._compute = raw, compute

    def __getitem__(self, name: str) -> Tensor | None:
        return self.of([name])[name]

    def of(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Compute the tensors of these names together."""
        raw = {name: self.raw[name] for name in names}
        known = {n: (g.to_dense() if g.is_sparse else g).detach() for n, g in raw.items() if g is not None}
        return {**dict.fromkeys(raw), **self._compute(known)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def values_of(direction: Direction, names: Iterable[str]) -> Direction:
    """Return the tensors of these names; None where the direction has none."""
    if isinstance(direction, Computed):
        return direction.of([name for name in names if name in direction.raw])
    return {name: direction.get(name) for name in names}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the direction that a backward pass left: ``.grad`` of every parameter by name, None for a frozen one."""
    return {name: parameter.grad if parameter.requires_grad else None for name, parameter in model.named_parameters()}


def resolve_direction(
    direction: Direction,
    aliases: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    needed: set[str],
) -> Direction:
    """Return the direction with canonical names and dense tensors; None stays None and means zero.

    Args:
        aliases: Every name of every parameter of the model -> its canonical name.
        shapes: Canonical name -> shape.
        needed: Canonical names that must have an entry.

    Raises:
        DirectionError: If an entry is unknown, missing, contradictory or has another shape.
    """
    if not isinstance(direction, Mapping):
        raise DirectionError(f"A direction is a dict from parameter names to tensors; got {type(direction).__name__}.")
    if isinstance(direction, Computed):  # made by the library
        return direction
    resolved: dict[str, Tensor | None] = {}
    for name, value in direction.items():
        if name not in aliases:
            close = get_close_matches(name, aliases, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise DirectionError(f"The direction has an entry '{name}', which is no parameter of the model.{hint}")
        canonical = aliases[name]
        if value is not None and value.shape != shapes[canonical]:
            raise DirectionError(
                f"The direction's entry '{name}' has shape {tuple(value.shape)}; the parameter has {tuple(shapes[canonical])}."
            )
        dense = value.to_dense() if value is not None and value.is_sparse else value
        if canonical in resolved and not _same(resolved[canonical], dense):
            raise DirectionError(
                f"The direction gives the tied parameter '{canonical}' twice, the second time as '{name}', with different "
                "values. Fix: give it once."
            )
        resolved[canonical] = None if dense is None else dense.detach()
    missing = sorted(needed - resolved.keys())
    if missing:
        raise DirectionError(
            f"The direction has no entry for {len(missing)} trainable parameter(s), the first is '{missing[0]}'. "
            "Fix: give all of them (None for a zero), as in {name: p.grad for name, p in model.named_parameters()}."
        )
    return resolved


class _Layers(Protocol):
    def layers(self) -> list[list[str]]: ...


def in_parts(direction: Direction, plan: _Layers) -> Iterable[Mapping[str, Tensor | None]]:
    """Return the direction as one part or, if it is sharded, gathered layer by layer: never the whole model at once.

    All processes must call this: they gather together, in the order of the plan's layers, whatever each has recorded.
    """
    values = (direction.raw if isinstance(direction, Computed) else direction).values()
    if all([type(value) is Tensor or value is None or not is_sharded(value) for value in values]):
        return (direction,)
    return (
        {name: None if (value := direction[name]) is None else whole(value) for name in names if name in direction}
        for names in plan.layers()
    )


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)
