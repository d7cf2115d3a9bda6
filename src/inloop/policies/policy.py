"""The abstract policy: a distribution over choices, one choice drawn for each example."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from inloop.policies.actions import Actions


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """Rewards of one step by choice. Axis K counts the choices; mean and std are nan where too few were drawn."""

    count_K: Tensor
    mean_K: Tensor
    std_K: Tensor


class Policy(nn.Module, ABC):
    """A distribution over per-example choices with learnable parameters.

    Subclasses define ``sample``, ``log_prob`` and ``neutral``; to appear in reports also ``probabilities`` and ``summarise``.

    Attributes:
        alternatives: Names of the policy's own parameters whose last axis counts the alternatives of one choice, with a higher value for a
            likelier one. :class:`~inloop.updates.Anchored` compares alternatives with their median.
    """

    alternatives: frozenset[str] = frozenset()

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Actions:
        """Draw a choice for each of ``n`` examples; all randomness comes from ``generator``."""

    @abstractmethod
    def log_prob(self, actions: Actions) -> Tensor:
        """``log p(a_i)`` for each example, shape [N], differentiable in the policy's parameters."""

    @abstractmethod
    def neutral(self, n: int, generator: torch.Generator | None = None) -> Actions:
        """Choices that do not depend on the policy's parameters, for the plain steps of interleaving."""

    def probabilities(self) -> Tensor | Mapping[str, object]:
        """The present distribution, for reports."""
        return {}

    def value(self) -> tuple[bytes, ...]:
        """The values of all its tensors, to see whether anybody has changed them: fused optimizers do not raise the versions of tensors."""
        modules = self.modules()
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        return tuple([(t.float() if t.dtype is torch.bfloat16 else t).detach().numpy().tobytes() for t in tensors])

    def summarise(self, actions: Actions, rewards_N: Tensor) -> RewardSummary | dict[str, object]:
        """The rewards of one step, grouped by choice."""
        return summarise_by_choice(torch.zeros_like(rewards_N, dtype=torch.long), 1, rewards_N)


def summarise_by_choice(choice_N: Tensor, num_choices: int, rewards_N: Tensor) -> RewardSummary:
    """Count, mean and unbiased standard deviation of the rewards of each choice."""
    chosen_N, values_N = choice_N.cpu().numpy(), rewards_N.detach().double().cpu().numpy()
    count_K = np.bincount(chosen_N, minlength=num_choices)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_K = np.bincount(chosen_N, values_N, minlength=num_choices) / count_K
        squares_K = np.bincount(chosen_N, (values_N - mean_K[chosen_N]) ** 2, minlength=num_choices)
        std_K = np.where(count_K > 1, np.sqrt(squares_K / (count_K - 1)), np.nan)
    return RewardSummary(*map(torch.from_numpy, (count_K, mean_K, std_K)))
