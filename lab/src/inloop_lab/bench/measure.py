"""Measures a mode against plain training: two processes take turns, so that other load on the machine hits both."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from inloop_lab.bench.devices import device_of
from inloop_lab.bench.tasks import make_task


class Worker:
    """A process that does steps of one mode on request.

    Args:
        environment: The variables of the process; None for those of this one.
    """

    def __init__(
        self, model: str, mode: str, batch: int, device: str = "cpu", environment: Mapping[str, str] | None = None
    ) -> None:
        place = [] if device == "cpu" else [device]  # workers of earlier versions know no devices
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inloop_lab.bench.worker", model, mode, str(batch), *place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
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


def compare(plain: Worker, other: Worker, repeats: int, plain_bytes: int) -> dict[str, Any]:
    """Times and peak memory of a mode, and their ratios to plain training."""
    times: dict[str, list[float]] = {"plain": [], "other": []}
    for repeat in range(repeats):
        # Who is first alternates, too.
        for name, worker in sorted({"plain": plain, "other": other}.items(), reverse=bool(repeat % 2)):
            times[name].append(worker.ask("time")["seconds"])
    ratios = [b / a for a, b in zip(times["plain"], times["other"], strict=True)]
    peak_bytes = other.ask("memory")["peak_bytes"]
    return {
        "time_ratio": statistics.median(ratios),
        "time_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [ratios[0], ratios[0]],
        "memory_ratio": peak_bytes / plain_bytes,
        "seconds": statistics.median(times["other"]),
        "peak_bytes": peak_bytes,
    }


def measure_model(
    model: str, modes: Sequence[str], batch: int, repeats: int, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """A row of the results for each mode; the row of a mode that fails has its error."""
    with Worker(model, "plain", batch, device) as first:
        problem = first.ask().get("error")
        plain_bytes = 1 if problem else first.ask("memory")["peak_bytes"]
    with Worker(model, "plain", batch, device) as plain:
        problem = problem or plain.ask().get("error")
        for mode in modes:
            row = {"model": model, "mode": mode, "batch": batch, "device": device, "repeats": repeats}
            with Worker(model, mode, batch, device) as other:
                wrong = problem or other.ask().get("error")
                yield row | ({"error": wrong} if wrong else compare(plain, other, repeats, plain_bytes))


def measure(
    models: Sequence[str],
    modes: Sequence[str],
    batch: int | None,
    repeats: int,
    known: Sequence[dict[str, Any]] = (),
    device: str = "cpu",
) -> Iterator[dict[str, Any]]:
    """All modes of all models, one after the other, except the ``known`` rows."""
    done = {(row["model"], row["mode"], row["batch"], device_of(row)) for row in known}
    for model in models:
        size = batch or len(make_task(model).x)
        missing = [mode for mode in modes if (model, mode, size, device) not in done]
        if missing:
            yield from measure_model(model, missing, size, repeats, device)
