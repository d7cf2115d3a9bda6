"""The report that a learner makes of each step."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inloop.policies import Policy, RewardSummary, concatenate
from inloop.rewards import deviation
from inloop.step import Draw

log = logging.getLogger("inloop")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one call of ``InLoop.step``; the callback receives it, too.

    Attributes:
        step: The number of this step, from 1.
        lag: The number of updates of the policy between drawing this step's actions and their use.
        dropped: Why a step was dropped: the waiting step, or, if this step cannot be used, both. None otherwise.
        num_dropped: The number of dropped steps so far.
        probabilities: The policy's distribution after this step.
        updated: Whether the policy moved.
        reward_mean: Mean of the rewards, nan if there were none.
        reward_std: Their unbiased standard deviation.
        rewards: The rewards by choice (by source, for a mixture; by factor, for a product), None if there were none.
    """

    step: int
    lag: int
    dropped: str | None
    num_dropped: int
    probabilities: Tensor | Mapping[str, object]
    updated: bool = False
    reward_mean: float = math.nan
    reward_std: float = math.nan
    rewards: RewardSummary | dict[str, object] | None = None

    @property
    def rewarded(self) -> bool:
        """Whether the examples of a step were rewarded."""
        return self.rewards is not None

    @property
    def collapsing(self) -> bool:
        """Whether a few choices hold nearly all probability; see :func:`is_collapsing`."""
        return is_collapsing(self.shares)

    @property
    def shares(self) -> list[float]:
        """The probability of each choice; for a product, of its factor "source". Empty for policies with several choices an example."""
        p = self.probabilities.get("source") if isinstance(self.probabilities, Mapping) else self.probabilities
        return p.tolist() if isinstance(p, Tensor) and p.dim() == 1 else []


class Reporter:
    """Makes the report of each step, and warns of steps that are dropped and of a policy that collapses.

    Args:
        may_collapse: Whether a collapse is worth a warning: not if the judge is no training data, since a source that it gives everything to
            may deserve it, nor if nobody moves the policy.
    """

    def __init__(self, may_collapse: bool) -> None:
        self.num_dropped = 0
        self._may_collapse = may_collapse
        self._was_collapsing = False
        self._dropped_in_a_row = 0

    def report(
        self,
        step: int,
        lag: int,
        probabilities: Tensor | Mapping[str, object],
        dropped: str | None = None,
        **rewards: Any,
    ) -> StepReport:
        """The report of a step; ``rewards`` are its fields about rewards, if a step was rewarded."""
        self._dropped_in_a_row = 0 if dropped is None else self._dropped_in_a_row + 1
        if dropped is not None:
            self.num_dropped += 1
            if is_power_of_two(self._dropped_in_a_row):
                log.warning(
                    "inloop: step %d: %s; dropped (%d so far), the policy stays", step, dropped, self.num_dropped
                )
        report = StepReport(step, lag, dropped, self.num_dropped, probabilities, **rewards)
        collapsing = self._may_collapse and report.collapsing
        if collapsing and not self._was_collapsing:
            log.warning("inloop: step %d: %s", step, describe_collapse(report.shares))
        self._was_collapsing = collapsing
        return report

    def state_dict(self) -> dict[str, Any]:
        return {"num_dropped": self.num_dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_dropped = state["num_dropped"]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def effective_number(probabilities: Sequence[float]) -> float:
    """``exp`` of the entropy: K for K equal shares, 1 if one share is everything."""
    return math.exp(-sum([p * math.log(p) for p in probabilities if p > 0]))


def is_collapsing(probabilities: Sequence[float]) -> bool:
    """Whether a few choices hold nearly all probability: the effective number is less than a third of the way from 1 to all.

    Of two choices one may deserve everything; that is no collapse.
    """
    return len(probabilities) > 2 and effective_number(probabilities) < 1 + (len(probabilities) - 1) / 3


def describe_collapse(probabilities: Sequence[float]) -> str:
    return (
        f"the policy is collapsing, to {effective_number(probabilities):.1f} effective choices of {len(probabilities)}; the largest has a "
        f"share of {max(probabilities):.2f}. Sources that are alike favour each other, or the others are bad: print(learner) tells. Remedies: MixturePolicy(floor=, ceiling=); "
        "InLoop(reference=), a function that returns a held-out loss; or InLoop(interleave=True), if no source can be bad."
    )


def summarise_rewards(policy: Policy, draws: Sequence[Draw], rewards_N: Tensor) -> dict[str, Any]:
    """The reward fields of a report, over the examples of all processes."""
    values_N = rewards_N.numpy()
    return {
        "reward_mean": float(values_N.mean()),
        "reward_std": deviation(values_N),
        "rewards": policy.summarise(
            draws[0].rewarded if len(draws) == 1 else concatenate([draw.rewarded for draw in draws]), rewards_N
        ),
    }
