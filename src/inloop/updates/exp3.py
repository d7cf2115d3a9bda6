"""A bandit with a source for each arm. Axes: N examples, K sources."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.rewards import Reward
from inloop.step import Draw
from inloop.updates.shares import joined_actions, shares_in
from inloop.updates.update import Update


class Exp3(Update):
    """Exp3, an adversarial bandit, as used for data mixing by Albalak et al. (arXiv 2312.02406).

    ::

        R_k <- α R_k + (1 - α) r_k / p_k            ε_t = min(1 / K, sqrt(log K / (K t)))
        p_k  = (1 - K ε_t) softmax(ε_{t-1} R)_k + ε_t

    r_k / p_k is estimated by ``sum_{i: a_i = k} r_i / (N p_k)`` over a mixed batch, with the p_k that drew it, where the authors draw one
    source for each batch. It moves a :class:`~inloop.policies.Shares`. The reward is the loss (theirs), or any other.

    Args:
        smoothing: α.
    """

    def __init__(self, smoothing: float = 0.9) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing={smoothing}: allowed are numbers from 0 to below 1.")
        self.smoothing = smoothing

    def begin(self, policy: Policy, reward: Reward) -> None:
        self._shares = shares_in(policy, self)
        self.returns_K = torch.zeros(self._shares.num_choices, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        source_N = joined_actions(draws)
        drawn_with = [shares_in(draw.policy, self).probabilities() for draw in draws]
        counts = [sum(draw.rewarded_counts) for draw in draws]
        rows = torch.arange(len(draws), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
        probability_N = torch.stack(drawn_with)[rows, source_N.cpu()]
        weighted_N = rewards_N.detach().to("cpu", torch.float64) / (len(rewards_N) * probability_N)
        k = self._shares.num_choices
        estimate_K = torch.zeros(k, dtype=torch.float64, device="cpu").index_add_(0, source_N.cpu(), weighted_N)
        self.returns_K = self.smoothing * self.returns_K + (1 - self.smoothing) * estimate_K
        before, now = self._exploration(self.version), self._exploration(self.version + 1)
        self._shares.shares_K = (1 - k * now) * (before * self.returns_K).softmax(dim=0) + now
        self.version += 1
        return True

    def _exploration(self, t: int) -> float:
        k = self._shares.num_choices
        return 1 / k if t == 0 else min(1 / k, math.sqrt(math.log(k) / (k * t)))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"returns": self.returns_K.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.returns_K = state["returns"].clone()
