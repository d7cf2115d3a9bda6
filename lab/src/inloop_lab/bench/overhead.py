"""What a learner adds to a step besides arithmetic: kernels, which take a launch each on a GPU, and the host's time for each layer call.

A *kernel* is a torch operation that reaches a dispatch mode and is no view, no allocation and reads no shape. Counted are those of the forward pass,
the backward pass and ``learner.step``, in a step that is not verified any more.

The host's time is measured on perceptrons of width 8 with one example, on which there is nothing to compute. The time that a learner adds is a
straight line in the number of layers: its slope is the time for each layer call, its value at no layers is the time for the step.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def count_kernels(loop: Loop) -> Counter[str]:
    """By name, in one steady step."""
    for _ in range(WARM_UP):
        loop.step()
    loop.choose()
    count = KernelCount()
    with count:
        loop.gradients()
    return count.names


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


def measure_kernels(model: str, tells: bool = False, **options: Any) -> dict[str, int]:
    """The kernels of a plain step, and of one with a learner."""
    counts = []
    for given in (None, options):
        torch.manual_seed(0)
        counts.append(count_kernels(Loop(*MODELS[model](), given, tells)).total())
    return {"kernels_plain": counts[0], "kernels": counts[1]}
