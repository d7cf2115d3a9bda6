"""The statistics of a learner's sources, and the table of verdicts that it prints. Axis K counts the sources."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inloop.distributed import gather_numbers
from inloop.errors import UsageError
from inloop.policies import Discrete, Policy, RewardSummary, SourceInfo, source_of, source_policy
from inloop.references import Reference
from inloop.report import StepReport
from inloop.step import Draw
from inloop.verdicts.advantage import Advantages
from inloop.verdicts.excess import ExampleEvidence
from inloop.verdicts.labels import LabelMeans
from inloop.verdicts.losses import FIRST, RecentMeans, SourceLosses, constant_losses
from inloop.verdicts.verdict import LossEvidence, SourceVerdict, is_below, word_for

FAR_BELOW = 0.85  # times the loss of a constant prediction
# A mean excess of the loss above the first, and above that of most other sources by the second, is a sign of wrong labels: in nats, and as shares of the
# loss that the model expects.
EXCESS, EXCESS_OVER_OTHERS = 0.1, 0.15
CERTAIN = 3.0  # standard errors


class SourceStatistics:
    """Examples, rewards and losses of each source. Printed, it is a table of verdicts.

    A learner keeps one, ``learner.statistics``. For reports from elsewhere, make one and call :meth:`add` with each.

    Args:
        sources: The number of sources, or a mixture, which has their names, sizes and labels.
        level: The probability that no source is ever flagged by chance in a run, if all are equal.
        least_effect: The smallest advantage, in standard deviations of a step's rewards, that counts.
        rewards_persist: Whether an example has about the same reward each time it is drawn, as with a trail.
    """

    def __init__(
        self,
        sources: object,
        level: float = 0.95,
        least_effect: float = Reference.least_effect,
        rewards_persist: bool = Reference.rewards_persist,
    ) -> None:
        if not 0 < level < 1:
            raise UsageError(f"level={level}: allowed are numbers between 0 and 1.")
        self.sources = SourceInfo.of(sources)
        self.level, self.least_effect, self.rewards_persist = level, least_effect, rewards_persist
        num_sources = len(self.sources)
        self._knows_excess = False
        self.drawn_K = torch.zeros(num_sources, dtype=torch.float64)
        self.shares_K = torch.full((num_sources,), torch.nan, dtype=torch.float64)
        self.advantages = Advantages(num_sources)
        self.losses = SourceLosses(num_sources)
        self.excess = RecentMeans(num_sources, memory=1000)
        self.compared_excess = RecentMeans(num_sources, memory=1000)
        self.labels = LabelMeans(num_sources)

    def add(self, report: StepReport) -> None:
        """Add the rewards of one step."""
        if report.shares:
            self.shares_K = torch.tensor(report.shares, dtype=torch.float64)
        if isinstance(report.rewards, dict) and "source" not in report.rewards:
            found = ", ".join(report.rewards)
            raise UsageError(
                f"The policy has no factor 'source', only {found}. Fix: give its mixture that name in the Product."
            )
        rewards = report.rewards["source"] if isinstance(report.rewards, dict) else report.rewards
        if not isinstance(rewards, RewardSummary):
            return
        if len(rewards.count_K) != len(self.sources):
            raise UsageError(
                f"SourceStatistics({len(self.sources)}) got the rewards of {len(rewards.count_K)} sources. Fix: SourceStatistics({len(rewards.count_K)})."
            )
        self.advantages.add(rewards.count_K, rewards.mean_K, report.reward_std)

    __call__ = add

    def count(self, draws: Sequence[Draw], evidence: ExampleEvidence) -> None:
        """Add the examples that a step was trained on: those of all processes, and what is known of this process's own."""
        for draw in draws:
            self.drawn_K += torch.bincount(source_of(draw.everyone).cpu(), minlength=len(self.sources))
        self._knows_excess = evidence.excess_N is not None
        source_N = torch.cat([source_of(draw.actions).cpu() for draw in draws])
        if evidence.losses_N is not None:
            self.losses.add(source_N, evidence.losses_N.cpu())
        if evidence.excess_N is not None:
            self.excess.add(source_N, evidence.excess_N)
            compared_N = evidence.excess_N
            if evidence.labels_N is not None:
                compared_N = self.labels.compare(compared_N, evidence.labels_N, source_N)
            self.compared_excess.add(source_N, compared_N)

    @property
    def epochs_K(self) -> Tensor:
        """Effective epochs of each source; nan if its size is not known."""
        return self.drawn_K / self._sizes_K

    @property
    def _sizes_K(self) -> Tensor:
        return torch.tensor([math.nan if n is None else n for n in self.sources.sizes()], dtype=torch.float64)

    def verdicts(self) -> list[SourceVerdict]:
        """A verdict for each source."""
        mean_K, *_ = self.advantages.estimate()
        distinct_K = torch.fmin(self.drawn_K, self._sizes_K) if self.rewards_persist else None
        low_K, high_K = self.advantages.interval(self.level, distinct_K)
        evidence, epochs_K = self._loss_evidence(), self.epochs_K
        known_K = epochs_K.isfinite()  # sources of known size
        sizes_K = self._sizes_K[known_K]
        overall = float(self.drawn_K[known_K].sum() / sizes_K.sum()) if len(sizes_K) else math.nan
        return [
            SourceVerdict(
                source=k,
                name=self.sources.names[k],
                share=float(self.shares_K[k]),
                examples=int(max(self.drawn_K[k], self.advantages.examples_K[k])),
                epochs=float(epochs_K[k]),
                advantage=float(mean_K[k]),
                low=float(low_K[k]),
                high=float(high_K[k]),
                losses=evidence[k],
                word=word_for(
                    float(low_K[k]), float(high_K[k]), float(epochs_K[k]), overall, evidence[k], self.least_effect
                ),
            )
            for k in range(len(self.sources))
        ]

    def _loss_evidence(self) -> Sequence[LossEvidence | None]:
        first_K, recent_K, error_K = self.losses.first_K, self.losses.mean_K, self.losses.error_K
        if bool(recent_K.isnan().all()):
            return [None] * len(self.sources)
        constant_K, _ = constant_losses(self.sources.label_counts())
        others_learn_K = most_others(is_below(recent_K, error_K, constant_K))
        columns = (first_K, recent_K, error_K, constant_K, others_learn_K, self._worse_than(), self._surprising())
        return [LossEvidence(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def not_learning(self) -> Tensor:
        """The sources that certainly do not learn while most others do, [K]. All processes come here together, and the majority decides."""
        return _majority(~self._worse_than().isnan())

    @property
    def knows_excess(self) -> bool:
        """Whether logits and labels were told with the last step."""
        return self._knows_excess

    def surprising(self) -> Tensor:
        """The sources whose labels certainly surprise the model, more than it expects and more than most others' do, [K]; as above."""
        return _majority(self._surprising())

    def _surprising(self) -> Tensor:
        excess, compared = self.excess, self.compared_excess
        if bool(excess.mean_K.isnan().all()):
            return torch.zeros(len(self.sources), dtype=torch.bool)
        over_others_K = compared.mean_K - median_of_others(compared.mean_K)
        scale_K = (self.losses.mean_K - excess.mean_K).clamp_min(1)
        return (
            (excess.mean_K - CERTAIN * excess.error_K > EXCESS * scale_K)
            & (over_others_K - CERTAIN * compared.error_K > EXCESS_OVER_OTHERS * scale_K)
            & (excess.number_K >= FIRST)
            & self._others_learned_much()
        )

    def _worse_than(self) -> Tensor:
        """The loss of a constant prediction, for sources that certainly do not learn while most others do, by the losses of this process; else nan. [K].

        The recent loss of such a source is certainly above the larger of two constant predictions, from its own label frequencies and from those
        of all sources, and most other sources are far below theirs: in the first steps of a run the losses of good sources may rise, too.
        """
        recent_K, error_K = self.losses.mean_K, self.losses.error_K
        if bool(recent_K.isnan().all()):  # without losses, do not read the labels
            return torch.full_like(recent_K, torch.nan)
        constant_K = self._constant_losses()
        above_K = is_below(-recent_K, error_K, -constant_K) & (self.losses.number_K >= FIRST)
        return torch.where(above_K & self._others_learned_much(), constant_K, torch.nan)

    def _constant_losses(self) -> Tensor:
        return torch.maximum(*constant_losses(self.sources.label_counts()))

    def _others_learned_much(self) -> Tensor:
        """Whether the losses of most others are far below those of constant predictions or, where labels are not known, below their first losses, [K].

        Before that, a source that is merely different may look wrong: the model has learned what is common to the others, and nothing else.
        """
        constant_K = self._constant_losses()
        start_K = torch.where(constant_K.isnan(), self.losses.first_K, constant_K)
        return most_others(self.losses.mean_K < FAR_BELOW * start_K)

    def flagged(self) -> list[int]:
        """The sources that are flagged."""
        return [verdict.source for verdict in self.verdicts() if verdict.flagged]

    def __str__(self) -> str:
        return table(self.verdicts(), self.level)

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": self.drawn_K.clone(),
            "shares": self.shares_K.clone(),
            "advantages": self.advantages.state_dict(),
            **{name: part.state_dict() for name, part in self._of_examples().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantages.load_state_dict(state["advantages"])
        for name, part in self._of_examples().items():
            part.load_state_dict(state[name])
        self.drawn_K.copy_(state["drawn"])
        self.shares_K = state["shares"].clone()

    def _of_examples(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "excess": self.excess,
            "compared_excess": self.compared_excess,
            "labels": self.labels,
        }


def _majority(found_K: Tensor) -> Tensor:
    return gather_numbers(*found_K.tolist()).mean(dim=0) > 0.5


def median_of_others(values_K: Tensor) -> Tensor:
    """For each source the median over the others, [K]; nan if no other has a value."""
    others_KK = values_K.expand(len(values_K), -1).masked_fill(torch.eye(len(values_K), dtype=torch.bool), torch.nan)
    return others_KK.nanquantile(0.5, dim=1)


def most_others(holds_K: Tensor) -> Tensor:
    """Whether something holds for more than half of the other sources, [K]: a few of them may be bad, too."""
    return 2 * (holds_K.sum() - holds_K.long()) > len(holds_K) - 1


def statistics_for(policy: Policy, reference: Reference) -> SourceStatistics | None:
    """Statistics of a policy's sources: its own choices or, of a product, those of its factor "source"; None if it has no such choice."""
    factor = source_policy(policy)
    if not isinstance(factor, Discrete) or factor.given is not None:
        return None
    return SourceStatistics(
        getattr(factor, "sources", factor.num_choices),
        least_effect=reference.least_effect,
        rewards_persist=reference.rewards_persist,
    )


def table(verdicts: Sequence[SourceVerdict], level: float) -> str:
    """The verdicts as text: one line a source, and below them a sentence for each source that is not ok."""
    columns: dict[str, list[str]] = {
        "source": [v.name for v in verdicts],
        "share": [_number(v.share, ".3f") for v in verdicts],
        "examples": [f"{v.examples:,}" for v in verdicts],
        "epochs": [_number(v.epochs, ".1f") for v in verdicts],
        "advantage": [_number(v.advantage, "+.2f") for v in verdicts],
        f"{level:.0%} interval": ["" if math.isnan(v.low) else f"{v.low:+.2f} to {v.high:+.2f}" for v in verdicts],
        "loss": [_course(v.losses) for v in verdicts],
        "verdict": [str(v.word) for v in verdicts],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells) or head == "advantage"}
    widths = {head: max(len(cell) for cell in (head, *cells)) for head, cells in shown.items()}
    left = ("source", "verdict")
    lines = [
        "  ".join(
            f"{cell:<{widths[head]}}" if head in left else f"{cell:>{widths[head]}}" for head, cell in row
        ).rstrip()
        for row in ([*zip(shown, cells, strict=True)] for cells in (list(shown), *zip(*shown.values(), strict=True)))
    ]
    return "\n".join([*lines, *(f"{v.name}: {v.reason}" for v in verdicts if v.reason)])


def _course(losses: LossEvidence | None) -> str:
    return "" if losses is None or math.isnan(losses.recent) else f"{losses.first:.2f} to {losses.recent:.2f}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
