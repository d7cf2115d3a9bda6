"""What it costs that `inloop.capture` verifies: a forward and backward pass alone, recorded, and recorded and verified.

    python -m benchmarks.capture_cost [--models wrn-16-4,mlp,gpt-6] [--repeats 9]

The three take turns in one process. A ratio is the time of a capture with one alignment over that of the plain pass of the same turn; medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import inloop
from inloop_lab.bench.tasks import make_task

OUT = Path(__file__).parents[1] / "results" / "cost" / "capture.json"


def make_pass(name: str, verify: bool | None) -> Callable[[], None]:
    """A pass of a model; ``verify`` is None for one that is not recorded."""
    task = make_task(name)

    def run() -> None:
        task.model.zero_grad()
        if verify is None:
            task.losses(task.model(task.x)).mean().backward()
            return
        with inloop.capture(task.model, verify=verify) as tape:
            task.losses(task.model(task.x)).mean().backward()
        tape.align({name: parameter.grad for name, parameter in task.model.named_parameters()})

    return run


def measure(name: str, repeats: int) -> dict[str, object]:
    passes = {"plain": make_pass(name, None), "recorded": make_pass(name, False), "verified": make_pass(name, True)}
    turns = []
    for repeat in range(repeats + 1):
        turn = {}
        for kind in sorted(passes, reverse=bool(repeat % 2)):
            started = time.perf_counter()
            passes[kind]()
            turn[kind] = time.perf_counter() - started
        turns.append(turn)
    ratios = {kind: [turn[kind] / turn["plain"] for turn in turns[1:]] for kind in ("recorded", "verified")}
    medians = {kind: statistics.median(values) for kind, values in ratios.items()}
    return {
        "model": name,
        "repeats": repeats,
        "plain_seconds": statistics.median([t["plain"] for t in turns]),
        **medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,wrn-16-4,gpt-6")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        rows.append(measure(name, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    OUT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
