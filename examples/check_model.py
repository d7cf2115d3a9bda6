"""A model of one's own, checked: `inloop check check_model:make` in this folder."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Words, an LSTM with the positions on its first axis, and two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(10, 6), nn.LSTM(6, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs, _ = self.cells(self.words(ids).transpose(0, 1))
        logits: Tensor = self.head(outputs[-1])
        return logits


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """One for each example."""
    ids, labels = batch
    return F.cross_entropy(model(ids), labels, reduction="none")


def make() -> tuple[nn.Module, Batch, Callable[[nn.Module, Batch], Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randint(10, (8, 5)), torch.randint(2, (8,))), losses
