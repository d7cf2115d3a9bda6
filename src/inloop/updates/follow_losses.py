"""More of the sources that are not learned yet. Axis K counts the sources."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Policy, RewardSummary
from inloop.rewards import ExampleLoss, Reward
from inloop.step import Draw
from inloop.updates.shares import joined_actions, shares_in
from inloop.updates.update import Update


class FollowLosses(Update):
    """``p_k = softmax(L_k / temperature)``, with L_k a running mean of the losses of source k.

    It moves a :class:`~inloop.policies.Shares`, and takes the reward "loss". It prefers a source that cannot be learned, such as one with
    wrong labels.

    Args:
        smoothing: How much of L_k stays at each step that has examples of source k.
    """

    def __init__(self, temperature: float = 1.0, smoothing: float = 0.9) -> None:
        super().__init__()
        if not temperature > 0 or not 0 <= smoothing < 1:
            raise UsageError(
                f"temperature={temperature}, smoothing={smoothing}: allowed are numbers above 0, and from 0 to below 1."
            )
        self.temperature, self.smoothing = temperature, smoothing

    def begin(self, policy: Policy, reward: Reward) -> None:
        if not isinstance(reward, ExampleLoss):
            raise UsageError(
                f"FollowLosses needs the losses of the examples, and the reward is {type(reward).__name__}. Fix: reward='loss'."
            )
        self._shares = shares_in(policy, self)
        self.losses_K = torch.full((self._shares.num_choices,), torch.nan, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        summary = self._shares.summarise(joined_actions(draws), rewards_N.detach().cpu())
        self._follow(summary)
        self.version += 1
        return True

    def _follow(self, summary: RewardSummary) -> None:
        before_K = torch.where(self.losses_K.isnan(), summary.mean_K, self.losses_K)
        after_K = self.smoothing * before_K + (1 - self.smoothing) * summary.mean_K
        self.losses_K = torch.where(summary.count_K > 0, after_K, self.losses_K)
        known_K = torch.where(self.losses_K.isnan(), self.losses_K.nanmean(), self.losses_K)
        self._shares.shares_K = (known_K / self.temperature).softmax(dim=0)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"losses": self.losses_K.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.losses_K = state["losses"].clone()
