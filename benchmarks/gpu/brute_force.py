"""The rewards of a training run by brute force: ``r_i = <∇l_i(θ_t), ∇L(θ_{t+1})>``, one backward pass for each example.

With BatchNorm, whose examples have no gradients of their own, each example has its own copy of the parameters instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from benchmarks.gpu.precisions import Precision
from benchmarks.gpu.problems import Problem
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from inloop.alignment.oracles import align_by_loss, align_by_path

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class BruteForce:
    """Computes rewards on a device in a precision.

    Args:
        inputs: The type of the inputs that the training was given; they are not drawn anew in more digits.
    """

    problem: Problem
    device: str
    precision: Precision
    inputs: torch.dtype

    def rewards(self, states: Sequence[State]) -> Tensor:
        """Of all steps but the last, [steps - 1, N], on the CPU in float64.

        Args:
            states: The model's before each step.
        """
        rewards = []
        with self.precision.settings():
            for step in range(len(states) - 1):
                direction = self._gradient(states[step + 1], step + 1)
                rewards.append(self._own_rewards(states[step], step, direction))
        return torch.stack(rewards).double().cpu()

    def _gradient(self, state: State, step: int) -> dict[str, Tensor]:
        """Return the gradient of a step's batch, without that of BatchNorm's own parameters, which do not count."""
        model = self._model(state)
        self._losses(model, step).mean().backward()
        return {
            f"{path}.{name}": parameter.grad
            for path, module in model.named_modules()
            if not isinstance(module, _BatchNorm)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.grad is not None
        }

    def _own_rewards(self, state: State, step: int, direction: dict[str, Tensor]) -> Tensor:
        """Return the product of each example's gradient with a direction, [N]."""
        model = self._model(state)
        if self.problem.couples_examples:
            rewards_N = align_by_path(model, lambda model: self._losses(model, step).mean(), direction)
        else:
            rewards_N = align_by_loss(model, self._losses(model, step), direction)
        return rewards_N.detach()

    def _model(self, state: State) -> nn.Module:
        model = self.problem.model(self.precision.dtype)
        model.load_state_dict(state)
        return model.to(self.device)

    def _losses(self, model: nn.Module, step: int) -> Tensor:
        x, y = self.problem.batch(step, self.inputs)
        x = x.to(self.precision.dtype) if x.is_floating_point() else x
        with self.precision.forward(self.device):
            return self.problem.losses(model(x.to(self.device)), y.to(self.device))
