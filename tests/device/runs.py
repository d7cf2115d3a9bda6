"""The training loop of a user, on any device, and its rewards; equal to those on the CPU if all is well."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from inloop import InLoop, Mixture, MixturePolicy
from inloop.rewards import GradientAlignment
from tests.device.problems import PROBLEMS, Problem


class KeptRewards(GradientAlignment):
    """Gradient alignment, with the rewards of all steps for the test."""

    aligns_once = True

    def __init__(self) -> None:
        self.rewards: list[Tensor] = []

    def __call__(self, step: Any, judge: Any) -> Tensor:
        rewards_N = super().__call__(step, judge)
        self.rewards.append(rewards_N.detach())
        return rewards_N


class Run:
    """A model, a mixture, a learner and the loop around them. Batches are moved to the device unless the sources are there.

    Args:
        make_optimizer: Called with the model's parameters.
        knows_optimizer: Whether the learner is given the optimizer.
        autocast: The type of mixed precision, or None.
        scaler: Whether to scale the loss, as for float16.
        micro_batches: How many of them a step has.
        on_device: Whether the sources are on the device.
        tells: Whether the learner is told logits and labels.
        options: The learner's; a function among them is called with the run.
    """

    def __init__(
        self,
        device: str,
        problem: Problem = PROBLEMS["mlp"],
        *,
        dtype: torch.dtype = torch.float64,
        make_optimizer: Callable[..., torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        knows_optimizer: bool = False,
        autocast: torch.dtype | None = None,
        scaler: bool = False,
        micro_batches: int = 1,
        on_device: bool = False,
        tells: bool = False,
        num_sources: int = 3,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.problem, self.autocast, self.tells = device, problem, autocast, tells
        self.micro_batches = micro_batches
        self.model = problem.model(dtype).to(device)
        sources = problem.sources(num_sources, dtype)
        if on_device:
            sources = [(x.to(device), y.to(device)) for x, y in sources]
        self.mixture = Mixture(sources, generator=torch.Generator().manual_seed(1))
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0) if scaler else None
        self.losses: list[Tensor] = []
        self.passes: list[tuple[Tensor, Tensor, Tensor]] = []  # of the present step: loss, logits, labels
        given = {name: value(self) if callable(value) else value for name, value in options.items()}
        self.reward = given.pop("reward", None) or KeptRewards()
        policy = given.pop("policy", None) or MixturePolicy(self.mixture)
        optimizer = self.optimizer if knows_optimizer else None
        given.setdefault("generator", torch.Generator().manual_seed(2))
        self.learner = InLoop(self.model, policy, reward=self.reward, optimizer=optimizer, **given)

    def train(self, num_steps: int) -> "Run":
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> None:
        for _ in range(self.micro_batches):
            self.backward(*self.draw())
        self.learn()
        self.move()

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next (micro-)batch."""
        x, y = self.mixture.draw(self.learner.sample(12 // self.micro_batches))
        return x.to(self.device), y.to(self.device)

    def backward(self, x: Tensor, y: Tensor) -> None:
        precision = torch.autocast(self.device, self.autocast) if self.autocast else nullcontext()
        with precision:
            logits = self.model(x)
            loss = self.problem.loss(logits, y) / self.micro_batches
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.passes.append((loss.detach(), logits.detach(), y))

    def learn(self) -> None:
        """Let the learner look at the step."""
        losses, logits, labels = zip(*self.passes, strict=True)
        self.passes.clear()
        self.losses.append(torch.stack(losses).sum())
        told = {"logits": torch.cat(logits), "labels": torch.cat(labels)} if self.tells else {}
        self.learner.step(self.losses[-1], scaler=self.scaler, **told)

    def move(self) -> None:
        """Let the optimizer move the model."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    @property
    def rewards(self) -> list[Tensor]:
        """Of each rewarded step, on the CPU."""
        return [rewards_N.cpu() for rewards_N in self.reward.rewards]


def held_out_loss(run: Run) -> Callable[[], Tensor]:
    """A loss on a few examples of the second source, for ``reference=``."""
    x, y = (column[:9].to(run.device) for column in run.problem.sources()[1])
    return lambda: run.problem.loss(run.model(x), y)


def assert_same_rewards(run: Run, other: Run, tolerance: float = 1e-9) -> None:
    """Assert that two runs have the same losses, and the same reward of every example, relative to the largest."""
    assert run.rewards
    losses, others = (torch.stack(each.losses).cpu() for each in (run, other))
    torch.testing.assert_close(losses, others, rtol=tolerance, atol=0)
    for step, (rewards_N, others_N) in enumerate(zip(run.rewards, other.rewards, strict=True)):
        error = float((rewards_N - others_N).abs().max() / others_N.abs().max())
        assert error <= tolerance, f"in rewarded step {step} by {error:.2g} of the largest reward"


def assert_same_as_on_the_cpu(
    problem: Problem = PROBLEMS["mlp"], num_steps: int = 6, tolerance: float = 1e-9, **options: Any
) -> None:
    """Train on the device and on the CPU, and compare rewards, shares and what is printed."""
    run, other = (Run(device, problem, **options).train(num_steps) for device in ("cuda", "cpu"))
    if isinstance(run.reward, KeptRewards):
        assert_same_rewards(run, other, tolerance)
    torch.testing.assert_close(run.learner.policy.probabilities(), other.learner.policy.probabilities())
    assert str(run.learner) == str(other.learner)
