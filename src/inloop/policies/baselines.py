"""What a learned mixture must beat: fixed mixtures, and mixtures that follow the loss. Axes: N examples, K sources.

They have the same interface as learned policies, so the same sampler, records and report serve them; they learn, if at all, by their own
rule instead of REINFORCE.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies.actions import Actions
from inloop.policies.discrete import Discrete
from inloop.policies.mixture import count_sources
from inloop.policies.policy import SelfTaught


class _Shares(Discrete, SelfTaught):
    """A mixture whose shares are a buffer, not the outcome of parameters."""

    shares_K: Tensor

    def __init__(self, shares: Sequence[float]) -> None:
        if len(shares) < 2 or min(shares) < 0 or not sum(shares) > 0:
            raise UsageError(f"shares={list(shares)}: needed are at least 2 numbers, none below 0 and not all 0.")
        super().__init__(len(shares))
        shares_K = torch.tensor(shares, dtype=torch.float64)
        self.register_buffer("shares_K", shares_K / shares_K.sum())

    def log_probabilities(self) -> Tensor:
        return self.shares_K.log()

    def learn(self, actions: Actions, rewards_N: Tensor, probabilities_N: Tensor) -> bool:
        """Nothing: the mixture stays as it is."""
        return False


class FixedMixture(_Shares):
    """Shares that never change.

    Example:
        >>> FixedMixture.proportional([300, 100]).probabilities()
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    @classmethod
    def uniform(cls, num_sources: int) -> "FixedMixture":
        """All sources alike."""
        return cls([1.0] * count_sources(num_sources))

    @classmethod
    def proportional(cls, sizes: Sequence[int]) -> "FixedMixture":
        """As if all sources were one."""
        return cls([float(size) for size in sizes])

    @classmethod
    def tempered(cls, sizes: Sequence[int], temperature: float) -> "FixedMixture":
        """``p_k ∝ size_k ** (1 / temperature)``: proportional at 1, nearly uniform when it is large."""
        if not temperature > 0:
            raise UsageError(f"temperature={temperature}: allowed are numbers above 0.")
        return cls([float(size) ** (1 / temperature) for size in sizes])


class LossMixture(_Shares):
    """``p_k = softmax(L_k / temperature)``, with L_k a running mean of the losses of source k: more of what is not learned yet.

    It takes the reward "loss". A source that cannot be learned, such as one with wrong labels, is preferred.

    Args:
        smoothing: How much of L_k stays at each step that has examples of source k.
    """

    losses_K: Tensor

    def __init__(self, num_sources: int, temperature: float = 1.0, smoothing: float = 0.9) -> None:
        num_sources = count_sources(num_sources)
        super().__init__([1.0] * num_sources)
        if not temperature > 0 or not 0 <= smoothing < 1:
            raise UsageError(
                f"temperature={temperature}, smoothing={smoothing}: allowed are numbers above 0, and from 0 to below 1."
            )
        self.temperature, self.smoothing = temperature, smoothing
        self.register_buffer("losses_K", torch.full((num_sources,), torch.nan, dtype=torch.float64))

    def learn(self, actions: Actions, rewards_N: Tensor, probabilities_N: Tensor) -> bool:
        summary = self.summarise(actions, rewards_N)
        seen_K = summary.count_K > 0
        before_K = torch.where(self.losses_K.isnan(), summary.mean_K, self.losses_K)
        after_K = self.smoothing * before_K + (1 - self.smoothing) * summary.mean_K
        self.losses_K = torch.where(seen_K, after_K, self.losses_K)
        known_K = torch.where(self.losses_K.isnan(), self.losses_K.nanmean(), self.losses_K)
        self.shares_K = (known_K / self.temperature).softmax(dim=0)
        return True


class OnlineDataMixing(_Shares):
    """Exp3, an adversarial bandit with a source for each arm, as used for data mixing by Albalak et al. (arXiv 2312.02406).

    ::

        R_k <- α R_k + (1 - α) r_k / p_k            ε_t = min(1 / K, sqrt(log K / (K t)))
        p_k  = (1 - K ε_t) softmax(ε_{t-1} R)_k + ε_t

    r_k / p_k is estimated by ``sum_{i: a_i = k} r_i / (N p_k)`` over a mixed batch, with the p_k that drew it, where the authors draw one source
    for each batch.
    The reward is the loss (theirs), or any other.

    Args:
        smoothing: α.
    """

    returns_K: Tensor
    num_updates: Tensor

    def __init__(self, num_sources: int, smoothing: float = 0.9) -> None:
        num_sources = count_sources(num_sources)
        super().__init__([1.0] * num_sources)
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing={smoothing}: allowed are numbers from 0 to below 1.")
        self.smoothing = smoothing
        self.register_buffer("returns_K", torch.zeros(num_sources, dtype=torch.float64))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long))

    def learn(self, actions: Actions, rewards_N: Tensor, probabilities_N: Tensor) -> bool:
        choice_N = self.check(actions)
        rewards_N = rewards_N.detach().to("cpu", torch.float64)
        weighted_N = rewards_N / (len(rewards_N) * probabilities_N.to("cpu", torch.float64))
        estimate_K = torch.zeros(self.num_choices, dtype=torch.float64).index_add_(0, choice_N.cpu(), weighted_N)
        self.returns_K = self.smoothing * self.returns_K + (1 - self.smoothing) * estimate_K
        before, now = self._exploration(), self._exploration(1)
        self.num_updates = self.num_updates + 1
        self.shares_K = (1 - self.num_choices * now) * (before * self.returns_K).softmax(dim=0) + now
        return True

    def _exploration(self, ahead: int = 0) -> float:
        k, t = self.num_choices, int(self.num_updates) + ahead
        return 1 / k if t == 0 else min(1 / k, math.sqrt(math.log(k) / (k * t)))
