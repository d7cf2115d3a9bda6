"""What the model's outputs tell of an example: its loss, the loss that the model expects, and the excess of the one over the other.

With p the model's prediction for an example with the label y, f the logits, and H(p) the entropy of p, which is the loss that the model expects:

    excess = -log p_y - H(p) = -(f_y - sum_k p_k f_k), minus the margin.

If labels follow the model's predictions its mean is 0, for easy examples and for hard ones. Wrong labels raise it: the model cannot see from the input
that a label is wrong. So the excess tells sources with wrong labels from sources that are merely harder, which the loss does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inloop.distributed import gather_rows, is_distributed
from inloop.errors import BatchSizeError, UsageError
from inloop.step import Draw

_MOST_NUMBERS = 2**24  # logits that are turned into probabilities together


@dataclass(frozen=True, slots=True)
class Told:
    """What the user tells of the examples of a step, [N] each; None if it is not told.

    Attributes:
        given_N: The losses that are given.
        own_N: The cross-entropies of the model's predictions; without a meaning for an example whose label is below 0.
        expected_N: The losses that the model expects; the excess is the difference of the two.
        labels_N: The label, if an example has one.
    """

    given_N: Tensor | None = None
    own_N: Tensor | None = None
    expected_N: Tensor | None = None
    labels_N: Tensor | None = None

    @property
    def losses_N(self) -> Tensor | None:
        """The losses: those given, or the cross-entropies."""
        return self.own_N if self.given_N is None else self.given_N

    def _fields(self) -> dict[str, Tensor]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def tensors(self) -> list[Tensor]:
        return list(self._fields().values())

    def read(self, tensors: Sequence[Tensor]) -> "Told":
        """The same on the CPU, given its :meth:`tensors` there; nan for cross-entropies of labels below 0, which do not count."""
        told = Told(**dict(zip(self._fields(), tensors, strict=True)))
        if told.own_N is None or told.labels_N is None:
            return told
        own_N = np.where(told.labels_N.numpy() < 0, np.nan, told.own_N.numpy())
        return replace(told, own_N=torch.from_numpy(own_N))

    def mark(self) -> Tensor:
        """A tensor that is the same in all processes if they tell the same kinds of things."""
        return torch.tensor([getattr(self, name) is not None for name in self.__slots__], device="cpu")

    def of_everyone(self, draws: Sequence[Draw]) -> "Told":
        """What all processes tell, in the order of the draws' ``everyone``."""
        fields = self._fields()
        if not is_distributed() or not fields:
            return self
        table_NF = torch.stack([values_N.cpu().double() for values_N in fields.values()], dim=1)
        parts = zip(draws, table_NF.split([draw.num_examples for draw in draws]), strict=True)
        rows_NF = torch.cat([gather_rows(part, draw.counts) for draw, part in parts])
        told = dict(zip(fields, rows_NF.unbind(dim=1), strict=True))
        if "labels_N" in told:
            told["labels_N"] = told["labels_N"].long()
        return Told(**told)


@torch.no_grad()
def told_by(losses: Tensor | None, logits: Tensor | None, labels: Tensor | None, draws: Sequence[Draw]) -> Told:
    """What a user tells with ``learner.step``, checked, where it is: nothing is read here, since that waits for a device."""
    num_examples = sum(draw.num_examples for draw in draws)
    if losses is not None:
        losses = torch.as_tensor(losses).detach()
        if losses.shape != (num_examples,):
            raise BatchSizeError(
                f"learner.step was given losses of shape {tuple(losses.shape)}; needed is one for each of the {num_examples} examples."
            )
    if logits is None and labels is None:
        return Told(losses)
    if logits is None or labels is None:
        missing = "logits" if logits is None else "labels"
        raise UsageError(f"learner.step was given no {missing}=. Fix: give logits= and labels= together, or neither.")
    for name, value in (("logits", logits), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise UsageError(
                f"learner.step was given {name} that are a {type(value).__name__}; a tensor is needed. Fix: of a model's output give output.logits."
            )
    _refuse_other_shapes(logits, labels, num_examples)
    own_N, expected_N = losses_and_expected(logits.detach(), labels.detach())
    return Told(losses, own_N, expected_N, labels.detach().long() if labels.dim() == 1 else None)


def losses_and_expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each example, and the loss that the model expects, [N] each: means over an example's labels, if it has several.

    Args:
        logits: [N, ..., C].
        labels: [N, ...]; those below 0 do not count, as those that ``cross_entropy`` ignores. An example of several with none that counts has nan.
    """
    flat, classes = logits.flatten(0, -2), labels.flatten().long()
    each = max(1, _MOST_NUMBERS // logits.shape[-1])
    parts = [_cross_entropy_and_entropy(*pair) for pair in zip(flat.split(each), classes.split(each), strict=True)]
    own_M, expected_M = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if labels.dim() == 1:
        return own_M, expected_M
    known_M = classes >= 0
    shape = len(labels), math.prod(labels.shape[1:])
    both_2M = torch.stack([own_M, expected_M]).where(known_M, 0.0)
    sums_2N = both_2M.view(2, *shape).sum(dim=2, dtype=torch.float64)
    own_N, expected_N = (sums_2N / known_M.view(shape).sum(dim=1)).unbind()
    return own_N, expected_N


def _cross_entropy_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[M] each, for logits [M, C] and labels [M]."""
    log_p = logits.float().log_softmax(dim=-1)
    own_M = F.nll_loss(log_p, labels.clamp_min(0), reduction="none")
    return own_M, torch.special.entr(log_p.exp()).sum(dim=-1)


def _refuse_other_shapes(logits: Tensor, labels: Tensor, num_examples: int) -> None:
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape or len(labels) != num_examples:
        raise BatchSizeError(
            f"learner.step was given logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}; needed are [N, C] and [N], or [N, T, C] "
            f"and [N, T], for the step's {num_examples} examples. Fix: torch.cat those of all micro-batches; do not flatten texts."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"learner.step was given labels of type {labels.dtype}; allowed are whole numbers.")
    # On a device, torch itself notices unknown labels; looking here would wait for it.
    if (
        labels.device.type == "cpu"
        and labels.numel()
        and (largest := labels.detach().numpy().max()) >= logits.shape[-1]
    ):
        raise UsageError(
            f"learner.step was given the label {largest}; the logits have {logits.shape[-1]} classes. Fix: labels that do not count must be below 0."
        )
