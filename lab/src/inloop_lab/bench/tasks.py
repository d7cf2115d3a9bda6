"""The tasks to measure: a model, a batch for it, and the loss of each example."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop_lab.networks.transformers import gpt, vit_tiny
from inloop_lab.networks.wide_resnet import make_wide_resnet


@dataclass(frozen=True)
class Task:
    """A model, and the batch of every step.

    Attributes:
        mixed: Whether the forward pass runs under autocast in bfloat16.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    mixed: bool = False

    def loss(self) -> Tensor:
        """The loss of a training step, after its forward pass."""
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.mixed):
            return self.losses(self.model(self.x)).mean()

    def losses(self, outputs: Tensor) -> Tensor:
        """Cross-entropy of each example, [N]; of a sequence its mean over positions."""
        if outputs.dim() == 2:
            return F.cross_entropy(outputs, self.y, reduction="none")
        return F.cross_entropy(outputs.transpose(1, 2), self.y, reduction="none").mean(dim=1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _classify(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda batch: (torch.randn(batch, *shape), torch.randint(10, (batch,)))


def _sequences(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(256, (batch, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return make_batch


# model, its batch, and the usual batch size
_TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    **{
        name: (lambda name=name: make_wide_resnet(name, 3, 10), _classify(3, 32, 32), batch)  # type: ignore[misc]
        for name, batch in (("wrn-16-4", 64), ("wrn-16-4-gn", 64), ("wrn-28-10", 32), ("wrn-28-10-gn", 32))
    },
    "vit-tiny": (vit_tiny, _classify(3, 32, 32), 64),
    "gpt-6": (gpt, _sequences(256), 8),
    "mlp": (_mlp, _classify(784), 256),
}
MODELS = tuple(_TASKS)
_OTHERS = r"gpt-(\d+)(?:@(\d+))?|wrn-\d+-\d+(?:-gn)?"
MIXED = "+bf16"  # at the end of a model's name: under autocast


def refuse_unknown_model(name: str) -> None:
    plain = name.removesuffix(MIXED)
    if plain not in _TASKS and re.fullmatch(_OTHERS, plain) is None:
        raise UsageError(
            f"model {name!r}: allowed are {', '.join(MODELS)}, any wrn-DEPTH-WIDTH[-gn] and any gpt-DEPTH[@SEQUENCE], "
            f"each also with {MIXED} at its end, for autocast in bfloat16."
        )


def make_task(model: str, batch: int | None = None, device: str = "cpu") -> Task:
    """One of ``MODELS``, or another size of the two families: wrn-DEPTH-WIDTH[-gn], gpt-DEPTH[@SEQUENCE]; with "+bf16" at its end under autocast.

    It is made on the CPU, so that it is the same on every device.
    """
    refuse_unknown_model(model)
    mixed, model = model.endswith(MIXED), model.removesuffix(MIXED)
    other = re.fullmatch(_OTHERS, model)
    torch.manual_seed(0)
    if model in _TASKS:
        build, make_batch, usual = _TASKS[model]
    elif other is not None and other[1]:
        depth, length = int(other[1]), int(other[2] or 256)
        build, make_batch, usual = lambda: gpt(depth, length), _sequences(length), 8
    else:
        build, make_batch, usual = lambda: make_wide_resnet(model, 3, 10), _classify(3, 32, 32), 32
    x, y = make_batch(batch or usual)
    return Task(build().to(device), x.to(device), y.to(device), mixed)
