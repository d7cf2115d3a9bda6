"""What the evidence supports, in words. Wrong, different and hard are not the same, and no reward alone tells them apart.

flagged      the source pulls against the others: its whole interval lies below ``-least_effect``. A certain but tiny difference does not count.
             If losses are known, this is refined:
  bad        its loss does not fall below that of a constant prediction from its own label frequencies, while the others' does;
  different  it learns: different from the others, or partly wrong. Look at it; keep it with a floor if you need it.
bad          also without a flag, if its loss is certainly above that of every constant prediction while most others are far below theirs.
different    also without a flag, if its labels surprise the model, more than it expects and more than most others' do (``excess.py``); bad, if its
             loss is then certainly above that of the constant prediction.
seen too often   its examples were seen more than ``MOST_EPOCHS`` times each, and that often compared with the examples of all sources.
undecided    the interval contains ``-least_effect``, or there is none yet.
ok           none of these; also with such an interval, if the source's labels do not surprise the model.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Word = Literal["ok", "flagged", "bad", "different or partly wrong", "seen too often", "undecided"]

MOST_EPOCHS = 4.0
LEAST_ENTROPY = 0.1  # nats


@dataclass(frozen=True, slots=True)
class LossEvidence:
    """How the loss of a source moves.

    Attributes:
        first, recent: The mean loss of the source's first examples, and of its recent ones.
        error: The standard error of the recent loss.
        constant: The loss of a constant prediction from the frequencies of the source's labels; nan if they are not known.
        others_learn: Whether the recent loss of most other sources is below that of their constant predictions.
        worse_than: The loss of the worse of two constant predictions, from its own label frequencies and from those of all sources, if the
            recent loss is certainly above it while most others are far below; else nan.
        surprising: Whether its labels certainly surprise the model: the mean excess of its loss is high.
        unsurprising: Whether they do not, by two standard errors. Neither is true if labels are not told, or too few.
    """

    first: float
    recent: float
    error: float
    constant: float
    others_learn: bool
    worse_than: float = math.nan
    surprising: bool = False
    unsurprising: bool = False

    @property
    def learns(self) -> bool | None:
        """Whether the recent loss is certainly below the constant prediction's; None if that cannot be said.

        A source with a single label has a constant prediction without loss, which nothing can be below.
        """
        if math.isnan(self.recent) or not self.constant > LEAST_ENTROPY or not self.others_learn:
            return None
        return bool(
            is_below(
                torch.tensor(self.recent, device="cpu"),
                torch.tensor(self.error, device="cpu"),
                torch.tensor(self.constant, device="cpu"),
            )
        )


@dataclass(frozen=True, slots=True)
class SourceVerdict:
    """The verdict on one source.

    Attributes:
        share: Its present probability.
        examples: The number of its examples that were drawn.
        epochs: The same in passes over it; nan if its size is not known.
        advantage: Its mean advantage; negative if its examples were rewarded less than the others'.
        low, high: The ends of the interval, by default at 95% for all sources and all looks together; nan with too few steps.
        losses: How its loss moves; None if losses are not known.
        word: The verdict.
    """

    source: int
    name: str
    share: float
    examples: int
    epochs: float
    advantage: float
    low: float
    high: float
    losses: LossEvidence | None
    word: Word

    @property
    def flagged(self) -> bool:
        """Whether it pulls against the others, does not learn or surprises the model, for whatever reason."""
        return self.word in ("flagged", "bad", "different or partly wrong")

    @property
    def reason(self) -> str:
        """The verdict in a sentence, with what to do."""
        if self.word == "flagged":
            return "pulls against the others; look at it"
        if self.word == "bad":
            assert self.losses is not None
            constant = self.losses.constant if math.isnan(self.losses.worse_than) else self.losses.worse_than
            return f"does not learn, and most others do (a constant prediction has a loss of {constant:.2f})"
        if self.word == "different or partly wrong" and self.losses is not None and self.losses.surprising:
            return "its labels often are not what the model expects: look at some of them"
        if self.word == "different or partly wrong":
            return "pulls against the others, but learns: look at it; keep it with a floor if you need it"
        if self.word == "seen too often":
            return f"each example was seen {self.epochs:.0f} times; a ceiling, or more data, would help"
        if self.word == "undecided":
            return (
                "too few steps" if math.isnan(self.low) else "more steps, larger batches or a validation set would tell"
            )
        return ""


def is_below(recent: Tensor, error: Tensor, constant: Tensor) -> Tensor:
    """Whether a loss is below that of a constant prediction by two standard errors."""
    return recent + 2 * error < constant


def is_above(recent: Tensor, error: Tensor, constant: Tensor) -> Tensor:
    """Whether a loss is above that of a constant prediction by two standard errors."""
    return recent - 2 * error > constant


def word_for(
    low: float, high: float, epochs: float, overall: float, losses: LossEvidence | None, least_effect: float
) -> Word:
    """The verdict that the evidence supports.

    Args:
        overall: The effective epochs of all sources together.
    """
    if losses is not None and not math.isnan(losses.worse_than):
        return "bad"
    if losses is not None and losses.surprising:
        is_certainly_bad = losses.learns is False and losses.recent - 2 * losses.error > losses.constant
        return "bad" if is_certainly_bad else "different or partly wrong"
    if high < -least_effect:
        learns = None if losses is None else losses.learns
        if learns is None:
            return "flagged"
        return "different or partly wrong" if learns else "bad"
    if epochs > MOST_EPOCHS * max(overall, 1):  # both nan if sizes are not known
        return "seen too often"
    has_right_labels = losses is not None and losses.unsurprising and losses.learns is not False
    return "ok" if low >= -least_effect or has_right_labels else "undecided"
