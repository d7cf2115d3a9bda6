"""What a learner tells about each of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inloop.draws import Draw
from inloop.policies import Policy, RewardSummary, concatenate


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of ``InLoop.step`` did; also what its callback is called with.

    Attributes:
        step: The number of this step, from 1.
        paid: Whether examples were rewarded.
        updated: Whether the policy moved.
        dropped: Why this step, and the one that waited for it, was dropped; None if it was not.
        num_dropped: How many steps were dropped so far.
        lag: How many updates the policy made between drawing this step's actions and their use.
        probabilities: The policy after this step.
        reward_mean: Mean of the rewards that were paid, nan if none were.
        reward_std: Their unbiased standard deviation.
        rewards: The rewards by choice (by source, for a mixture; by factor, for a product), None if none were paid.
    """

    step: int
    paid: bool
    updated: bool
    dropped: str | None
    num_dropped: int
    lag: int
    probabilities: Tensor | dict[str, object]
    reward_mean: float
    reward_std: float
    rewards: RewardSummary | dict[str, object] | None


def summarise_rewards(policy: Policy, draws: Sequence[Draw], rewards_N: Tensor | None) -> dict[str, Any]:
    """The reward fields of a report."""
    if rewards_N is None:
        return {"reward_mean": float("nan"), "reward_std": float("nan"), "rewards": None}
    by_choice = policy.summarise(concatenate([draw.actions for draw in draws]), rewards_N)
    spread = float(rewards_N.std()) if len(rewards_N) > 1 else 0.0
    return {"reward_mean": float(rewards_N.mean()), "reward_std": spread, "rewards": by_choice}
