"""The arms of the table: how sources are drawn, and what is learned from. One run of one arm, and what is measured in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from problems import SETTINGS, Examples, Problem, inputs, losses_from, losses_of
from torch import Tensor, nn
from unseen import UNSEEN

import inloop
from inloop.optimizers import StepDerivative
from inloop.updates import Reinforce

LOOK_EVERY = 100  # steps between two looks at the verdicts
LETTERS = {
    "ok": ".",
    "undecided": "?",
    "flagged": "f",
    "bad": "b",
    "different or partly wrong": "d",
    "seen too often": "s",
}
MOST_WEIGHT = 5.0  # of an example of a seldom drawn source, for a judge with fixed shares


@dataclass
class Batch:
    """The batch in training, for judges that look at it again."""

    x: Tensor
    y: Tensor
    source: Tensor


@dataclass(frozen=True)
class Run:
    """What an arm's judge may look at."""

    problem: Problem
    model: nn.Module
    optimizer: torch.optim.Optimizer
    policy: inloop.Policy
    generator: torch.Generator
    batch: list[Batch]  # the last one is in training


def held_out(run: Run) -> Callable[[], Tensor]:
    """The loss on as many held-out examples as a batch has, drawn anew each time."""
    judges, each = run.problem.judges, max(1, run.problem.batch // len(run.problem.judges))

    def loss() -> Tensor:
        rows = [torch.randint(len(x), (each,), generator=run.generator) for x, _ in judges]
        parts = [(x[r], y[r]) for (x, y), r in zip(judges, rows, strict=True)]
        return losses_of(run.model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).mean()

    return loss


def fixed_shares(run: Run) -> Callable[[], Tensor]:
    """The loss on the next batch as if its sources had been drawn alike, however the policy draws them."""

    def loss() -> Tensor:
        batch, p_K = run.batch[-1], run.policy.probabilities()
        weights_K = (1 / len(p_K) / p_K).clamp_max(MOST_WEIGHT)
        weights_N = weights_K[batch.source]
        return (weights_N * losses_of(run.model, batch.x, batch.y)).sum() / weights_N.sum()

    return loss


@dataclass(frozen=True)
class Arm:
    """How a policy learns: the options of a learner, and whether it is told the logits and labels of the examples."""

    make_options: Callable[[Run], dict[str, Any]] = lambda run: {}
    knows_optimizer: bool = True
    knows_labels: bool = True


def oracle(times: float) -> str:
    return f"oracle {times:g}"


ORACLES = (0.0, 0.25, 0.5, 1.0)
ARMS: dict[str, Arm] = {
    "paper": Arm(lambda run: inloop.paper_settings(), knows_optimizer=False, knows_labels=False),
    "held-out": Arm(lambda run: {"reference": held_out(run)}, knows_labels=False),
    "default": Arm(),
    "told nothing": Arm(knows_labels=False),
}
CANDIDATES: dict[str, Arm] = {
    "trail": Arm(lambda run: {"reference": "trail"}),
    "next, reinforce": Arm(lambda run: {"update": Reinforce()}, knows_labels=False),
    "moving second moment": Arm(
        lambda run: {"optimizer": StepDerivative(run.model, run.optimizer, "moving")}, knows_labels=False
    ),
    "next, fixed shares": Arm(lambda run: {"reference": fixed_shares(run)}, knows_labels=False),
}
ALL_ARMS = ARMS | CANDIDATES


def make_policy(problem: Problem, arm: str, mixture: inloop.Mixture) -> inloop.Policy:
    """Equal shares draw as a learner does that never moves, so that the two are paired."""
    if arm == "paper":
        return inloop.paper_policy(len(problem.sources))
    if arm.startswith("oracle"):
        times = float(arm.split()[1])
        prior = [times if k in problem.wrong else 1.0 for k in range(len(problem.sources))]
        return inloop.MixturePolicy(mixture, prior=prior)
    return inloop.MixturePolicy(mixture)


def evaluate(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    losses, right, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in zip(*(part.split(500) for part in examples), strict=True):
            losses += float(losses_of(model, x, y).sum())
            scores = model(inputs(x))
            right += int((scores.argmax(dim=-1) == y).sum())
            count += y.numel()
    return losses / len(examples[0]), right / count


def run(setting: str, arm: str, seed: int, final: bool) -> dict[str, Any]:
    """Train once and evaluate."""
    began = time.perf_counter()
    problem = (SETTINGS | UNSEEN)[setting](seed, final)
    torch.manual_seed(seed)
    model = problem.make_model()
    optimizer = problem.make_optimizer(model)
    mixture = inloop.Mixture(list(problem.sources), generator=torch.Generator().manual_seed(seed + 1000))
    policy = make_policy(problem, arm, mixture)
    generator = torch.Generator().manual_seed(seed + 2000)
    batches: list[Batch] = []
    learner = None
    if arm in ALL_ARMS:
        chosen = ALL_ARMS[arm]
        view = Run(problem, model, optimizer, policy, torch.Generator().manual_seed(seed + 3000), batches)
        options = {"optimizer": optimizer} if chosen.knows_optimizer else {}
        learner = inloop.InLoop(model, policy, generator=generator, **(options | chosen.make_options(view)))
    words: list[str] = []
    shares = torch.zeros(len(problem.sources), dtype=torch.float64)
    for step in range(1, problem.steps + 1):
        actions = policy.sample(problem.batch, generator) if learner is None else learner.sample(problem.batch)
        x, y = mixture.draw(actions)
        batches[:] = [Batch(x, y, actions)]
        scores = model(inputs(x))
        losses = losses_from(scores, y)
        loss = losses.mean()
        loss.backward()
        if learner is not None:
            learner.step(loss, **({"logits": scores, "labels": y} if chosen.knows_labels else {}))
        optimizer.step()
        optimizer.zero_grad()
        shares += policy.probabilities().double() / problem.steps
        if learner is not None and step % LOOK_EVERY == 0:
            words.append("".join(LETTERS[verdict.word] for verdict in learner.statistics.verdicts()))
    evidence = None
    if learner is not None:
        evidence = [[round(v, 4) for v in values.tolist()] for values in learner.statistics.advantages.estimate()[:2]]
        learner.close()
    scores = {name: evaluate(model, examples) for name, examples in problem.tests.items()}
    losses, accuracies = zip(*scores.values(), strict=True)
    return {
        "setting": setting,
        "arm": arm,
        "seed": seed,
        "wrong": list(problem.wrong),
        "score": sum(losses) / len(losses) if problem.is_text else sum(accuracies) / len(accuracies),
        "scores": {name: loss if problem.is_text else accuracy for name, (loss, accuracy) in scores.items()},
        "shares": [round(p, 4) for p in policy.probabilities().tolist()],
        "mean_shares": [round(p, 4) for p in shares.tolist()],
        "words": words,  # at each look a letter for each source
        "evidence": evidence,  # advantages and their standard errors at the end
        "seconds": round(time.perf_counter() - began, 1),
    }
