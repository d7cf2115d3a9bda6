"""The first step of a learner: it finds out where the examples are, and verifies that they add up. Time and peak memory.

    python -m benchmarks.first_step [--repeats 5]

A step is forward, backward, the learner's calls and the optimizer's step. The time is the first step's over a steady step's, without and
with a learner, in processes of their own that take turns; the memory is the peak of the first step with a learner over the peak without.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from inloop_lab.bench.memory import peak_bytes
from inloop_lab.bench.modes import MODES
from inloop_lab.bench.tasks import make_task

MODELS = ("mlp", "wrn-16-4", "vit-tiny", "gpt-6")
OUT = Path(__file__).parents[1] / "results" / "cost" / "first_step.json"


def measure(model: str, mode: str) -> dict[str, float]:
    """In this process."""
    make_task(model).model(make_task(model).x)  # torch's own first use of its kernels is not the learner's
    step = MODES[mode](make_task(model))
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = peak_bytes(lambda: MODES[mode](make_task(model)), warmup=0, steps=1)
    return {"first": seconds[0], "steady": statistics.median(seconds[3:]), "peak_bytes": peak}


def in_a_process(model: str, mode: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.first_step", "--one", model, mode]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return dict(json.loads(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for model in MODELS:
        pairs = [(in_a_process(model, "plain"), in_a_process(model, "gar")) for _ in range(options.repeats)]
        row = {
            "model": model,
            "plain_first_seconds": statistics.median([plain["first"] for plain, _ in pairs]),
            "first_seconds": statistics.median([gar["first"] for _, gar in pairs]),
            "steady_seconds": statistics.median([gar["steady"] for _, gar in pairs]),
            "time_ratio": statistics.median([gar["first"] / plain["first"] for plain, gar in pairs]),
            "memory_ratio": statistics.median([gar["peak_bytes"] / plain["peak_bytes"] for plain, gar in pairs]),
        }
        rows.append(row)
        print(f"{model}: first step {row['time_ratio']:.2f} x the time, {row['memory_ratio']:.2f} x the peak memory")
    OUT.write_text(json.dumps({"command": "python -m benchmarks.first_step", "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
