"""The section "processes": two GPUs, each with half of every batch, have the rewards of one with all of it."""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from benchmarks.gpu.findings import Finding, attempt, naming, skipped, worst_of
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


def check(device: str, quick: bool = False) -> Iterator[Finding]:
    """A finding for each wrapper; one that says why if there are not enough GPUs."""
    count = torch.cuda.device_count()
    if count < PROCESSES:
        yield skipped(SECTION, "NCCL", f"it needs {PROCESSES} GPUs, and torch sees {count}")
    elif not dist.is_nccl_available():
        yield skipped(SECTION, "NCCL", "this build of torch has no NCCL")
    else:
        for wrapper in WRAPPERS:
            yield attempt(SECTION, wrapper, look, device, "nccl", wrapper)


def look(device: str, backend: str, wrapper: str, problems: Sequence[str] = MODELS) -> Finding:
    """Train models in one process, then in two."""
    with tempfile.TemporaryDirectory() as folder, EXACT.settings():
        run_in_processes(_train_parts, folder, device, backend, wrapper, problems)
        errors = {}
        for problem in problems:
            parts = [torch.load(file_of(folder, problem, rank)) for rank in range(PROCESSES)]
            alone = train(Training(PROBLEMS[problem], device), slice(None))
            errors[problem] = error_of(torch.cat(parts, dim=1), alone)
    return worst_of(SECTION, wrapper, errors, EXACT.tolerance, f", {PROCESSES} processes over {backend}")


def train(training: Training, part: slice) -> Tensor:
    """The rewards of a part of each batch."""
    for step in range(STEPS):
        training.step(*training.batch(step, part))
    return training.rewards()


def file_of(folder: str, problem: str, rank: int) -> Path:
    """Where a process writes its rewards."""
    return Path(folder) / f"{problem}-{rank}.pt"


def run_in_processes(function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(rank, *arguments)`` in processes of their own.

    Raises:
        TimeoutError: If they do not end.
    """
    context = multiprocessing.start_processes(function, arguments, PROCESSES, join=False, start_method="spawn")
    assert context is not None
    end = time.monotonic() + LONGEST
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError(f"the processes have not ended after {LONGEST} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _train_parts(rank: int, folder: str, device: str, backend: str, wrapper: str, problems: Sequence[str]) -> None:
    """Train on this process's part of each batch, and write the rewards."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(seconds=LONGEST / 2), PROCESSES, rank)
    share = EXAMPLES // PROCESSES
    with EXACT.settings():
        for problem in problems:
            with naming(problem):
                training = Training(PROBLEMS[problem], device, wrap=WRAPPERS[wrapper])
                rewards = train(training, slice(rank * share, (rank + 1) * share))
            torch.save(rewards, file_of(folder, problem, rank))
    dist.destroy_process_group()
