"""REINFORCE: the policy moves towards choices that were rewarded.

    G = sum over the steps of a window, sum_i  w_i ∇_φ log p(a_i; φ_t)         w: the normalised rewards

with φ_t the parameters that drew a_i. After ``accumulate`` steps the policy's optimizer climbs along G. Up to the factor
-α/n that the paper's equation 3 leaves out, and with w = r, this estimates the gradient of the next step's loss.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.rewards import NextStepLoss, Normalisation, Reward, deviation
from inloop.step import Draw
from inloop.updates.update import Update


class Reinforce(Update):
    """Accumulates policy gradients over a window of steps, then takes one optimizer step.

    Args:
        optimizer: Over the policy's parameters; by default ``Adam(lr=0.1)``, the paper's.
        accumulate: Rewarded steps for each update of the policy.
        normalisation: Of rewards: "step" (mean 0 and deviation 1 within the step), "center" (mean 0 only: steps with small rewards
            then count little, as when a model has fitted its data), "window" (within the accumulated steps), "none"; by default
            the one that suits the reward.
        start_after: Rewarded steps before the policy first moves.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        accumulate: int = 10,
        normalisation: Normalisation | None = None,
        start_after: int = 0,
    ) -> None:
        super().__init__()
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: allowed are whole numbers from 1.")
        if start_after < 0:
            raise UsageError(f"start_after={start_after}: allowed are whole numbers from 0.")
        if normalisation is not None and normalisation not in get_args(Normalisation):
            raise UsageError(f"normalisation={normalisation!r}: allowed are {', '.join(get_args(Normalisation))}.")
        self._given_optimizer, self._given_normalisation = optimizer, normalisation
        self.accumulate = accumulate
        self.start_after = start_after

    def begin(self, policy: Policy, reward: Reward) -> None:
        if not trainable(policy):
            raise UsageError(
                f"The policy, a {type(policy).__name__}, has no parameters to learn. Fix: give one that has, or update=False to watch only."
            )
        self.normalisation: Normalisation = self._given_normalisation or reward.normalisation
        if isinstance(reward, NextStepLoss) and self.normalisation in ("step", "center"):
            raise UsageError(
                f"normalisation={self.normalisation!r} leaves nothing of the next step's loss, which is the same for all examples of a step. "
                "Fix: use 'window' or 'none', or leave it out."
            )
        self.optimizer = self._given_optimizer or torch.optim.Adam(policy.parameters(), lr=0.1)
        held = {id(p) for group in getattr(self.optimizer, "param_groups", []) for p in group["params"]}
        if not {id(p) for p in trainable(policy)} <= held <= {id(p) for p in policy.parameters()}:
            raise UsageError(
                "The policy's optimizer must hold the policy's parameters and no others. Fix: make one for it, as in "
                "inloop.Reinforce(torch.optim.Adam(policy.parameters(), lr=0.1))."
            )
        self._parameters = trainable(policy)
        self._num_seen = 0
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._moments = torch.zeros(
            3, dtype=torch.float64, device="cpu"
        )  # count, sum and sum of squares of the window's rewards
        # sum r ∇log p and, for normalising over the window, sum ∇log p
        self._rewarded = [torch.zeros_like(p) for p in self._parameters]
        self._unrewarded = [torch.zeros_like(p) for p in self._parameters]

    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        self._num_seen += 1
        if self._num_seen <= self.start_after:
            return False
        rewards_N = rewards_N.detach().to("cpu", torch.float64)
        weights_N = rewards_N
        if self.normalisation == "step":
            weights_N = normalise(rewards_N)
        elif self.normalisation == "center":
            weights_N = rewards_N - rewards_N.mean()
        parts = list(zip(draws, torch.split(weights_N, [sum(draw.rewarded_counts) for draw in draws]), strict=True))
        rewarded = [score_gradient(draw, weights_n) for draw, weights_n in parts]
        if self.normalisation == "window":
            _add(self._unrewarded, [score_gradient(draw, torch.ones_like(weights_n)) for draw, weights_n in parts])
        _add(self._rewarded, rewarded)
        self._moments += torch.stack(
            [torch.tensor(float(len(rewards_N)), device="cpu"), rewards_N.sum(), rewards_N.square().sum()]
        )
        self._steps += 1
        if self._steps < self.accumulate:
            return False
        self._update()
        return True

    def _update(self) -> None:
        gradients = self._rewarded
        if self.normalisation == "window":  # sum (r - mean)/std ∇log p, from the sums
            mean, std = _mean_and_std(*self._moments.tolist())
            gradients = [
                (r - mean * u) / std if std > 0 else torch.zeros_like(r)
                for r, u in zip(gradients, self._unrewarded, strict=True)
            ]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = -gradient  # optimizers descend
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "num_seen": self._num_seen,
            "steps": self._steps,
            "moments": self._moments.clone(),
            "rewarded": [g.clone() for g in self._rewarded],
            "unrewarded": [g.clone() for g in self._unrewarded],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self._steps, self._num_seen = state["version"], state["steps"], state["num_seen"]
        self._moments.copy_(state["moments"])
        for own, saved in ((self._rewarded, state["rewarded"]), (self._unrewarded, state["unrewarded"])):
            for gradient, value in zip(own, saved, strict=True):
                gradient.copy_(value)


def normalise(rewards_N: Tensor) -> Tensor:
    """``(r - mean) / std`` with the unbiased std; zero where there is no spread, as for a batch of one."""
    values_N = rewards_N.numpy()
    std = deviation(values_N)
    return torch.from_numpy((values_N - values_N.mean()) / std) if std > 0 else torch.zeros_like(rewards_N)


def _mean_and_std(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / count if count else 0.0
    return mean, max(0.0, (squares - count * mean * mean) / (count - 1)) ** 0.5 if count > 1 else 0.0


def score_gradient(draw: Draw, weights_N: Tensor) -> list[Tensor]:
    """``sum_i w_i ∇_φ log p(a_i; φ_t)``, at the parameters that drew the actions."""
    parameters = trainable(draw.policy)
    log_prob_N = draw.policy.log_prob(draw.rewarded)
    objective = (weights_N.to(log_prob_N) * log_prob_N).sum()
    gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


def trainable(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _add(sums: list[Tensor], parts: list[list[Tensor]]) -> None:
    for part in parts:
        for total, gradient in zip(sums, part, strict=True):
            total += gradient
