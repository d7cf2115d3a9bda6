"""The training loop of a user, which keeps all rewards; every section trains by it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu.precisions import EXACT, Precision
from benchmarks.gpu.problems import Problem
from torch import Tensor, nn

from inloop import InLoop, MixturePolicy
from inloop.alignment import sizes
from inloop.rewards import GradientAlignment

STEPS = 10
SOURCES = 3  # the policy's choices: they do not matter here, since each step has its own batch
SIZES = ("as they are", "as large ones")


@contextmanager
def calls(size: str) -> Iterator[None]:
    """Align the calls of small models as they are, many together; or as those of large ones, each by itself while the next gradients form."""
    if size == "as they are":
        yield
        return
    none = {"cpu": 0, "other": 0}
    with mock.patch.multiple(sizes, SMALL_CALL=0, SMALL_PRODUCT=0, PRODUCTS=none, GROUP=none):
        yield


class KeptRewards(GradientAlignment):
    """Gradient alignment that keeps the rewards of all steps."""

    aligns_once = True

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, step: Any, judge: Any) -> Tensor:
        rewards_N = super().__call__(step, judge)
        self.steps.append(rewards_N.detach())
        return rewards_N


class Training:
    """A model on a device, an optimizer, and a learner.

    Args:
        wrap: Given the model, returns what is called in its place: for several processes.
        options: The learner's.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        precision: Precision = EXACT,
        wrap: Any = None,
        **options: Any,
    ) -> None:
        self.problem, self.device, self.precision = problem, device, precision
        self.model = problem.model(precision.dtype).to(device)
        self.called: nn.Module = self.model if wrap is None else wrap(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.kept = KeptRewards()
        generator = torch.Generator().manual_seed(0)
        policy = MixturePolicy(SOURCES)
        self.learner = InLoop(self.called, policy, reward=self.kept, generator=generator, **options)

    def batch(self, step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The examples of a step on the device, or a part of them."""
        x, y = self.problem.batch(step, self.precision.dtype)
        return x[part].to(self.device), y[part].to(self.device)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.precision.forward(self.device):
            return self.problem.losses(self.called(x), y).mean()

    def step(self, x: Tensor, y: Tensor) -> None:
        """A whole training step."""
        self.learner.sample(len(x))
        loss = self.loss(x, y)
        loss.backward()
        self.finish(loss)

    def finish(self, loss: Tensor) -> None:
        """Let the learner look at the gradients, then the optimizer move the model."""
        self.learner.step(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """A copy of the parameters and buffers, on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def rewards(self) -> Tensor:
        """Of all rewarded steps, [STEPS - 1, N], on the CPU in float64."""
        return torch.stack(self.kept.steps).double().cpu()


def error_of(rewards: Tensor, right: Tensor) -> float:
    """The largest difference of a reward, as a share of the largest reward; infinite if some are missing."""
    if rewards.shape != right.shape:
        return float("inf")
    error = float((rewards - right).abs().max() / right.abs().max())
    return error if error == error else float("inf")
