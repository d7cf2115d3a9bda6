"""The messages between processes that train one model, each on its share of every batch.

W processes divide a batch of N examples into N_1, ..., N_W, in the order of the processes. Each process draws the choices for all N
from a common generator, keeps and rewards its own, and receives the rewards of all. So every process makes the same update to its
copy of the policy. In a single process every function here is the identity.

``traffic`` counts the messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inloop.errors import LostProcessError, UsageError


@dataclass
class Traffic:
    """The messages and bytes that this process has received so far, for the learner."""

    messages: int = 0
    bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.messages += 1
        self.bytes += num_bytes


traffic = Traffic()


def is_distributed() -> bool:
    """Whether there are other processes, so that gradients are averaged over them."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def gather_numbers(*numbers: float) -> Tensor:
    """The numbers of all processes, [W, len(numbers)]."""
    return gather_rows(torch.tensor([numbers], dtype=torch.float64, device="cpu"), [1] * world_size())


def gather_counts(count: int) -> tuple[int, ...]:
    """How many examples each process has."""
    return tuple([int(number) for number in gather_numbers(float(count))[:, 0]]) if is_distributed() else (count,)


def gather_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all processes, [N_1 + ... + N_W, ...], in their order.

    Args:
        rows: The rows of this process, on any device.
        counts: The number of rows of each process.
    """
    if not is_distributed():
        return rows
    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
    padded[: len(rows)] = rows.detach().cpu()
    parts = [torch.empty_like(padded) for _ in counts]
    with _others_may_be_gone():
        dist.all_gather(parts, padded, group=_control_group())
    traffic.add(padded.nbytes * (len(counts) - 1))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).to(rows.device)


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum over all processes, element by element."""
    return gather_rows(values.unsqueeze(0), [1] * world_size()).sum(dim=0)


def average_gradient(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The mean over all processes, for gradients that no backward pass of DDP has averaged."""
    if not is_distributed():
        return dict(gradients)
    averaged: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            averaged[name] = None
            continue
        total = gradient.detach().clone()
        with _others_may_be_gone():
            dist.all_reduce(total)
        traffic.add(total.nbytes)
        averaged[name] = total / world_size()
    return averaged


def begin_alike(generator: torch.Generator, module: nn.Module | None = None) -> None:
    """Give all processes the random state and the parameters of the first: their seeds may differ."""
    if not is_distributed():
        return
    tensors = [
        generator.get_state(),
        *([] if module is None else [value.detach() for value in module.state_dict().values()]),
    ]
    for tensor in tensors:
        same = tensor.cpu().contiguous()
        with _others_may_be_gone():
            dist.broadcast(same, src=0, group=_control_group())
        traffic.add(same.nbytes)
        tensor.copy_(same)
    generator.set_state(tensors[0])


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether each process holds a shard of it (a DTensor, as of ``fully_shard``)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered from all processes; any other as it is."""
    if not is_sharded(tensor):
        return tensor
    with _others_may_be_gone():
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    traffic.add(full.nbytes - own_part(tensor).nbytes)
    return full


def own_part(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor; any other as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model without its DistributedDataParallel.

    Raises:
        UsageError: For wrappers that divide a model or a batch in a way that inloop cannot follow.
    """
    kind = type(model).__name__
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "The model is in nn.DataParallel: inloop cannot follow its copies. Fix: use DistributedDataParallel."
        )
    for name, part in model.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UsageError(
                f"'{name or kind}' is in FullyShardedDataParallel, which flattens parameters. Fix: use torch.distributed.fsdp.fully_shard."
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


@contextmanager
def _others_may_be_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            f"Process {rank()} of {world_size()} could not reach the others. One of them has probably ended; its own message says why. "
            "Fix: start all of them again from the last checkpoint; torchrun --max-restarts=N does so by itself."
        ) from error


def _control_group() -> Any:
    """The group for small tensors in main memory: the default group if its backend takes them, else a group of inloop's own."""
    return None if "gloo" in str(dist.get_backend_config()) else _own_group(dist.group.WORLD)


@cache
def _own_group(world: Any) -> Any:
    return dist.new_group(backend="gloo")
