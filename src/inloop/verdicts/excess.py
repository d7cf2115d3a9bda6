"""What the model's outputs tell of an example: its loss, and how far that is above what the model expects.

With p the model's prediction for an example with the label y, and H(p) the entropy of p, the loss that the model expects,

    excess = -log p_y - H(p) = -(f_y - sum_k p_k f_k),        f the logits: minus the margin.

If labels follow the model's predictions its mean is 0, for easy examples and for hard ones. Wrong labels raise it: the model cannot see from the input
that a label is wrong. So the excess tells sources with wrong labels from sources that are merely harder, which the loss does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.errors import BatchSizeError, UsageError

_MOST_NUMBERS = 2**24  # logits that are turned into probabilities together


@dataclass(frozen=True, slots=True)
class ExampleEvidence:
    """What is known of the examples of a step, [N] each; None if it is not known."""

    losses_N: Tensor | None = None
    excess_N: Tensor | None = None
    labels_N: Tensor | None = None


@torch.no_grad()
def evidence_of(losses: Tensor | None, logits: Tensor | None, labels: Tensor | None) -> ExampleEvidence:
    """The evidence in what a user gives to ``learner.step``."""
    if losses is not None:
        losses = torch.as_tensor(losses).detach()
    if logits is None and labels is None:
        return ExampleEvidence(losses)
    if logits is None or labels is None:
        missing = "logits" if logits is None else "labels"
        raise UsageError(f"learner.step was given no {missing}=. Fix: give logits= and labels= together, or neither.")
    classes = labels.detach().cpu()
    _refuse_other_shapes(logits, classes)
    each = max(1, _MOST_NUMBERS // max(1, logits[:1].numel()))
    pairs = zip(logits.detach().split(each), labels.detach().split(each), strict=True)
    own_N, excess_N = torch.cat([losses_and_excess(*pair) for pair in pairs], dim=1).cpu()
    return ExampleEvidence(own_N if losses is None else losses, excess_N, classes if classes.dim() == 1 else None)


def losses_and_excess(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each example and its excess, [2, N]: means over an example's labels, if it has several.

    Args:
        logits: [N, ..., C].
        labels: [N, ...]; those below 0 do not count, as those that ``cross_entropy`` ignores. An example with none has nan.
    """
    log_p = logits.float().log_softmax(dim=-1)
    loss = -log_p.gather(-1, labels.clamp_min(0).long().unsqueeze(-1)).squeeze(-1)
    excess = loss + torch.special.xlogy(log_p.exp(), log_p.exp()).sum(dim=-1)
    counts = (labels >= 0).to(loss)
    sums = [(value * counts).reshape(len(labels), -1).sum(dim=1) for value in (loss, excess, torch.ones_like(loss))]
    return torch.stack(sums[:2]) / sums[2]


def _refuse_other_shapes(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape or logits.dim() < 2:
        raise BatchSizeError(
            f"learner.step was given logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}; needed are [N, ..., C] and [N, ...], "
            "as scores of classes and the right class."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"learner.step was given labels of type {labels.dtype}; allowed are whole numbers.")
    if len(labels) and int(labels.max()) >= logits.shape[-1]:
        raise UsageError(
            f"learner.step was given the label {int(labels.max())}; the logits have {logits.shape[-1]} classes."
        )
