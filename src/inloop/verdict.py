"""Which source hurts? The rewards of its examples over many steps decide, never its probability.

For every rewarded step t and source k, the *advantage* compares the rewards of its examples with all other examples', in
standard deviations of the step's rewards:

    d_tk = (mean reward of source k - mean reward of the others) / std of all rewards of the step

The mean over steps weights each step by its number n_tk of examples. The standard error takes a step as the unit, since
examples of a step share the reference gradient. The interval is corrected for the number of sources (Bonferroni). A source
is called bad if its whole interval lies below ``-least_effect``: a certain but tiny difference does not count. The default
was chosen on the digits and on one seed of CIFAR-10; it is a convention, not a law.

The interval is over steps. It does not cover the choice of a small held-out set, even if each reference is drawn anew from it: sources that
agree less with the set by chance are called bad, too. Then compare advantages, or use a larger set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import RewardSummary
from inloop.report import StepReport

LEAST_STEPS = 5  # with fewer, a source is undecided
LEAST_EFFECT = 0.02


@dataclass(frozen=True, slots=True)
class SourceVerdict:
    """The verdict on one source.

    Attributes:
        examples: The number of its rewarded examples.
        advantage: Its mean advantage; negative if its examples were rewarded less than the others'.
        low: Lower end of the interval, by default at 95% for all sources together; nan if too few steps had examples of it.
        high: Upper end.
        bad: Whether it is called bad: the whole interval is below ``-least_effect``.
        undecided: Whether it may be either: the interval contains ``-least_effect``, or there is no interval.
    """

    source: int
    examples: int
    advantage: float
    low: float
    high: float
    bad: bool
    undecided: bool


class RewardStatistics:
    """Collects the rewards of each source from a learner's reports; use it as the learner's callback, or call ``add`` in yours.

    Printed, it is a table of its verdicts.

    Args:
        num_sources: The number of sources.
        level: Probability that no source is called bad by chance, if all are equal.
        least_effect: The smallest advantage, in standard deviations of a step's rewards, that counts.
        names: Names of the sources in the table, such as ``mixture.names``; by default their numbers.
    """

    def __init__(
        self,
        num_sources: int,
        level: float = 0.95,
        least_effect: float = LEAST_EFFECT,
        names: Sequence[str] | None = None,
    ) -> None:
        if not 0 < level < 1:
            raise UsageError(f"level={level}: allowed are numbers between 0 and 1.")
        self.names = [str(number) for number in range(num_sources)] if names is None else list(names)
        if len(self.names) != num_sources:
            raise UsageError(
                f"RewardStatistics({num_sources}) got {len(self.names)} names: {self.names}. Fix: one for each source."
            )
        self.level = level
        self.least_effect = least_effect
        self.num_steps = 0
        # sums over steps of n, n d, n², n² d, n² d²
        self._sums = torch.zeros(5, num_sources, dtype=torch.float64)

    def add(self, report: StepReport) -> None:
        """Add one step. Steps without rewards, or with equal rewards, do not count."""
        if isinstance(report.rewards, dict) and "source" not in report.rewards:
            found = ", ".join(report.rewards)
            raise UsageError(
                f"The policy has no factor 'source', only {found}. Fix: give its mixture that name in the Product."
            )
        rewards = report.rewards["source"] if isinstance(report.rewards, dict) else report.rewards
        if not isinstance(rewards, RewardSummary) or not report.reward_std > 0:
            return
        num_sources = self._sums.shape[1]
        if len(rewards.count_K) != num_sources:
            raise UsageError(
                f"RewardStatistics({num_sources}) got the rewards of {len(rewards.count_K)} sources. Fix: RewardStatistics({len(rewards.count_K)})."
            )
        n_K = rewards.count_K.double().cpu()
        d_K = advantage(n_K, rewards.mean_K.double().cpu(), report.reward_std)
        n_K = torch.where(d_K.isnan(), 0.0, n_K)
        d_K = d_K.nan_to_num(0.0)
        self._sums += torch.stack([n_K, n_K * d_K, n_K**2, n_K**2 * d_K, n_K**2 * d_K**2])
        self.num_steps += 1

    __call__ = add

    def advantages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean advantage of each source, its standard error, and the number of steps they rest on, [K] each.

        Steps with unequal numbers of examples count as fewer: as many as would be as precise with equal numbers.
        """
        n_K, nd_K, n2_K, n2d_K, n2d2_K = self._sums
        mean_K = nd_K / n_K
        steps_K = n_K**2 / n2_K
        variance_K = (n2d2_K - 2 * mean_K * n2d_K + mean_K**2 * n2_K).clamp_min(0) / n_K**2 * steps_K / (steps_K - 1)
        return mean_K, variance_K.sqrt(), steps_K

    def verdicts(self) -> list[SourceVerdict]:
        """A verdict for each source."""
        mean_K, error_K, steps_K = self.advantages()
        return [
            self._verdict(k, int(self._sums[0, k]), float(mean_K[k]), float(error_K[k]), float(steps_K[k]))
            for k in range(len(mean_K))
        ]

    def _verdict(self, source: int, examples: int, mean: float, error: float, steps: float) -> SourceVerdict:
        if not steps >= LEAST_STEPS:  # also for nan: never seen
            return SourceVerdict(source, examples, mean, math.nan, math.nan, bad=False, undecided=True)
        width = t_quantile(1 - (1 - self.level) / (2 * self._sums.shape[1]), steps - 1) * error
        low, high = mean - width, mean + width
        bad = high < -self.least_effect
        return SourceVerdict(source, examples, mean, low, high, bad, undecided=not bad and low < -self.least_effect)

    def bad_sources(self) -> list[int]:
        """The sources that are called bad."""
        return [verdict.source for verdict in self.verdicts() if verdict.bad]

    def __str__(self) -> str:
        rows = [("source", "examples", "advantage", f"{self.level:.0%} interval", "")]
        for name, v in zip(self.names, self.verdicts(), strict=True):
            interval = "too few steps" if math.isnan(v.low) else f"{v.low:+.2f} to {v.high:+.2f}"
            verdict = "bad" if v.bad else "undecided" if v.undecided else ""
            rows.append(
                (name, f"{v.examples:,}", "" if math.isnan(v.advantage) else f"{v.advantage:+.2f}", interval, verdict)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = zip("<>><<", widths, strict=True)
        form = "  ".join(f"{{:{side}{width}}}" for side, width in aligned)
        return "\n".join(form.format(*row).rstrip() for row in rows)

    def state_dict(self) -> dict[str, Any]:
        """The sums over all steps so far."""
        return {"num_steps": self.num_steps, "sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if state["sums"].shape != self._sums.shape:
            raise UsageError(f"The state is of {state['sums'].shape[1]} sources; this has {self._sums.shape[1]}.")
        self.num_steps = state["num_steps"]
        self._sums.copy_(state["sums"])


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t, by Cornish and Fisher's expansion; within 4% from 4 degrees of freedom on, up to probability 0.999."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def advantage(n_K: Tensor, mean_K: Tensor, std: float) -> Tensor:
    """``(mean of k - mean of the others) / std``; nan for a source without examples, or with all of them."""
    sums_K = n_K * mean_K.nan_to_num(0.0)
    others_K = (sums_K.sum() - sums_K) / (n_K.sum() - n_K)
    return (mean_K - others_K) / std
