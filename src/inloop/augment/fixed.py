"""Augmentation that is not learned: UniformAugment, RandAugment, TrivialAugment.

Each has ``sample(n, generator)``; ``apply`` takes its records like the learned policy's. Axes: N examples, R operations.
"""

import torch
from torch import Tensor

from inloop.augment.records import draw_operations, draw_strengths, make_record
from inloop.augment.registry import STRENGTHS
from inloop.augment.spaces import Space, get_space
from inloop.errors import UsageError


class UniformAugment:
    """UniformAugment as in the paper's Algorithm 3.

    Two operations, drawn without replacement, each done with probability one half, with a uniform strength.

    Args:
        replacement: Draw the two with replacement, as the authors' code does.
    """

    def __init__(self, space: str | Space = "wl", replacement: bool = False) -> None:
        self.space = get_space(space)
        self.replacement = replacement

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        choice_NR = draw_operations(n, 2, len(self.space), self.replacement, generator)
        strength_NR = draw_strengths((n, 2), generator)
        done_NR = torch.rand(n, 2, generator=generator, device="cpu") < 0.5
        return make_record(self.space, choice_NR, strength_NR, done_NR, generator)


class RandAugment:
    """``num_operations`` operations, with replacement, all with the same strength (Cubuk et al. 2020)."""

    def __init__(self, num_operations: int = 2, strength: int = 14, space: str | Space = "ra") -> None:
        whole = isinstance(num_operations, int) and isinstance(strength, int)
        if not whole or num_operations < 1 or not 0 <= strength < STRENGTHS:
            raise UsageError(
                f"RandAugment({num_operations}, {strength}): give at least one operation, and a whole strength from 0 to {STRENGTHS - 1}."
            )
        self.space = get_space(space)
        self.num_operations = num_operations
        self.strength = strength

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        choice_NR = draw_operations(n, self.num_operations, len(self.space), True, generator)
        strength_NR = torch.full_like(choice_NR, self.strength)
        return make_record(self.space, choice_NR, strength_NR, torch.ones_like(choice_NR, dtype=torch.bool), generator)


class TrivialAugment:
    """One operation, always done, with a uniform strength (Müller and Hutter 2021)."""

    def __init__(self, space: str | Space = "wide") -> None:
        self.space = get_space(space)

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        choice_NR = draw_operations(n, 1, len(self.space), True, generator)
        strength_NR = draw_strengths((n, 1), generator)
        return make_record(self.space, choice_NR, strength_NR, torch.ones_like(choice_NR, dtype=torch.bool), generator)
