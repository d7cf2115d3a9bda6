"""The statistics of a learner's sources, and the table of verdicts that it prints. Axis K counts the sources."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Discrete, Policy, RewardSummary, SourceInfo, source_of, source_policy
from inloop.references import Reference
from inloop.report import StepReport
from inloop.step import Draw
from inloop.verdicts.advantage import Advantages
from inloop.verdicts.excess import Told
from inloop.verdicts.signs import Signs
from inloop.verdicts.verdict import LossEvidence, SourceVerdict, word_for


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
        self.drawn_K = torch.zeros(num_sources, dtype=torch.float64, device="cpu")
        self.shares_K = torch.full((num_sources,), torch.nan, dtype=torch.float64, device="cpu")
        self.advantages = Advantages(num_sources)
        self.signs = Signs(self.sources)

    def add(self, report: StepReport) -> None:
        """Add the rewards of one step."""
        if report.shares:
            self.shares_K = torch.tensor(report.shares, dtype=torch.float64, device="cpu")
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

    def count(self, draws: Sequence[Draw], told: Told) -> None:
        """Add the examples that a step was trained on, those of all processes, and what is told of this process's own."""
        parts = [source_of(draw.everyone).cpu().numpy() for draw in draws]
        source_N = parts[0] if len(parts) == 1 else np.concatenate(parts)
        drawn_K = self.drawn_K.numpy()
        drawn_K += np.bincount(source_N, minlength=len(drawn_K))
        self.signs.add(source_N, told.of_everyone(draws))

    @property
    def epochs_K(self) -> Tensor:
        """Effective epochs of each source; nan if its size is not known."""
        return self.drawn_K / self._sizes_K

    @property
    def _sizes_K(self) -> Tensor:
        return torch.tensor(
            [math.nan if n is None else n for n in self.sources.sizes()], dtype=torch.float64, device="cpu"
        )

    def verdicts(self) -> list[SourceVerdict]:
        """A verdict for each source."""
        mean_K, *_ = self.advantages.estimate()
        distinct_K = torch.fmin(self.drawn_K, self._sizes_K) if self.rewards_persist else None
        low_K, high_K = self.advantages.interval(self.level, distinct_K)
        evidence, epochs_K = self.signs.evidence(), self.epochs_K
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

    @property
    def labels_are_told(self) -> bool:
        """Whether logits and labels were told, which tell wrong sources from different ones."""
        return self.signs.labels_are_told

    def not_learning(self) -> Tensor:
        """The sources that certainly do not learn while most others have learned much, [K]."""
        return self.signs.not_learning()

    def stagnant(self) -> Tensor:
        """The sources whose loss is not certainly below that of a constant prediction while most others have learned much, [K]."""
        return self.signs.stagnant()

    def surprising(self) -> Tensor:
        """The sources whose labels certainly surprise the model, [K]."""
        return self.signs.surprising()

    def flagged(self) -> list[int]:
        """The sources that are flagged."""
        return [verdict.source for verdict in self.verdicts() if verdict.flagged]

    def __str__(self) -> str:
        return table(self.verdicts(), self.level)

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.sources.names),
            "drawn": self.drawn_K.clone(),
            "shares": self.shares_K.clone(),
            "advantages": self.advantages.state_dict(),
            "signs": self.signs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantages.load_state_dict(state["advantages"])
        self.signs.load_state_dict(state["signs"])
        self.drawn_K.copy_(state["drawn"])
        self.shares_K = state["shares"].clone()


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
    """The verdicts as text: one line a source, and below them the reasons for verdicts other than ok, each with its sources."""
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
    reasons = dict.fromkeys(v.reason for v in verdicts if v.reason)
    named = (f"{', '.join(v.name for v in verdicts if v.reason == reason)}: {reason}" for reason in reasons)
    return "\n".join([*lines, *named])


def _course(losses: LossEvidence | None) -> str:
    return "" if losses is None or math.isnan(losses.recent) else f"{losses.first:.2f} to {losses.recent:.2f}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
