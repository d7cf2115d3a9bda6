"""Makes the records that ``apply`` takes from choices, which are indices in a space.

Axes: N examples, R operations in a row, A operations of the space, S strengths.
"""

import torch
from torch import Tensor

from inloop.augment.execution import draw_signs
from inloop.augment.registry import STRENGTHS, get_operation
from inloop.augment.spaces import Space


def make_record(
    space: Space, choice_NR: Tensor, strength_NR: Tensor, done_NR: Tensor, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """The record of the operations to do, in order; draws random signs and centers.

    Args:
        choice_NR: Index of each operation in the space.
        done_NR: Whether it is done at all.
    """
    magnitude_AS = torch.tensor(
        [space.magnitudes[name] for name in space.operations], dtype=torch.float64, device="cpu"
    )
    code_A = torch.tensor([get_operation(name).code for name in space.operations], device="cpu")
    signed_A = torch.tensor([get_operation(name).signed for name in space.operations], device="cpu")
    return finish_record(
        code_A[choice_NR], magnitude_AS[choice_NR, strength_NR], signed_A[choice_NR], done_NR, generator
    )


def finish_record(
    code_NR: Tensor, magnitude_NR: Tensor, signed_NR: Tensor, done_NR: Tensor, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Draw centers, and random signs for signed operations."""
    sign_NR = torch.where(signed_NR, draw_signs(tuple(code_NR.shape), generator), 1)
    return {
        "operation": torch.where(done_NR, code_NR, 0),
        "magnitude": magnitude_NR * sign_NR,
        "center": torch.rand(*code_NR.shape, 2, dtype=torch.float64, generator=generator, device="cpu"),
    }


def draw_operations(
    n: int, r: int, num_operations: int, replacement: bool, generator: torch.Generator | None
) -> Tensor:
    """Indices of r operations for each of n examples, uniform, in order; [n, r]."""
    if replacement:
        return torch.randint(num_operations, (n, r), generator=generator, device="cpu")
    return torch.rand(n, num_operations, generator=generator, device="cpu").argsort(dim=1)[:, :r]


def draw_strengths(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(STRENGTHS, shape, generator=generator, device="cpu")
