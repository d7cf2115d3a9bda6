"""Signs of wrong sources in what is told of their examples: sources that do not learn, and sources whose labels surprise the model.

Both compare a source with the others, and wait until most others have learned much. Before that, a source that is merely different may look wrong:
the model has learned what is common to the others, and nothing else. Axis K counts the sources.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop.policies import SourceInfo
from inloop.verdicts.excess import Told
from inloop.verdicts.labels import LabelMeans
from inloop.verdicts.losses import FIRST_EXAMPLES, Array, RecentMeans, SourceLosses, add_together, constant_losses
from inloop.verdicts.verdict import LEAST_ENTROPY, LossEvidence, is_above, is_below

FAR_BELOW = 0.85  # times the loss of a constant prediction
EXCESS = 0.1  # above 0: in nats, and as a share of the loss that the model expects
EXCESS_OVER_OTHERS = 0.15  # above the median of the others, in the same units
MEMORY = 1000  # examples of a source, about, that its mean excess is over
CERTAIN = 3.0  # standard errors
MEMORISED = 2.0  # epochs
EVERY = 10  # steps between two looks for surprising sources


class Signs:
    """What losses, and the excess of losses, tell of each source."""

    def __init__(self, sources: SourceInfo) -> None:
        num_sources = len(sources)
        self._sources = sources
        self.losses = SourceLosses(num_sources)
        self.expected = RecentMeans(num_sources, MEMORY)
        self.excess = RecentMeans(num_sources, MEMORY)
        self.compared_excess = RecentMeans(num_sources, MEMORY)
        self.label_means = LabelMeans(num_sources)
        self._told_labels_KC = torch.zeros(num_sources, 0, dtype=torch.float64, device="cpu")
        self._surprising_K = torch.zeros(num_sources, dtype=torch.bool, device="cpu")
        self._num_steps = 0

    def add(self, source_N: Array | Tensor, told: Told) -> None:
        """Add the examples of one step, those of all processes."""
        source_N = np.asarray(source_N)
        if told.losses_N is not None:
            self.losses.add(source_N, told.losses_N)
        if told.own_N is None or told.expected_N is None:
            return
        expected_N = np.asarray(told.expected_N, dtype=np.float64)
        excess_N = np.asarray(told.own_N, dtype=np.float64) - expected_N
        compared_N = excess_N
        if told.labels_N is not None:
            labels_N = np.asarray(told.labels_N)
            compared_N = self.label_means.compare(excess_N, labels_N, source_N)
            self._count_labels(source_N, labels_N)
        means = (self.expected, self.excess, self.compared_excess)
        add_together(means, source_N, (expected_N, excess_N, compared_N))
        self._num_steps += 1
        if self._num_steps % EVERY == 0:
            self._surprising_K = self._find_surprising()

    def _count_labels(self, source_N: Array, labels_N: Array) -> None:
        known_N = labels_N >= 0
        more = int(labels_N.max()) + 1 - self._told_labels_KC.shape[1] if len(labels_N) else 0
        if more > 0:
            self._told_labels_KC = torch.nn.functional.pad(self._told_labels_KC, (0, more))
        np.add.at(self._told_labels_KC.numpy(), (source_N[known_N], labels_N[known_N]), 1.0)

    @property
    def labels_are_told(self) -> bool:
        """Whether logits and labels were told, which tell wrong sources from different ones."""
        return bool(self.excess.number_K.any())

    def not_learning(self) -> Tensor:
        """The sources that certainly do not learn while most others have learned much, [K].

        Their recent loss is above the larger of two constant predictions, from their own label frequencies and from those of all sources.
        """
        if not bool(self.losses.number_K.any()):  # do not read labels for nothing
            return torch.zeros(len(self._sources), dtype=torch.bool, device="cpu")
        constant_K = torch.maximum(*self._constant_losses())
        above_K = is_above(self.losses.mean_K, self.losses.error(self._sizes_K), constant_K)
        return above_K & (self.losses.number_K >= FIRST_EXAMPLES) & self._others_learned_much()

    def stagnant(self) -> Tensor:
        """The sources whose loss is not certainly below that of their own constant prediction while most others have learned much, [K]."""
        own_K, _ = self._constant_losses()
        learns_K = is_below(self.losses.mean_K, self.losses.error(self._sizes_K), own_K)
        known_K = (own_K > LEAST_ENTROPY) & (self.losses.number_K >= FIRST_EXAMPLES)
        return known_K & ~learns_K & self._others_learned_much()

    def surprising(self) -> Tensor:
        """The sources whose labels certainly surprise the model, more than it expects and more than those of the other sources do, [K]."""
        return self._surprising_K

    def _find_surprising(self) -> Tensor:
        """Both excesses are certainly above their thresholds, [K]."""
        over_2K, error_2K = self._excess_over_thresholds()
        found_K = (over_2K > CERTAIN * error_2K).all(0) & self._may_be_compared()
        return torch.where(self._is_fresh_beside_memorised(), self._surprising_K, found_K)

    def unsurprising(self) -> Tensor:
        """The sources whose labels do not surprise the model: one of both excesses is below its threshold by two standard errors, [K]."""
        over_2K, error_2K = self._excess_over_thresholds()
        found_K = is_below(over_2K, error_2K, torch.zeros((), device="cpu")).any(0) & self._may_be_compared()
        return found_K & ~self._surprising_K & ~self._is_fresh_beside_memorised()

    def _excess_over_thresholds(self) -> tuple[Tensor, Tensor]:
        """How far the mean excess is above its threshold, and that over the other sources above its own, with standard errors, [2, K] each."""
        unit_K = self.expected.mean_K.clamp_min(1)
        compared_K = self.compared_excess.mean_K
        over_others_K = compared_K - median_of_others(compared_K)
        over = (self.excess.mean_K - EXCESS * unit_K, over_others_K - EXCESS_OVER_OTHERS * unit_K)
        return torch.stack(over), torch.stack([m.error(self._sizes_K) for m in (self.excess, self.compared_excess)])

    def _may_be_compared(self) -> Tensor:
        return (self.compared_excess.number_K >= FIRST_EXAMPLES) & self._others_learned_much()

    def evidence(self) -> list[LossEvidence | None]:
        """The evidence on each source; None without losses."""
        if not bool(self.losses.number_K.any()):
            return [None] * len(self._sources)
        recent_K, error_K = self.losses.mean_K, self.losses.error(self._sizes_K)
        own_K, pooled_K = self._constant_losses()
        others_learn_K = most_others(is_below(recent_K, error_K, own_K), self.losses.number_K > 0)
        worse_than_K = torch.where(self.not_learning(), torch.maximum(own_K, pooled_K), torch.nan)
        labels = (self.surprising(), self.unsurprising())
        columns = (self.losses.first_K, recent_K, error_K, own_K, others_learn_K, worse_than_K, *labels)
        return [LossEvidence(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _constant_losses(self) -> tuple[Tensor, Tensor]:
        if bool(self._told_labels_KC.any()):
            return constant_losses([row_C if bool(row_C.any()) else None for row_C in self._told_labels_KC])
        return constant_losses(self._sources.label_counts())

    @property
    def _sizes_K(self) -> Tensor:
        return torch.tensor(
            [math.inf if n is None else n for n in self._sources.sizes()], dtype=torch.float64, device="cpu"
        )

    def _others_learned_much(self) -> Tensor:
        """Whether the losses of most others are far below those of constant predictions, or their first losses where labels are not known, [K]."""
        constant_K = torch.maximum(*self._constant_losses())
        start_K = torch.where(constant_K.isnan(), self.losses.first_K, constant_K)
        return most_others(self.losses.mean_K < FAR_BELOW * start_K, self.losses.number_K > 0)

    def _is_fresh_beside_memorised(self) -> Tensor:
        """Whether a source is much larger than the others, which the model has seen several times, [K].

        The model is then too sure of examples that it has not seen, and the answer stays what it was before. Sizes decide, not a source's own
        epochs, which follow its share.
        """
        sizes_K = self._sizes_K
        epochs_K = self.losses.number_K / sizes_K
        return (sizes_K > 2 * median_of_others(sizes_K)) & (median_of_others(epochs_K) > MEMORISED)

    def _parts(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "expected": self.expected,
            "excess": self.excess,
            "compared_excess": self.compared_excess,
            "label_means": self.label_means,
        }

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        others = {"told_labels": self._told_labels_KC.clone(), "surprising": self._surprising_K.clone()}
        return parts | others | {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._told_labels_KC, self._surprising_K = state["told_labels"].clone(), state["surprising"].clone()
        self._num_steps = state["num_steps"]


def median_of_others(values_K: Tensor) -> Tensor:
    """For each source the median over the others that have a value, [K]; nan if none has. In O(K log K)."""
    known_K = ~values_K.isnan()
    ordered_n, order_n = values_K[known_K].sort()
    n = len(ordered_n)
    if n == 0:
        return torch.full_like(values_K, torch.nan)
    place_K = torch.full(values_K.shape, n, device="cpu")
    place_K[known_K] = order_n.argsort()
    others_K = n - known_K.long()

    def pick(index_K: Tensor) -> Tensor:
        """The value at this place among the others."""
        return ordered_n[(index_K + (place_K <= index_K).long()).clamp(0, n - 1)]

    middle_K = (pick((others_K - 1).clamp_min(0) // 2) + pick(others_K // 2)) / 2
    return torch.where(others_K > 0, middle_K, torch.nan)


def most_others(holds_K: Tensor, known_K: Tensor) -> Tensor:
    """Whether something holds for more than half of the other sources of which something is known, [K]: a few of them may be bad, too."""
    return 2 * (holds_K.sum() - holds_K.long()) > known_K.sum() - known_K.long()
