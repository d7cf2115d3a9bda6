"""The section "processes": two GPUs, each with half of every batch, have the rewards of one with all of it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from benchmarks.gpu.findings import Finding, attempt, judged, skipped
from benchmarks.gpu.precisions import EXACT
from benchmarks.gpu.problems import EXAMPLES, PROBLEMS
from benchmarks.gpu.training import STEPS, Training, error_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SECTION = "processes"
PROCESSES = 2
MODELS = ("mlp", "GroupNorm", "gpt", "lstm")  # BatchNorm normalises over one process's examples
LONGEST = 300  # seconds


def _data_parallel(model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _sharded(model: nn.Module) -> nn.Module:
    for part in model.children():
        if next(part.parameters(), None) is not None:
            fully_shard(part)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": _data_parallel,
    "fully_shard": _sharded,
}


def check(device: str, quick: bool = False, backend: str = "nccl") -> Iterator[Finding]:
    """A finding for each wrapper of each model; one that says why if there are not enough GPUs."""
    if device != "cpu" and torch.cuda.device_count() < PROCESSES:
        count = torch.cuda.device_count()
        yield skipped(SECTION, "NCCL", f"it needs {PROCESSES} GPUs, and torch sees {count}")
        return
    if device != "cpu" and not dist.is_nccl_available():
        yield skipped(SECTION, "NCCL", "this build of torch has no NCCL")
        return
    for wrapper in WRAPPERS:
        for problem in MODELS:
            yield from attempt(
                SECTION,
                f"{problem}, {wrapper}",
                lambda problem=problem, wrapper=wrapper: look(device, backend, problem, wrapper),
            )


def look(device: str, backend: str, problem: str, wrapper: str) -> Finding:
    """Train in one process, then in two."""
    with tempfile.TemporaryDirectory() as folder, EXACT.settings():
        alone = train(Training(PROBLEMS[problem], device), slice(None))
        run_in_processes(folder, device, backend, problem, wrapper)
        parts = [torch.load(Path(folder) / f"rewards-{rank}") for rank in range(PROCESSES)]
    error = error_of(torch.cat(parts, dim=1), alone)
    return Finding(
        SECTION,
        f"{problem}, {wrapper}",
        f"error {error:.1e}, {PROCESSES} processes over {backend}",
        f"error {EXACT.tolerance:.0e}",
        judged(error <= EXACT.tolerance),
        {"error": error, "tolerance": EXACT.tolerance, "backend": backend},
    )


def train(training: Training, part: slice) -> Tensor:
    """The rewards of a part of each batch."""
    for step in range(STEPS):
        training.step(*training.batch(step, part))
    return training.rewards()


def run_in_processes(folder: str, device: str, backend: str, problem: str, wrapper: str) -> None:
    """Train in processes of their own, each of which writes its rewards into the folder.

    Raises:
        TimeoutError: If they do not end.
    """
    context = multiprocessing.start_processes(
        _train_a_part, (folder, device, backend, problem, wrapper), PROCESSES, join=False, start_method="spawn"
    )
    end = time.monotonic() + LONGEST
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"the processes have not ended after {LONGEST} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _train_a_part(rank: int, folder: str, device: str, backend: str, problem: str, wrapper: str) -> None:
    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=LONGEST / 2)
    dist.init_process_group(backend, f"file://{folder}/store", timeout, PROCESSES, rank)
    share = EXAMPLES // PROCESSES
    with EXACT.settings():
        training = Training(PROBLEMS[problem], device, wrap=WRAPPERS[wrapper])
        torch.save(train(training, slice(rank * share, (rank + 1) * share)), Path(folder) / f"rewards-{rank}")
    dist.barrier()
    dist.destroy_process_group()
