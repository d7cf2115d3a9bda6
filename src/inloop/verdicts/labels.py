"""Values of examples, compared among those of the same label.

A hard class has a higher loss than an easy one, and a source with many of its examples would look bad for it. So an example's value v is
compared with those of the same label, as far as other sources have that label, too. For an example of source k with the label y:

    v <- o (v - b_y)        b_y   the mean of v over recent examples with the label y
                            o     (1 - q_ky) / (1 - q_k), at most 1
                            q_ky  the share of source k among recent examples with the label y; q_k: among all

If all sources have the same labels, o is 1. A label that only one source has says nothing about that source, and its examples do not count.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop.errors import UsageError

Array = np.ndarray[Any, Any]
MEMORY = 200.0  # examples of a label, about, that its means are over
LEAST_OVERLAP = 0.25


class LabelMeans:
    """The mean value of each label, and the sources that have it. Axes: C labels, K sources."""

    def __init__(self, num_sources: int) -> None:
        self._mean_C: Array = np.zeros(0)
        self._number_CK: Array = np.zeros((0, num_sources))

    def compare(self, values_N: Array | Tensor, labels_N: Array | Tensor, source_N: Array | Tensor) -> Array:
        """Return the values, compared among the examples of a label; nan where there is nothing to compare with.

        That is for examples without a label (below 0) or without a value, and for labels that hardly any other source has.
        """
        values_N = np.asarray(values_N, dtype=np.float64)
        labels_N, source_N = np.asarray(labels_N), np.asarray(source_N)
        known_N = (labels_N >= 0) & np.isfinite(values_N)
        labels_n, source_n, values_n = labels_N[known_N], source_N[known_N], values_N[known_N]
        self._add(labels_n, source_n, values_n)
        compared_N = np.full(values_N.shape, np.nan)
        overlap_n = self._overlap(labels_n, source_n)
        overlap_n[overlap_n < LEAST_OVERLAP] = np.nan
        compared_N[known_N] = overlap_n * (values_n - self._mean_C[labels_n])
        return compared_N

    def _add(self, labels_N: Array, source_N: Array, values_N: Array) -> None:
        more = int(labels_N.max()) + 1 - len(self._mean_C) if len(labels_N) else 0
        if more > 0:
            self._mean_C = np.pad(self._mean_C, (0, more))
            self._number_CK = np.pad(self._number_CK, ((0, more), (0, 0)))
        number_C = len(self._mean_C)
        sum_C = np.bincount(labels_N, values_N, minlength=number_C)
        new_C = np.bincount(labels_N, minlength=number_C)
        np.add.at(self._number_CK, (labels_N, source_N), 1.0)
        total_C = np.maximum(self._number_CK.sum(axis=1), 1)
        self._mean_C += (sum_C - new_C * self._mean_C) / total_C
        # Beyond MEMORY, or the examples of one step if they are more, new examples replace old ones.
        self._number_CK *= np.minimum(np.maximum(new_C, MEMORY) / total_C, 1)[:, None]

    def _overlap(self, labels_N: Array, source_N: Array) -> Array:
        total_C, total_K = self._number_CK.sum(axis=1), self._number_CK.sum(axis=0)
        share_N = self._number_CK[labels_N, source_N] / np.maximum(total_C[labels_N], 1e-12)
        share_K = total_K / max(total_K.sum(), 1e-12)
        overlap_N: Array = np.clip((1 - share_N) / np.maximum(1 - share_K[source_N], 1e-12), 0, 1)
        return overlap_N

    def state_dict(self) -> dict[str, Any]:
        return {"means": torch.from_numpy(self._mean_C.copy()), "numbers": torch.from_numpy(self._number_CK.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["means"]) != len(state["numbers"]):
            raise UsageError(
                f"The state has means of {len(state['means'])} labels, and numbers of {len(state['numbers'])}."
            )
        self._mean_C, self._number_CK = (state[name].clone().numpy() for name in ("means", "numbers"))
