"""Means over the recent examples of each source, and the losses of constant predictions. Axis K counts the sources, C the labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inloop.verdicts.sums import SourceSums

Array = np.ndarray[Any, Any]
FIRST_EXAMPLES = 100  # of a source, whose mean loss is its first loss


def constant_losses(counts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The losses of two constant predictions for each source, [K] each: from its own label frequencies, and from those of all sources.

    They are nan for a source whose labels are not known.

    Args:
        counts: How often each label occurs in each source.
    """
    most = max([len(count) for count in counts if count is not None], default=1)
    rows = [
        torch.full((most,), torch.nan) if count is None else F.pad(count, (0, most - len(count))) for count in counts
    ]
    own_KC = torch.stack([row.double() / row.sum() for row in rows])
    pooled_C = own_KC.nanmean(dim=0)
    own_K = -torch.special.xlogy(own_KC, own_KC).sum(dim=1)
    return own_K, -torch.special.xlogy(own_KC, pooled_C.expand_as(own_KC)).sum(dim=1)


class RecentMeans(SourceSums):
    """The mean of a value over the recent examples of each source; nan for a source without examples.

    Args:
        memory: How many examples of a source, about, the mean is over.
    """

    def __init__(self, num_sources: int, memory: float) -> None:
        # number of examples; recent mean, and recent mean of squares
        super().__init__(3, num_sources)
        self._memory = memory

    def add(self, source_N: Array | Tensor, values_N: Array | Tensor) -> None:
        """Add the examples of one step; those whose value is not finite are left out."""
        source_N, values_N = np.asarray(source_N), np.asarray(values_N, dtype=np.float64)
        known_N = np.isfinite(values_N)
        source_N, values_N = source_N[known_N], values_N[known_N]
        number_K, mean_K, square_K = self._array
        num_sources = len(number_K)
        new_K = np.bincount(source_N, minlength=num_sources)
        number_K += new_K
        # A mean over all examples at first, then over about ``memory`` of them.
        weight_K = np.maximum(1 - np.exp(-new_K / self._memory), new_K / np.maximum(number_K, 1))
        for recent_K, power_N in ((mean_K, values_N), (square_K, values_N * values_N)):
            sum_K = np.bincount(source_N, power_N, minlength=num_sources)
            recent_K += weight_K * (sum_K / np.maximum(new_K, 1) - recent_K)

    @property
    def number_K(self) -> Tensor:
        """The number of examples of each source."""
        return self._sums[0]

    @property
    def mean_K(self) -> Tensor:
        mean_K: Tensor = torch.where(self._sums[0] > 0, self._sums[1], torch.nan)
        return mean_K

    def error(self, sizes_K: Tensor) -> Tensor:
        """The standard error of the mean, [K].

        Args:
            sizes_K: How many examples each source has, inf if that is not known: an example that is seen twice is no second example.
        """
        number_K, mean_K, square_K = self._sums
        distinct_K = number_K.clamp_max(self._memory).minimum(sizes_K)
        error_K: Tensor = ((square_K - mean_K.square()).clamp_min(0) / distinct_K).sqrt()
        return error_K


class SourceLosses(RecentMeans):
    """The first and the recent mean loss of each source."""

    def __init__(self, num_sources: int) -> None:
        super().__init__(num_sources, memory=500)
        self._first = RecentMeans(num_sources, memory=math.inf)

    def add(self, source_N: Array | Tensor, values_N: Array | Tensor) -> None:
        source_N, values_N = np.asarray(source_N), np.asarray(values_N, dtype=np.float64)
        is_early_K = self._first.number_K.numpy() < FIRST_EXAMPLES
        if is_early_K.any():
            is_early_N = is_early_K[source_N]
            self._first.add(source_N[is_early_N], values_N[is_early_N])
        super().add(source_N, values_N)

    @property
    def first_K(self) -> Tensor:
        return self._first.mean_K

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first": self._first.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._first.load_state_dict(state["first"])
