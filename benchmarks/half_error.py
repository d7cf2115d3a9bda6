"""The error of rewards from a tape in half precision: exact and half on the same step, after a few steps of training.

    python -m benchmarks.half_error [--out results/cost/half_error.json]

For each model: the largest and the median error of a reward as a share of the rewards' standard deviation within the batch, and the
correlation of the two.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor

from inloop.alignment import capture, gradients_of
from inloop_lab.bench.modes import plain
from inloop_lab.bench.tasks import Task, make_task


def rewards(task: Task, retain: str, direction: dict[str, Tensor]) -> Tensor:
    task.model.zero_grad()
    with capture(task.model, retain=retain) as tape:
        task.losses(task.model(task.x)).mean().backward()
    return tape.align(direction)


def compare(model: str, batch: int, steps: int) -> dict[str, float | str | int]:
    task = make_task(model, batch)
    step = plain(task)
    for _ in range(steps):
        step()
    other = Task(copy.deepcopy(task.model), task.x.roll(1, 0), task.y.roll(1, 0).roll(3, 0))
    other.losses(other.model(other.x)).mean().backward()
    direction = {name: g for name, g in gradients_of(other.model).items() if g is not None}
    exact_N, half_N = rewards(task, "exact", direction), rewards(task, "half", direction)
    errors = (half_N - exact_N).abs() / exact_N.std()
    return {
        "model": model,
        "batch": batch,
        "steps": steps,
        "largest": float(errors.max()),
        "median": float(errors.median()),
        "correlation": float(torch.corrcoef(torch.stack([exact_N, half_N]))[0, 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cost/half_error.json"))
    options = parser.parse_args()
    rows = [
        compare(model, batch, 10) for model, batch in (("wrn-16-4", 32), ("vit-tiny", 32), ("gpt-6", 8), ("mlp", 256))
    ]
    options.out.write_text(json.dumps({"results": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
