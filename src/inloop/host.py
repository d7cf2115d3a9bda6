"""Between the CPU and a device. Reading a device waits for all its work, so all that the CPU needs of a step is read at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inloop.errors import UsageError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the CPU tensor on a device. Copies from pinned memory do not wait."""
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, packed into one transfer, in a precision that holds all of them.

    Whole numbers are taken to be labels: below 2^24, which float32 holds exactly.
    """
    away = [tensor.detach() for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return [tensor.detach() for tensor in tensors]
    packed = torch.cat([tensor.flatten().to(away[0].device) for tensor in away]).cpu()
    parts = iter(packed.split([tensor.numel() for tensor in away]))
    return [
        tensor.detach() if tensor.device.type == "cpu" else next(parts).view(tensor.shape).to(tensor.dtype)
        for tensor in tensors
    ]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which operations run now; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def refuse_graph_capture() -> None:
    """Raise if a CUDA graph is being captured: it would repeat one step's choices and rewards for ever."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "A CUDA graph is being captured, which would repeat the choices and the recording of this one step. Fix: capture the optimizer's step or the "
            "evaluation alone, and run learner.sample, the model's forward and backward pass and learner.step outside of torch.cuda.graph."
        )
