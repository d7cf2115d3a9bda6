"""The section "cost": a learner's step against a plain one, by what ``inloop bench`` measures with.

Time and memory are never wrong. That the host waits once a step at most is a promise: each wait is time in which the GPU has nothing to do.
"""

from collections.abc import Iterator

from benchmarks.gpu.findings import Finding, attempt, judged

from inloop_lab.bench.measure import measure_model
from inloop_lab.bench.overhead import Loop, count_kernels, count_synchronisations, synchronisations
from inloop_lab.bench.tasks import make_task

SECTION = "cost"
MODELS = {"mlp": 256, "wrn-16-4": 64, "vit-tiny": 64, "gpt-6": 8}  # with the size of a batch
SMALL_MODELS = {"mlp": 16, "wrn-10-1": 8, "gpt-1@16": 4}
MOST_WAITS = 1  # beyond those of a plain step


def check(device: str, quick: bool = False) -> Iterator[Finding]:
    """A finding for each model."""
    for model, batch in (SMALL_MODELS if quick else MODELS).items():
        yield attempt(SECTION, f"{model}, batch {batch}", look, device, model, batch, 3 if quick else 10)


def look(device: str, model: str, batch: int, repeats: int) -> Finding:
    """Time and memory in processes of their own, kernels and waits in this one."""
    (row,) = measure_model(model, ["gar"], batch, repeats, device)
    if "error" in row:
        raise RuntimeError(row["error"])
    kernels = [count_kernels(make_loop(device, model, batch, learns)).total() for learns in (False, True)]
    waits = [
        count_synchronisations(make_loop(device, model, batch, learns), synchronisations) for learns in (False, True)
    ]
    numbers = {
        "time_ratio": row["time_ratio"],
        "memory_ratio": row["memory_ratio"],
        "kernel_ratio": kernels[1] / kernels[0],
        "more_synchronisations": waits[1] - waits[0],
        "seconds": row["seconds"],
        "peak_bytes": row["peak_bytes"],
        "kernels": kernels[1],
    }
    return Finding(
        SECTION,
        f"{model}, batch {batch}",
        f"{row['time_ratio']:.2f} x time, {row['memory_ratio']:.2f} x memory, {kernels[1] / kernels[0]:.2f} x kernels, "
        f"{waits[1] - waits[0]:+d} host syncs",
        f"{MOST_WAITS:+d} host syncs",
        judged(waits[1] - waits[0] <= MOST_WAITS),
        numbers,
    )


def make_loop(device: str, model: str, batch: int, learns: bool) -> Loop:
    """A training loop with AdamW, with or without a learner."""
    task = make_task(model, batch, device)
    return Loop(task.model, task.x, task.y, {} if learns else None)
