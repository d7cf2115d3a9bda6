"""Time and peak memory of a step with activation checkpointing, with and without a learner, as ratios to plain training.

    python -m benchmarks.checkpointing [--depth 12] [--batch 8] [--repeats 6] [--out results/cost/checkpointing.json]

A causal transformer on sequences of 256, with every block checkpointed. All kinds of step take turns in one process; medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import inloop
from inloop_lab.bench.memory import peak_bytes
from inloop_lab.bench.tasks import make_task


class Checkpointed(nn.Module):
    """Runs a module again in the backward pass instead of keeping its activations."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def make_step(depth: int, batch: int, checkpoints: bool, learns: bool, retain: str = "exact") -> Callable[[], None]:
    task = make_task(f"gpt-{depth}", batch)
    model = task.model
    if checkpoints:
        model.blocks = nn.Sequential(*(Checkpointed(block) for block in model.blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    learner = inloop.InLoop(model, inloop.MixturePolicy(4), record=inloop.Recording(retain=retain)) if learns else None  # type: ignore[arg-type]

    def step() -> None:
        if learner is not None:
            learner.sample(batch)
        loss = task.losses(model(task.x)).mean()
        loss.backward()
        if learner is not None:
            learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {
    "plain": {"checkpoints": False, "learns": False},
    "checkpoints": {"checkpoints": True, "learns": False},
    "learner": {"checkpoints": False, "learns": True},
    "checkpoints and learner": {"checkpoints": True, "learns": True},
    "checkpoints and learner, recompute": {"checkpoints": True, "learns": True, "retain": "recompute"},
}


def main(depth: int, batch: int, repeats: int, out: Path) -> None:
    steps = {name: make_step(depth, batch, **kind) for name, kind in KINDS.items()}
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for repeat in range(repeats + 4):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if repeat >= 4:  # the learner checks the first steps, which takes time
                times[name].append(time.perf_counter() - started)
    del steps
    seconds = {name: statistics.median(values) for name, values in times.items()}
    memory = {name: peak_bytes(lambda kind=kind: make_step(depth, batch, **kind)) for name, kind in KINDS.items()}
    rows = [
        {
            "kind": name,
            "time_ratio": seconds[name] / seconds["plain"],
            "memory_ratio": memory[name] / memory["plain"],
            "seconds": seconds[name],
            "peak_bytes": memory[name],
        }
        for name in KINDS
    ]
    result = {"model": f"gpt-{depth}", "batch": batch, "repeats": repeats, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("results/cost/checkpointing.json"))
    main(**vars(parser.parse_args()))
