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
        torch.full((most,), torch.nan, device="cpu") if count is None else F.pad(count, (0, most - len(count)))
        for count in counts
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
        add_together([self], source_N, [values_N])

    def _add_sums(self, new_K: Array, sums_2K: Array) -> None:
        """Add new examples: their number, and the sums of their values and of their squares."""
        number_K, recent_2K = self._array[0], self._array[1:]
        number_K += new_K
        # A mean over all examples at first, then over about ``memory`` of them.
        weight_K = np.maximum(1 - np.exp(new_K / -self._memory), new_K / np.maximum(number_K, 1))
        recent_2K += weight_K * (sums_2K / np.maximum(new_K, 1) - recent_2K)

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


def add_together(means: Sequence[RecentMeans], source_N: Array | Tensor, values: Sequence[Array | Tensor]) -> None:
    """Add the examples of one step to several means, each with values of its own; those that are not finite are left out."""
    source_N, values_VN = np.asarray(source_N), np.stack([np.asarray(each_N, dtype=np.float64) for each_N in values])
    num_means, num_sources = len(means), len(means[0].number_K)
    known_VN = np.isfinite(values_VN)
    place = (np.arange(num_means)[:, None] * num_sources + source_N)[known_VN]  # of each value in the table [V, K]
    value = values_VN[known_VN]
    new_VK, *sums = (
        np.bincount(place, weight, minlength=num_means * num_sources).reshape(num_means, num_sources)
        for weight in (None, value, value * value)
    )
    for mean, new_K, sums_2K in zip(means, new_VK, np.stack(sums, axis=1), strict=True):
        mean._add_sums(new_K, sums_2K)


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
