"""A mixture given by its shares. Axis K counts the sources."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies.discrete import Discrete
from inloop.policies.sources import count_sources


class Shares(Discrete):
    """Fixed shares, or shares that an update rule sets by itself (:class:`inloop.updates.Exp3`). They have no gradient.

    Example:
        >>> Shares.proportional([300, 100]).probabilities()
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    shares_K: Tensor

    def __init__(self, shares: Sequence[float]) -> None:
        if len(shares) < 2 or min(shares) < 0 or not sum(shares) > 0:
            raise UsageError(f"shares={list(shares)}: give at least 2 numbers, none below 0 and not all 0.")
        super().__init__(len(shares))
        shares_K = torch.tensor(shares, dtype=torch.float64, device="cpu")
        self.register_buffer("shares_K", shares_K / shares_K.sum())

    def log_probabilities(self) -> Tensor:
        return self.shares_K.log()

    @classmethod
    def uniform(cls, num_sources: int) -> "Shares":
        """Equal shares."""
        return cls([1.0] * count_sources(num_sources))

    @classmethod
    def proportional(cls, sizes: Sequence[int]) -> "Shares":
        """Shares in proportion to the sizes, as if all sources were one."""
        return cls([float(size) for size in sizes])

    @classmethod
    def tempered(cls, sizes: Sequence[int], temperature: float) -> "Shares":
        """``p_k ∝ size_k ** (1 / temperature)``: proportional at 1, nearly uniform when it is large."""
        if not temperature > 0:
            raise UsageError(f"temperature={temperature}: allowed are numbers above 0.")
        return cls([float(size) ** (1 / temperature) for size in sizes])
