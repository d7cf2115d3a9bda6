"""Measuring a mode against plain training: two processes that take turns, so that whatever else happens hits both."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from inloop.lab.bench.tasks import make_task


class Worker:
    """A process that does steps of one mode when asked."""

    def __init__(self, model: str, mode: str, batch: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inloop.lab.bench.worker", model, mode, str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str | None = None) -> dict[str, Any]:
        """Send a word, if any, and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if what is not None:
            print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return (
            dict(json.loads(line))
            if line.startswith("{")
            else {"error": "the process ended; perhaps it ran out of memory"}
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()  # closes its pipes


def compare(model: str, mode: str, batch: int, repeats: int) -> dict[str, Any]:
    """A row of the results: times and peak memory of a mode, and their ratios to plain training."""
    row = {"model": model, "mode": mode, "batch": batch}
    with Worker(model, "plain", batch) as plain, Worker(model, mode, batch) as other:
        if problem := plain.ask().get("error") or other.ask().get("error"):
            return row | {"error": problem}
        times: dict[str, list[float]] = {"plain": [], "other": []}
        for repeat in range(repeats):
            # Who is first alternates, too.
            for name, worker in sorted({"plain": plain, "other": other}.items(), reverse=bool(repeat % 2)):
                times[name].append(worker.ask("time")["seconds"])
        memory = {name: worker.ask("memory")["peak_bytes"] for name, worker in (("plain", plain), ("other", other))}
    ratios = [b / a for a, b in zip(times["plain"], times["other"], strict=True)]
    return row | {
        "time_ratio": statistics.median(ratios),
        "time_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [ratios[0], ratios[0]],
        "memory_ratio": memory["other"] / memory["plain"],
        "seconds": statistics.median(times["other"]),
        "peak_bytes": memory["other"],
    }


def measure(
    models: Sequence[str],
    modes: Sequence[str],
    batch: int | None,
    repeats: int,
    show: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """All modes of all models, one after the other."""
    rows = []
    for model in models:
        size = batch or len(make_task(model).x)
        for mode in modes:
            rows.append(compare(model, mode, size, repeats))
            show(rows[-1])
    return rows
