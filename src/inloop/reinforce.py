"""How a policy learns from rewards; by REINFORCE, it moves towards choices that were rewarded.

    G = sum over the steps of a window, sum_i  w_i ∇_φ log p(a_i; φ_t)         w: the normalised rewards

with φ_t the parameters that drew a_i. After ``accumulate`` steps the policy's optimizer climbs along G. Up to the factor
-α/n that the paper's equation 3 leaves out, and with w = r, this estimates the gradient of the next step's loss.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from inloop.draws import Draw
from inloop.errors import UsageError
from inloop.policies import Policy, SelfTaught, concatenate
from inloop.rewards import Normalisation


class Reinforce:
    """Accumulates policy gradients over a window of steps, then takes one optimizer step."""

    def __init__(
        self, policy: Policy, optimizer: torch.optim.Optimizer, accumulate: int, normalisation: Normalisation
    ) -> None:
        held = {id(p) for group in getattr(optimizer, "param_groups", []) for p in group["params"]}
        if not {id(p) for p in trainable(policy)} <= held <= {id(p) for p in policy.parameters()}:
            raise UsageError(
                "The policy's optimizer must hold the policy's parameters and no others. Fix: make one for it, as in "
                "torch.optim.Adam(policy.parameters(), lr=0.1)."
            )
        self.policy = policy
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.normalisation = normalisation
        self.version = 0
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._moments = torch.zeros(3, dtype=torch.float64)  # count, sum and sum of squares of the window's rewards
        # sum r ∇log p and, for normalising over the window, sum ∇log p
        self._rewarded = [torch.zeros_like(p) for p in trainable(self.policy)]
        self._unrewarded = [torch.zeros_like(p) for p in trainable(self.policy)]

    def add(self, rewards_N: Tensor, draws: Sequence[Draw]) -> bool:
        """Take in one step's rewards, of all processes, in the order of its draws; returns whether the policy was updated."""
        rewards_N = rewards_N.detach().to("cpu", torch.float64)
        weights_N = rewards_N
        if self.normalisation == "step":
            weights_N = normalise(rewards_N)
        elif self.normalisation == "center":
            weights_N = rewards_N - rewards_N.mean()
        parts = list(zip(draws, torch.split(weights_N, [sum(draw.paid_counts) for draw in draws]), strict=True))
        rewarded = [score_gradient(draw, weights_n) for draw, weights_n in parts]
        if self.normalisation == "window":
            _add(self._unrewarded, [score_gradient(draw, torch.ones_like(weights_n)) for draw, weights_n in parts])
        _add(self._rewarded, rewarded)
        self._moments += torch.stack([torch.tensor(float(len(rewards_N))), rewards_N.sum(), rewards_N.square().sum()])
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
        for parameter, gradient in zip(trainable(self.policy), gradients, strict=True):
            parameter.grad = -gradient  # optimizers descend
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "steps": self._steps,
            "moments": self._moments.clone(),
            "rewarded": [g.clone() for g in self._rewarded],
            "unrewarded": [g.clone() for g in self._unrewarded],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self._steps = state["version"], state["steps"]
        self._moments.copy_(state["moments"])
        for own, saved in ((self._rewarded, state["rewarded"]), (self._unrewarded, state["unrewarded"])):
            for gradient, value in zip(own, saved, strict=True):
                gradient.copy_(value)


class OwnRule:
    """Lets a policy learn by its own rule, each step."""

    def __init__(self, policy: SelfTaught) -> None:
        self.policy = policy
        self.version = 0

    def add(self, rewards_N: Tensor, draws: Sequence[Draw]) -> bool:
        """Take in one step's rewards, of all processes, in the order of its draws; returns whether the policy was updated."""
        with torch.no_grad():
            probabilities_N = torch.cat([draw.policy.log_prob(draw.paid).exp() for draw in draws])
            actions = concatenate([draw.paid for draw in draws])
            updated = self.policy.learn(actions, rewards_N.detach().cpu(), probabilities_N)
        self.version += updated
        return updated

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


def make_updater(
    policy: Policy, optimizer: torch.optim.Optimizer | None, accumulate: int, normalisation: Normalisation
) -> Reinforce | OwnRule:
    """What lets this policy learn: its own rule, if it has one, else REINFORCE, by default with ``Adam(lr=0.1)``."""
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}: allowed are whole numbers from 1.")
    if normalisation not in get_args(Normalisation):
        raise UsageError(f"normalisation={normalisation!r}: allowed are {', '.join(get_args(Normalisation))}.")
    if isinstance(policy, SelfTaught):
        if optimizer is not None:
            raise UsageError(
                f"A {type(policy).__name__} learns by a rule of its own, and has no use for an optimizer. Fix: leave out policy_optimizer."
            )
        return OwnRule(policy)
    if not trainable(policy):
        raise UsageError(
            f"The policy, a {type(policy).__name__}, has no parameters to learn. Fix: give one that has, or a baseline by itself."
        )
    return Reinforce(policy, optimizer or torch.optim.Adam(policy.parameters(), lr=0.1), accumulate, normalisation)


def normalise(rewards_N: Tensor) -> Tensor:
    """``(r - mean) / std`` with the unbiased std; zero where there is no spread, as for a batch of one."""
    if len(rewards_N) < 2:
        return torch.zeros_like(rewards_N)
    centred_N, std = rewards_N - rewards_N.mean(), rewards_N.std()
    return centred_N / std if std > 0 else torch.zeros_like(rewards_N)


def _mean_and_std(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / count if count else 0.0
    return mean, max(0.0, (squares - count * mean * mean) / (count - 1)) ** 0.5 if count > 1 else 0.0


def score_gradient(draw: Draw, weights_N: Tensor) -> list[Tensor]:
    """``sum_i w_i ∇_φ log p(a_i; φ_t)``, at the parameters that drew the actions."""
    parameters = trainable(draw.policy)
    log_prob_N = draw.policy.log_prob(draw.paid)
    objective = (weights_N.to(log_prob_N) * log_prob_N).sum()
    gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


def trainable(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _add(sums: list[Tensor], parts: list[list[Tensor]]) -> None:
    for part in parts:
        for total, gradient in zip(sums, part, strict=True):
            total += gradient
