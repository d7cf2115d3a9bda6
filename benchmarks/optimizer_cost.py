"""What it costs that rewards know the optimizer: a step with AdamW, without a learner, with one, and with one that is given the optimizer.

    python -m benchmarks.optimizer_cost [--models wrn-16-4,mlp] [--repeats 15]

The three take turns in one process. A ratio is a step's time over that of the plain step of the same turn; the table has the medians, and the median
difference between the two learners with its quartiles.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import inloop
from inloop_lab.bench.tasks import make_task

OUT = Path(__file__).parents[1] / "results" / "cost" / "optimizer.json"


def make_step(model: str, learns: bool, knows_optimizer: bool) -> Callable[[], None]:
    task = make_task(model)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4)
    given = optimizer if knows_optimizer else None
    learner = inloop.InLoop(task.model, inloop.MixturePolicy(10), optimizer=given) if learns else None

    def step() -> None:
        if learner is not None:
            learner.sample(len(task.x))
        loss = task.losses(task.model(task.x)).mean()
        loss.backward()
        if learner is not None:
            learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(model: str, repeats: int) -> dict[str, object]:
    steps = {
        "plain": make_step(model, learns=False, knows_optimizer=False),
        "learner": make_step(model, learns=True, knows_optimizer=False),
        "knows": make_step(model, learns=True, knows_optimizer=True),
    }
    for _ in range(4):  # the first steps differ: allocations, checks, nothing to reward yet
        for step in steps.values():
            step()
    turns = []
    for repeat in range(repeats):
        order = sorted(steps, reverse=bool(repeat % 2))
        turns.append({name: seconds_of(steps[name]) for name in order})
    ratios = {name: [turn[name] / turn["plain"] for turn in turns] for name in ("learner", "knows")}
    differences = [knows - learner for knows, learner in zip(ratios["knows"], ratios["learner"], strict=True)]
    return {
        "model": model,
        "repeats": repeats,
        "plain_seconds": statistics.median([turn["plain"] for turn in turns]),
        "learner": statistics.median(ratios["learner"]),
        "knows_optimizer": statistics.median(ratios["knows"]),
        "difference": statistics.median(differences),
        "difference_quartiles": statistics.quantiles(differences, n=4)[::2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wrn-16-4,mlp,gpt-6")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        row = measure(model, options.repeats)
        rows.append(row)
        print(json.dumps(row), flush=True)
    OUT.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
