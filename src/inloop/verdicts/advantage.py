"""How a source's examples are rewarded, compared with all others: the advantage, and an interval that stays valid however often one looks.

For every rewarded step t and source k, the *advantage* is in standard deviations of the step's rewards:

    d_tk = (mean reward of source k - mean reward of the others) / std of all rewards of the step

The mean over steps weights each step by its number n_tk of examples. The standard error se takes a step as the unit, since examples of a
step share the judge. The interval is a confidence sequence (Robbins' normal mixture): the chance that it *ever* leaves out the true mean, over
all looks of a run, is at most α. With n steps

    mean ± se sqrt((1 + 1 / (n ρ)) (2 log(1 / α) + log(1 + n ρ))),      α = (1 - level) / K

It is narrowest, for its α, at about ``BEST_AT`` steps. α is divided by the number of sources (Bonferroni).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop.verdicts.sums import SourceSums

Array = np.ndarray[Any, Any]
LEAST_STEPS = 20  # with fewer the error itself is too uncertain, and there is no interval
BEST_AT = 100


class Advantages(SourceSums):
    """The mean advantage of each of K sources, from sums over steps."""

    def __init__(self, num_sources: int) -> None:
        # sums over steps of n, n d, n², n² d, n² d²
        super().__init__(5, num_sources)

    def add(self, count_K: Tensor, mean_K: Tensor, std: float) -> None:
        """Add the rewards of one step. Steps with equal rewards do not count."""
        if not std > 0:
            return
        n_K = np.asarray(count_K.cpu(), dtype=np.float64)
        d_K = advantage(n_K, np.asarray(mean_K.cpu(), dtype=np.float64), std)
        known_K = ~np.isnan(d_K)
        n_K, d_K = n_K[known_K], d_K[known_K]
        square_K = n_K * n_K
        self._array[:, known_K] += (n_K, n_K * d_K, square_K, square_K * d_K, square_K * d_K * d_K)

    @property
    def examples_K(self) -> Tensor:
        """Rewarded examples of each source."""
        return self._sums[0]

    def estimate(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean advantage of each source, its standard error, and the number of steps they rest on, [K] each.

        Steps with unequal numbers of examples count as fewer: as many as would be as precise with equal numbers.
        """
        n_K, nd_K, n2_K, n2d_K, n2d2_K = self._sums
        mean_K = nd_K / n_K
        steps_K = n_K**2 / n2_K
        variance_K = (n2d2_K - 2 * mean_K * n2d_K + mean_K**2 * n2_K).clamp_min(0) / n_K**2 * steps_K / (steps_K - 1)
        return mean_K, variance_K.sqrt(), steps_K

    def interval(self, level: float, distinct_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The ends of the interval of each source, [K] each; nan with too few steps.

        Args:
            distinct_K: How many different examples of each source were seen. If an example has the same reward each time, the mean of m examples
                has a variance of 1 / m that more steps do not reduce; it is added to the error's. None: rewards do not persist.
        """
        mean_K, error_K, steps_K = self.estimate()
        if distinct_K is not None:
            error_K = (error_K.square() + 1 / distinct_K).sqrt()
        errors_K = torch.tensor(
            [width(float(n), (1 - level) / len(mean_K)) for n in steps_K], dtype=torch.float64, device="cpu"
        )
        return mean_K - errors_K * error_K, mean_K + errors_K * error_K


def width(steps: float, alpha: float) -> float:
    """Half the interval's width in standard errors after ``steps`` steps; nan with too few."""
    if not steps >= LEAST_STEPS:  # also for nan: never seen
        return math.nan
    log_alpha = -2 * math.log(alpha)
    rho = (log_alpha + math.log(1 + log_alpha)) / BEST_AT
    return math.sqrt((1 + 1 / (steps * rho)) * (log_alpha + math.log(1 + steps * rho)))


def advantage(n_K: Array, mean_K: Array, std: float) -> Array:
    """``(mean of k - mean of the others) / std``; nan for a source without examples, or with all of them."""
    sums_K = np.where(n_K > 0, n_K * mean_K, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        others_K = (sums_K.sum() - sums_K) / (n_K.sum() - n_K)
        result: Array = (mean_K - others_K) / std
        return result
