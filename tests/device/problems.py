"""Small models of several kinds, and sources of data for them: what is trained on the CPU and on the device alike.

Axes: N examples, T positions, D features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inloop_lab.networks.transformers import Transformer

CLASSES, SIZE = 3, 40


class LastState(nn.Module):
    """Two layers of an LSTM with dropout between them, and a classifier of the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x_NTD: Tensor) -> Tensor:
        return self.head(self.lstm(x_NTD)[0][:, -1])


class Attention(nn.Module):
    """Attention with dropout, and a classifier of the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x_NTD: Tensor) -> Tensor:
        return self.head(self.attention(x_NTD, x_NTD, x_NTD, need_weights=False)[0].mean(dim=1))


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, ids_NT: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids_NT)).mean(dim=1))


class Checkpointed(nn.Module):
    """A block that is run again in the backward pass, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6))

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x_ND), use_reentrant=False))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(6, CLASSES))


def plain_mlp() -> nn.Module:
    """The same without dropout."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


def gpt() -> nn.Module:
    return Transformer(nn.Embedding(7, 8), positions=5, dim=8, depth=2, heads=2, classes=7, causal=True)


@dataclass(frozen=True)
class Problem:
    """A model, the shape of an example's input, and whether it is made of ids; texts predict their own ids."""

    make_model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    has_ids: bool = False
    is_text: bool = False

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same model each time, on the CPU."""
        with torch.random.fork_rng(), torch.device("cpu"):
            torch.manual_seed(0)
            return self.make_model().to(dtype)

    def sources(self, num_sources: int = 3, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
        """Random inputs with random labels, on the CPU; all but the first source put the label into the input."""
        generator = torch.Generator().manual_seed(0)
        with torch.device("cpu"):
            return [self._source(number > 0, generator, dtype) for number in range(num_sources)]

    def _source(self, learnable: bool, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        y_N = torch.randint(CLASSES, (SIZE,), generator=generator)
        if self.has_ids:
            x = torch.randint(7, (SIZE, *self.shape), generator=generator)
            x[:, 0] = y_N if learnable else x[:, 0]
        else:
            x = torch.randn(SIZE, *self.shape, generator=generator, dtype=torch.float64).to(dtype)
            x[:, 0] += learnable * (y_N - 1).to(dtype).view(-1, *[1] * (x.dim() - 2))
        return x, x if self.is_text else y_N

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of each example, [N]."""
        losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
        return losses.view(len(y), -1).mean(dim=1)


PROBLEMS = {
    "mlp": Problem(mlp),
    "plain mlp": Problem(plain_mlp),
    "convolutions": Problem(convolutions, (2, 6, 6)),
    "gpt": Problem(gpt, (5,), has_ids=True, is_text=True),
    "lstm": Problem(LastState, (5, 4)),
    "attention": Problem(Attention, (5, 4)),
    "embedding": Problem(BagOfWords, (5,), has_ids=True),
    "checkpointed": Problem(Checkpointed),
}
