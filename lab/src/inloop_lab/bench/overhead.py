"""What a learner adds to a step besides arithmetic: kernels, which take a launch each on a GPU, waits for the device, and the host's time.

A *kernel* is a torch operation that reaches a dispatch mode and is no view, no allocation and reads no shape. Counted are those of the forward pass,
the backward pass and ``learner.step``, in a step that is not verified any more.

A *host synchronisation* is a wait of the host for a CUDA device. They are counted as torch reports them, where there is such a device.

The host's time is measured on perceptrons of width 8 with one example, on which there is nothing to compute. The time that a learner adds is a
straight line in the number of layers: its slope is the time for each layer call, its value at no layers is the time for the step.
"""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from inloop.learner import InLoop
from inloop.policies import MixturePolicy
from inloop_lab.networks.transformers import Transformer

SOURCES, WARM_UP = 10, 22  # the policy moves every ten steps; the last step here does not
_NO_KERNELS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense", "lift_fresh"),
    *(
        "_unsafe_view",
        "promote_types",
        "record_stream",
        "is_same_size",
        "is_pinned",
        "equal",
        "set_",
        "resize_",
        "scalar_tensor",
        "detach_",
    ),
)


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    widths = (64, 128, 128, 10)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(64, 64), torch.randint(10, (64,))


def _convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    channels = (3, 16, 32, 32)
    layers: list[nn.Module] = []
    for pair in pairwise(channels):
        layers += [nn.Conv2d(*pair, 3, padding=1), nn.BatchNorm2d(pair[1]), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, 10))
    return model, torch.randn(32, 3, 16, 16), torch.randint(10, (32,))


def _gpt() -> tuple[nn.Module, Tensor, Tensor]:
    model = Transformer(nn.Embedding(64, 64), positions=32, dim=64, depth=4, heads=4, classes=64, causal=True)
    ids = torch.randint(64, (8, 33))
    return model, ids[:, :-1], ids[:, 1:]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "gpt-4": _gpt,
}


@dataclass
class Loop:
    """A training loop with AdamW, with or without a learner that knows it.

    Args:
        tells: Whether the learner is told logits and labels.
        options: The learner's; None for no learner.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    options: dict[str, Any] | None
    tells: bool = False

    def __post_init__(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model, self.x, self.y = self.model.to(device), self.x.to(device), self.y.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.learner: InLoop | None = None
        if self.options is not None:
            options = {"optimizer": self.optimizer, **self.options}
            self.learner = InLoop(self.model, MixturePolicy(SOURCES), **options)

    def gradients(self) -> None:
        """Forward, backward and ``learner.step``."""
        logits = self.model(self.x)
        loss = F.cross_entropy(logits.flatten(0, -2), self.y.flatten())
        loss.backward()
        if self.learner is not None:
            self.learner.step(loss, **({"logits": logits, "labels": self.y} if self.tells else {}))

    def choose(self) -> None:
        if self.learner is not None:
            self.learner.sample(len(self.x))

    def move(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.choose()
        self.gradients()
        self.move()


class KernelCount(TorchDispatchMode):
    """Counts kernels by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNELS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Waits:
    """How often the host has waited."""

    number: int = 0


@contextmanager
def synchronisations() -> Iterator[Waits]:
    """Count the waits of the host for a CUDA device, as torch reports them."""
    waits = Waits()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.number = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def steady(loop: Loop) -> Loop:
    """The loop, after the steps that are verified, with a batch chosen."""
    for _ in range(WARM_UP):
        loop.step()
    loop.choose()
    return loop


def count_kernels(loop: Loop) -> Counter[str]:
    """By name, in one steady step."""
    steady(loop)
    count = KernelCount()
    with count:
        loop.gradients()
    return count.names


def count_synchronisations(loop: Loop, counted: Callable[[], AbstractContextManager[Waits]]) -> int:
    """In one steady step."""
    steady(loop)
    with counted() as waits:
        loop.gradients()
    return waits.number


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def added_microseconds(layers: int, steps: int, options: dict[str, Any]) -> float:
    """The median time that a learner adds to a step of a perceptron of width 8 with one example; plain steps and others alternate."""
    loops = []
    for given in (None, options):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        loops.append(Loop(model, torch.randn(1, 8), torch.randint(8, (1,)), given))
    times: list[list[float]] = [[], []]
    for step in range(WARM_UP + steps):
        for loop, own in zip(loops, times, strict=True):
            start = time.perf_counter()
            loop.choose()
            loop.gradients()
            if step >= WARM_UP:
                own.append(time.perf_counter() - start)
            loop.move()
    plain, learned = (statistics.median(own) for own in times)
    return 1e6 * (learned - plain)


def host_time(steps: int = 200, layers: Sequence[int] = (4, 36), **options: Any) -> dict[str, float]:
    """Microseconds of the host for each layer call, and for the step beside them."""
    few, many = (added_microseconds(number, steps, options) for number in layers)
    each = (many - few) / (layers[1] - layers[0])
    return {"host_us_per_call": each, "host_us_per_step": few - each * layers[0]}


def make_loop(model: str, options: dict[str, Any] | None, tells: bool) -> Loop:
    torch.manual_seed(0)
    return Loop(*MODELS[model](), options, tells)


def measure_model(
    model: str,
    tells: bool = False,
    counted: Callable[[], AbstractContextManager[Waits]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The kernels of a plain step, of one with a learner, and its host synchronisations.

    Args:
        tells: Whether the learner is told logits and labels.
        counted: Counts host synchronisations; None if there is no device to wait for.
    """
    plain, learned = (count_kernels(make_loop(model, given, tells)).total() for given in (None, options))
    waits = None if counted is None else count_synchronisations(make_loop(model, options, tells), counted)
    device = "cpu" if counted is None else "cuda"
    return {
        "model": model,
        "told": tells,
        "device": device,
        "kernels_plain": plain,
        "kernels": learned,
        "host_syncs": waits,
    }


def measure_overhead() -> dict[str, Any]:
    """Kernels and host synchronisations of the models, and the host's time."""
    counted = synchronisations if torch.cuda.is_available() else None
    models = [measure_model(model, tells, counted) for model in MODELS for tells in (False, True)]
    return {"models": models, **host_time()}


HOST_TIMES = ("host_us_per_call", "host_us_per_step")
HOST_SLACK = 1.5  # times: the host's time differs from machine to machine, and from day to day


def find_regressions(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """A line for each number of :func:`measure_overhead` that has become worse."""
    worse = []
    then = {(row["model"], row["told"], row["device"]): row for row in before["models"]}
    for row in now["models"]:
        old = then.get((row["model"], row["told"], row["device"]), {})
        for name in ("kernels", "host_syncs"):
            if None not in (row[name], old.get(name)) and row[name] > old[name]:
                told = ", told logits and labels" if row["told"] else ""
                worse.append(f"{row['model']}{told}: {name} {row[name]}, was {old[name]}")
    slower = [name for name in HOST_TIMES if now[name] > HOST_SLACK * before[name] > 0]
    return worse + [f"{name}: {now[name]:.0f}, was {before[name]:.0f}" for name in slower]
