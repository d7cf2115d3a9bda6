"""The error of rewards under autocast in bfloat16: inloop's, and that of one backward pass for each example under the same autocast.

    python -m benchmarks.autocast_error [--out results/cost/autocast_error.json]

Both are compared with rewards in float32 of the same model, batch and direction, after a few steps of training. An error is a share of the rewards'
standard deviation within the batch.
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from inloop.alignment import capture, gradients_of
from inloop.alignment.oracles import align_by_loss
from inloop_lab.bench.modes import plain
from inloop_lab.bench.tasks import Task, make_task

MODELS = (("gpt-6", 8), ("vit-tiny", 16), ("wrn-16-4-gn", 16))
STEPS = 10


def rewards(task: Task, direction: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rewards of inloop, and of one backward pass for each example through the same graph, [N] each."""
    task.model.zero_grad()
    with capture(task.model) as tape:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.mixed):
            losses_N = task.losses(task.model(task.x))
        losses_N.mean().backward(retain_graph=True)
    return tape.align(direction), align_by_loss(task.model, losses_N, direction)


def compare(model: str, batch: int) -> dict[str, float | str | int]:
    task = make_task(model, batch)
    step = plain(task)
    for _ in range(STEPS):
        step()
    other = Task(copy.deepcopy(task.model), task.x.roll(1, 0), task.y.roll(1, 0).roll(3, 0))
    other.loss().backward()
    direction = {name: g for name, g in gradients_of(other.model).items() if g is not None}
    (_, right_N), (ours_N, own_N) = (rewards(replace(task, mixed=mixed), direction) for mixed in (False, True))
    return {"model": model, "batch": batch, "steps": STEPS} | {
        name: float(value)
        for who, rewards_N in (("inloop", ours_N), ("brute_force", own_N))
        for errors in [(rewards_N - right_N).abs() / right_N.std()]
        for name, value in ((f"{who}_median", errors.median()), (f"{who}_largest", errors.max()))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cost/autocast_error.json"))
    options = parser.parse_args()
    rows = []
    for model, batch in MODELS:
        rows.append(compare(model, batch))
        print(rows[-1], flush=True)
        options.out.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
