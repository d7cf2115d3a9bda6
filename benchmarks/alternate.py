"""Several checkouts of this repository against each other: time and memory of a step, all in one run.

    python -m benchmarks.alternate old=../before new=. --models mlp,wrn-16-4 --modes gar [--repeats 5] [--out FILE.json]

For each model and mode, one process trains plainly and one process for each checkout trains with its learner. They take turns, so other load on
the machine hits all of them. A ratio is the time of a step over that of the plain step of the same turn; the table shows the medians and, for
checkouts after the first, the median difference to the first with its quartiles. The same command continues an interrupted run.
"""

import argparse
import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inloop_lab.bench.measure import Worker
from inloop_lab.bench.tasks import make_task


def worker(checkout: Path, model: str, mode: str, batch: int) -> Worker:
    """A worker that imports the library and the lab from one checkout."""
    paths = [str(checkout.resolve() / folder) for folder in ("src", "lab/src")]
    return Worker(model, mode, batch, environment=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def measure(checkouts: dict[str, Path], model: str, mode: str, repeats: int) -> dict[str, Any]:
    """One row: the ratios of every checkout."""
    row: dict[str, Any] = {"model": model, "mode": mode, "repeats": repeats}
    batch = len(make_task(model).x)
    first = next(iter(checkouts.values()))
    with ExitStack() as running:
        workers = {"plain": running.enter_context(worker(first, model, "plain", batch))}
        for name, path in checkouts.items():
            workers[name] = running.enter_context(worker(path, model, mode, batch))
        if errors := {name: answer["error"] for name, w in workers.items() if "error" in (answer := w.ask())}:
            return row | {"error": errors}
        times: dict[str, list[float]] = {name: [] for name in workers}
        for repeat in range(repeats):
            for name in sorted(workers, reverse=bool(repeat % 2)):
                times[name].append(workers[name].ask("time")["seconds"])
        peaks = {name: workers[name].ask("memory")["peak_bytes"] for name in workers}
    ratios = {name: [own / plain for own, plain in zip(times[name], times["plain"], strict=True)] for name in checkouts}
    for name in checkouts:
        row[name] = {
            "time_ratio": statistics.median(ratios[name]),
            "memory_ratio": peaks[name] / peaks["plain"],
            "seconds": statistics.median(times[name]),
        }
        differences = [own - old for own, old in zip(ratios[name], ratios[next(iter(checkouts))], strict=True)]
        if any(differences):
            row[name]["difference"] = statistics.median(differences)
            row[name]["difference_quartiles"] = (
                statistics.quantiles(differences, n=4)[::2] if repeats > 1 else [differences[0]] * 2
            )
    return row


def describe(row: dict[str, Any], names: list[str]) -> str:
    if "error" in row:
        return f"{row['model']} {row['mode']}: {row['error']}"
    parts = [f"{name} {row[name]['time_ratio']:.3f} / {row[name]['memory_ratio']:.3f}" for name in names]
    changes = [f"{row[name].get('difference', 0):+.3f}" for name in names[1:]]
    return f"{row['model']} {row['mode']}: {', '.join(parts)}; difference in time {', '.join(changes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--models", default="mlp,wrn-16-4,vit-tiny,gpt-6")
    parser.add_argument("--modes", default="gar,gar-interleaved,gar-half,gar-recompute,gar-part")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts = {name: Path(path) for name, path in (given.split("=", 1) for given in options.checkouts)}
    rows = json.loads(options.out.read_text())["results"] if options.out and options.out.exists() else []
    done = {(row["model"], row["mode"]) for row in rows}
    for model in options.models.split(","):
        for mode in options.modes.split(","):
            if (model, mode) in done:
                continue
            rows.append(measure(checkouts, model, mode, options.repeats))
            print(describe(rows[-1], list(checkouts)), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
