"""Five small models, and a batch for each step: between them they have most kinds of layers.

None has dropout, whose random numbers differ between the CPU, where the reference is computed, and a GPU.

Axes: N examples, T positions, D features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop_lab.networks.transformers import Transformer

CLASSES, EXAMPLES, WORDS = 5, 12, 11


class LastState(nn.Module):
    """An LSTM of two layers, and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x_NTD: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x_NTD)[0][:, -1])
        return logits


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), norm(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 3 * 3, CLASSES)),
    )


def _gpt() -> nn.Module:
    return Transformer(nn.Embedding(WORDS, 32), positions=8, dim=32, depth=2, heads=4, classes=WORDS, causal=True)


@dataclass(frozen=True)
class Problem:
    """A model, and the shape of an example; texts are ids, and predict the next ones.

    Attributes:
        couples_examples: Whether an example's output depends on the others of its batch, as with BatchNorm.
    """

    make_model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    is_text: bool = False
    couples_examples: bool = False

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The same model each time, on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make_model().to(dtype)

    def batch(self, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The examples of a step, on the CPU; the labels can be learned."""
        generator = torch.Generator().manual_seed(step)
        if self.is_text:
            first = torch.randint(WORDS, (EXAMPLES, 1), generator=generator)
            ids = (first + 3 * torch.arange(self.shape[0] + 1)) % WORDS
            return ids[:, :-1], ids[:, 1:]
        y_N = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        x = torch.randn(EXAMPLES, *self.shape, generator=generator, dtype=torch.float64)
        return (x + 0.5 * y_N.view(-1, *[1] * len(self.shape))).to(dtype), y_N

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of each example, [N]; of a text, the mean over its positions."""
        losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
        return losses.view(len(y), -1).mean(dim=1)


PROBLEMS = {
    "mlp": Problem(_mlp, (32,)),
    "GroupNorm": Problem(lambda: _convolutions(lambda channels: nn.GroupNorm(4, channels)), (3, 8, 8)),
    "BatchNorm": Problem(lambda: _convolutions(nn.BatchNorm2d), (3, 8, 8), couples_examples=True),
    "gpt": Problem(_gpt, (8,), is_text=True),
    "lstm": Problem(LastState, (6, 8)),
}
