"""Rewards: how good were the choices of step t, judged by a reference, usually the step after it.

gradient alignment (GAR)     r_i = <∇l_i(θ_t), ∇L(θ_{t+1})>        one reward for each example (equation 1)
next-step loss (NSLR)        r   = -L(θ_{t+1})                     one reward for the whole batch
loss                         r_i = l_i(θ_t)                        for baselines that follow the loss
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.step import Judge, Step

Normalisation = Literal["step", "center", "window", "none"]


class Reward(ABC):
    """A reward for every example of a step.

    Attributes:
        needs_tape: Whether the layer calls of the step must be recorded. Every reward says so.
        normalisation: How REINFORCE normalises this reward by default.
        aligns_once: Whether the reward calls ``step.align(judge)`` one time, and nothing else on the tape. The engine may then align and
            free the tape while a backward pass runs. Subclasses must set this themselves.
    """

    needs_tape: bool
    aligns_once: bool = False
    normalisation: Normalisation = "step"

    @abstractmethod
    def __call__(self, step: Step, judge: Judge) -> Tensor:
        """The rewards of the step's examples, shape [N]."""

    def may_align_early(self) -> bool:
        return bool(vars(type(self)).get("aligns_once", False))


class GradientAlignment(Reward):
    """``r_i = <∇l_i(θ_t), g>``, exact for each example."""

    needs_tape = True
    aligns_once = True

    def __call__(self, step: Step, judge: Judge) -> Tensor:
        return step.align(judge)


class NextStepLoss(Reward):
    """``r = -L(θ_{t+1})``, the same for all examples; normalising it within the step would make it zero."""

    needs_tape = False
    normalisation: Normalisation = "none"

    def __call__(self, step: Step, judge: Judge) -> Tensor:
        return torch.full((step.num_examples,), -float(judge.loss), dtype=torch.float64, device="cpu")


class ExampleLoss(Reward):
    """``r_i = l_i(θ_t)``, for baselines that prefer examples that are not learned yet; ``learner.step`` must be given the losses."""

    needs_tape = False
    normalisation: Normalisation = "none"

    def __call__(self, step: Step, judge: Judge) -> Tensor:
        if step.losses_N is None:
            raise UsageError(
                "The reward 'loss' needs the loss of each example. Fix: call learner.step(losses.mean(), losses=losses)."
            )
        return step.losses_N


def deviation(values_N: np.ndarray[Any, Any]) -> float:
    """The unbiased standard deviation; exactly 0 for equal values, whose mean may differ from them by rounding."""
    if len(values_N) < 2 or values_N.min() == values_N.max():
        return 0.0
    return float(values_N.std(ddof=1))


_REWARDS: dict[str, type[Reward]] = {"gar": GradientAlignment, "nslr": NextStepLoss, "loss": ExampleLoss}


def as_reward(reward: str | Reward) -> Reward:
    """A reward by its short name, or the reward itself."""
    if isinstance(reward, Reward):
        if not isinstance(getattr(reward, "needs_tape", None), bool):
            raise UsageError(
                f"{type(reward).__name__} does not say whether it needs the recorded layers of a step. Fix: write needs_tape = True, or "
                "False, in the class."
            )
        return reward
    if reward not in _REWARDS:
        raise UsageError(
            f"reward={reward!r}: allowed are {', '.join(map(repr, _REWARDS))} and an inloop.rewards.Reward."
        )
    return _REWARDS[reward]()
