"""The device to measure on: whether it is there, when its work is done, and the peak of its memory."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from inloop.errors import UsageError
from inloop_lab.bench import memory


def refuse_unavailable_device(name: str) -> None:
    """Raise UsageError, which says what to do, unless torch can compute on the device."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise UsageError(f"--device {name}: allowed are cpu, cuda, and cuda:N for the GPU with the number N.")
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {name}: torch {torch.__version__} sees no GPU. Fix: use --device cpu, or install the GPU's driver and a build of torch "
            "for it (https://pytorch.org/get-started/locally)."
        )
    count, number = torch.cuda.device_count(), torch.device(name).index or 0
    if number >= count:
        allowed = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"--device {name}: torch sees {count} GPU{'s' * (count > 1)}. Fix: use {allowed}.")


def device_of(row: Mapping[str, Any]) -> str:
    """The device of a row of results; the first ones, all of the CPU, do not name it."""
    return str(row.get("device", "cpu"))


def wait_for(device: str) -> None:
    """Wait until all work is done that was given to the device; the CPU has done it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_bytes(make_step: Callable[[], Callable[[], None]], warmup: int, steps: int, device: str) -> int:
    """The largest memory of tensors at any moment of ``steps`` steps, model and optimizer included."""
    if device == "cpu":
        return memory.peak_bytes(make_step, warmup, steps)
    step = make_step()
    for _ in range(warmup):
        step()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    return torch.cuda.max_memory_allocated(device)
