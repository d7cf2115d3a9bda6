"""What a learner tells about each of its steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inloop.policies import Policy, RewardSummary, concatenate
from inloop.step import Draw


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of ``InLoop.step`` did; also what its callback is called with.

    Attributes:
        step: The number of this step, from 1.
        lag: How many updates the policy made between drawing this step's actions and their use.
        dropped: Why the step that waited went unrewarded; None if it did not. (After a loss or a gradient that is not finite this step will
            not be rewarded, either.)
        num_dropped: How often that was so.
        probabilities: The policy after this step.
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
        """Whether a few choices have nearly everything; see :func:`is_collapsing`."""
        return is_collapsing(self.shares)

    @property
    def shares(self) -> list[float]:
        """The probability of each choice, if the policy has one choice to make; of a product that of its factor "source"; else none."""
        p = self.probabilities.get("source") if isinstance(self.probabilities, Mapping) else self.probabilities
        return p.tolist() if isinstance(p, Tensor) and p.dim() == 1 else []


def effective_number(probabilities: Sequence[float]) -> float:
    """``exp`` of the entropy: K for K equal shares, 1 for a single one that has all."""
    return math.exp(-sum([p * math.log(p) for p in probabilities if p > 0]))


def is_collapsing(probabilities: Sequence[float]) -> bool:
    """Whether a few choices have nearly everything: less than a third of the way from one choice to all.

    Of two choices one may well deserve everything; that is no collapse.
    """
    return len(probabilities) > 2 and effective_number(probabilities) < 1 + (len(probabilities) - 1) / 3


def describe_collapse(probabilities: Sequence[float]) -> str:
    return (
        f"the policy is collapsing, to {effective_number(probabilities):.1f} effective choices of {len(probabilities)}; the largest has a "
        f"share of {max(probabilities):.2f}. Sources that are alike favour each other. Remedies: MixturePolicy(floor=, ceiling=); "
        "InLoop(reference=), a function that returns a held-out loss; or InLoop(interleave=True), if no source can be bad."
    )


def summarise_rewards(policy: Policy, draws: Sequence[Draw], rewards_N: Tensor) -> dict[str, Any]:
    """The reward fields of a report, over the examples of all processes."""
    return {
        "reward_mean": float(rewards_N.mean()),
        "reward_std": float(rewards_N.std()) if len(rewards_N) > 1 else 0.0,
        "rewards": policy.summarise(
            draws[0].rewarded if len(draws) == 1 else concatenate([draw.rewarded for draw in draws]), rewards_N
        ),
    }
