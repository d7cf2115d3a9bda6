"""The arms of the table: how sources are drawn, and what is learned from. One run of one arm, and what is measured in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from problems import SETTINGS, Examples, Problem, losses_of
from torch import Tensor, nn

import inloop
from inloop.policies import Shares
from inloop.policies.policy import summarise_by_choice
from inloop.references import Trail
from inloop.updates import Anchored, Reinforce
from inloop_lab.data.images import to_input

LOOK_EVERY = 100  # steps between two looks at the verdicts


@dataclass(frozen=True)
class Arm:
    """How a policy learns.

    Attributes:
        make_reference: None for held-out data.
        knows_optimizer: Whether rewards are true for the optimizer.
        knows_labels: Whether the policy has the mixture, and the learner the losses.
    """

    make_update: Callable[[], Any]
    make_reference: Callable[[], Any] | None = None
    knows_optimizer: bool = True
    knows_labels: bool = False
    form: str = "bounded"


def oracle(times: float) -> str:
    return f"oracle {times:g}"


def soft() -> Anchored:
    """Moves on weak evidence: the next step's rewards have no more."""
    return Anchored(temperature=0.05, caution=1.5)


ORACLES = (0.0, 0.25, 0.5, 1.0)
ARMS: dict[str, Arm] = {
    "paper": Arm(Reinforce, lambda: "next", knows_optimizer=False, form="inverted"),  # inloop.paper_settings()
    "held-out": Arm(soft, None),
    "next": Arm(soft, lambda: "next"),
    "next, reinforce": Arm(Reinforce, lambda: "next"),
    "next and losses": Arm(soft, lambda: "next", knows_labels=True),
    "trail and losses": Arm(Anchored, lambda: Trail(0.999), knows_labels=True),
}


def draw_judge(problem: Problem, model: nn.Module, generator: torch.Generator) -> Callable[[], Tensor]:
    """The loss on as many held-out examples as a batch has, drawn anew each time."""
    each = max(1, problem.batch // len(problem.judges))

    def loss() -> Tensor:
        rows = [torch.randint(len(x), (each,), generator=generator) for x, _ in problem.judges]
        parts = [(x[r], y[r]) for (x, y), r in zip(problem.judges, rows, strict=True)]
        return losses_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).mean()

    return loss


def make_policy(problem: Problem, arm: str, mixture: inloop.Mixture) -> inloop.Policy:
    if arm == "uniform":
        return Shares.uniform(len(problem.sources))
    if arm.startswith("oracle"):
        times = float(arm.split()[1])
        return Shares([times if k in problem.wrong else 1.0 for k in range(len(problem.sources))])
    return inloop.MixturePolicy(mixture if ARMS[arm].knows_labels else len(problem.sources), form=ARMS[arm].form)


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


def follow(loss_K: Tensor, source_N: Tensor, losses_N: Tensor) -> None:
    """Move the running mean of each source's loss."""
    seen = summarise_by_choice(source_N, len(loss_K), losses_N)
    kept_K = torch.exp(-seen.count_K / 500)
    moved_K = kept_K * loss_K + (1 - kept_K) * seen.mean_K
    loss_K.copy_(torch.where(seen.count_K == 0, loss_K, torch.where(loss_K.isnan(), seen.mean_K, moved_K)))


def inputs(x: Tensor) -> Tensor:
    return to_input(x) if x.dtype == torch.uint8 else x


def run(setting: str, arm: str, seed: int, final: bool) -> dict[str, Any]:
    """Train once and evaluate."""
    began = time.perf_counter()
    problem = SETTINGS[setting](seed, final)
    torch.manual_seed(seed)
    model = problem.make_model()
    optimizer = problem.make_optimizer(model)
    mixture = inloop.Mixture(list(problem.sources), generator=torch.Generator().manual_seed(seed + 1000))
    policy = make_policy(problem, arm, mixture)
    generator = torch.Generator().manual_seed(seed + 2000)
    learner = None
    if arm in ARMS:
        chosen = ARMS[arm]
        reference = (
            draw_judge(problem, model, torch.Generator().manual_seed(seed + 3000))
            if chosen.make_reference is None
            else chosen.make_reference()
        )
        learner = inloop.InLoop(
            model,
            policy,
            optimizer=optimizer if chosen.knows_optimizer else None,
            reference=reference,
            update=chosen.make_update(),
            generator=generator,
        )
    looks = []
    loss_K = torch.full(
        (len(problem.sources),), torch.nan, dtype=torch.float64
    )  # of the last 500 examples of each source, about
    shares = torch.zeros(len(problem.sources), dtype=torch.float64)
    for step in range(1, problem.steps + 1):
        actions = policy.sample(problem.batch, generator) if learner is None else learner.sample(problem.batch)
        x, y = mixture.draw(actions)
        losses = losses_of(model, x, y)
        loss = losses.mean()
        loss.backward()
        follow(loss_K, actions, losses.detach())
        if learner is not None:
            learner.step(loss, losses=losses.detach())
        optimizer.step()
        optimizer.zero_grad()
        shares += policy.probabilities().double() / problem.steps
        if learner is not None and step % LOOK_EVERY == 0:
            looks.append([*learner.statistics.advantages.estimate()[:2], loss_K.clone(), policy.probabilities()])
    if learner is not None:
        learner.close()
    scores = {name: evaluate(model, examples) for name, examples in problem.tests.items()}
    losses, accuracies = zip(*scores.values(), strict=True)
    return {
        "setting": setting,
        "arm": arm,
        "seed": seed,
        "score": sum(losses) / len(losses) if problem.is_text else sum(accuracies) / len(accuracies),
        "scores": {name: loss if problem.is_text else accuracy for name, (loss, accuracy) in scores.items()},
        "shares": [round(p, 4) for p in policy.probabilities().tolist()],
        "mean_shares": [round(p, 4) for p in shares.tolist()],
        "looks": [[[round(v, 4) for v in values.tolist()] for values in look] for look in looks],
        "seconds": round(time.perf_counter() - began, 1),
    }
