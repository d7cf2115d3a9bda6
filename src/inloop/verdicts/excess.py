"""What the model's outputs tell of an example: its loss, the loss that the model expects, and the excess of the one over the other.

With p the model's prediction for an example with the label y, f the logits, and H(p) the entropy of p, which is the loss that the model expects:

    excess = -log p_y - H(p) = -(f_y - sum_k p_k f_k), minus the margin.

If labels follow the model's predictions its mean is 0, for easy examples and for hard ones. Wrong labels raise it: the model cannot see from the input
that a label is wrong. So the excess tells sources with wrong labels from sources that are merely harder, which the loss does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.distributed import gather_rows, is_distributed
from inloop.errors import BatchSizeError, UsageError
from inloop.step import Draw

_MOST_NUMBERS = 2**24  # logits that are turned into probabilities together


@dataclass(frozen=True, slots=True)
class Told:
    """What the user tells of the examples of a step, [N] each; None if it is not told.

    Attributes:
        losses_N: The losses.
        expected_N: The losses that the model expects.
        excess_N: The excess of its cross-entropy over them.
        labels_N: The label, if an example has one.
    """

    losses_N: Tensor | None = None
    expected_N: Tensor | None = None
    excess_N: Tensor | None = None
    labels_N: Tensor | None = None

    def _fields(self) -> dict[str, Tensor]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    def mark(self) -> Tensor:
        """A tensor that is the same in all processes if they tell the same kinds of things."""
        return torch.tensor([getattr(self, name) is not None for name in self.__slots__])

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
    """What a user tells with ``learner.step``, checked, on the CPU."""
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
    logits, labels = torch.as_tensor(logits), torch.as_tensor(labels)
    classes = labels.detach().cpu()
    _refuse_other_shapes(logits, classes, num_examples)
    own_N, expected_N = losses_and_expected(logits.detach(), labels.detach())
    return Told(
        own_N if losses is None else losses,
        expected_N,
        own_N - expected_N,
        classes.long() if classes.dim() == 1 else None,
    )


def losses_and_expected(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each example, and the loss that the model expects, [2, N]: means over an example's labels, if it has several.

    Args:
        logits: [N, ..., C].
        labels: [N, ...]; those below 0 do not count, as those that ``cross_entropy`` ignores. An example with none has nan.
    """
    n = len(labels)
    known = (labels >= 0).flatten()
    flat, classes = logits.flatten(0, -2)[known], labels.flatten()[known].long()
    each = max(1, _MOST_NUMBERS // logits.shape[-1])
    parts = [_cross_entropy_and_entropy(*pair) for pair in zip(flat.split(each), classes.split(each), strict=True)]
    example = torch.arange(n, device=labels.device).repeat_interleave(max(1, labels[:1].numel()))[: len(known)][known]
    sums = torch.zeros(3, n, dtype=torch.float64, device=labels.device)
    values = torch.cat(parts, dim=1) if parts else sums[:2, :0]
    sums.index_add_(1, example, torch.cat([values.double(), torch.ones_like(values[:1], dtype=torch.float64)]))
    return (sums[:2] / sums[2]).cpu()


def _cross_entropy_and_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[2, M] for logits [M, C] and labels [M]."""
    log_p = logits.float().log_softmax(dim=-1)
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.stack([loss, -(log_p.exp() * log_p.clamp_min(-1e30)).sum(dim=-1)])


def _refuse_other_shapes(logits: Tensor, labels: Tensor, num_examples: int) -> None:
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape or len(labels) != num_examples:
        raise BatchSizeError(
            f"learner.step was given logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}; needed are [N, C] and [N], or [N, T, C] "
            f"and [N, T], for the step's {num_examples} examples. Fix: torch.cat those of all micro-batches; do not flatten texts."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"learner.step was given labels of type {labels.dtype}; allowed are whole numbers.")
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        raise UsageError(
            f"learner.step was given the label {int(labels.max())}; the logits have {logits.shape[-1]} classes. Fix: labels that do not count must be below 0."
        )
