"""Values of examples, compared among those of the same label.

A hard class has a higher loss than an easy one, and a source with many of its examples would look bad for it. So an example's value v is
compared with those of the same label, as far as other sources have that label, too. For an example of source k with the label y:

    v <- o (v - b_y)        b_y   the mean of v over recent examples with the label y
                            o     (1 - q_ky) / (1 - q_k), at most 1
                            q_ky  the share of source k among recent examples with the label y; q_k: among all

If all sources have the same labels, o is 1. A label that only one source has says nothing about that source, and its examples do not count.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MEMORY = 200.0  # examples of a label, about, that its means are over
LEAST_OVERLAP = 0.25


class LabelMeans:
    """The mean value of each label, and the sources that have it. Axes: C labels, K sources."""

    def __init__(self, num_sources: int) -> None:
        self._mean_C = torch.zeros(0, dtype=torch.float64)
        self._number_CK = torch.zeros(0, num_sources, dtype=torch.float64)

    def compare(self, values_N: Tensor, labels_N: Tensor, source_N: Tensor) -> Tensor:
        """Return the values, compared among the examples of a label; nan where there is nothing to compare with.

        That is for examples without a label (below 0) or without a value, and for labels that hardly any other source has.
        """
        known_N = (labels_N >= 0) & values_N.isfinite()
        labels_n, source_n, values_n = labels_N[known_N], source_N[known_N], values_N[known_N].double()
        self._add(labels_n, source_n, values_n)
        compared_N = torch.full(values_N.shape, torch.nan, dtype=torch.float64)
        overlap_n = self._overlap(labels_n, source_n)
        overlap_n[overlap_n < LEAST_OVERLAP] = torch.nan
        compared_N[known_N] = overlap_n * (values_n - self._mean_C[labels_n])
        return compared_N

    def _add(self, labels_N: Tensor, source_N: Tensor, values_N: Tensor) -> None:
        most = max(len(self._mean_C), int(labels_N.max()) + 1 if len(labels_N) else 0)
        self._mean_C = F.pad(self._mean_C, (0, most - len(self._mean_C)))
        self._number_CK = F.pad(self._number_CK, (0, 0, 0, most - len(self._number_CK)))
        sum_C = torch.bincount(labels_N, values_N, minlength=most)
        new_C = torch.bincount(labels_N, minlength=most)
        self._number_CK.index_put_((labels_N, source_N), torch.ones_like(values_N), accumulate=True)
        self._mean_C += (sum_C - new_C * self._mean_C) / self._number_CK.sum(dim=1).clamp_min(1)
        # Beyond MEMORY, or the examples of one step if they are more, new examples replace old ones.
        self._number_CK *= (new_C.clamp_min(MEMORY) / self._number_CK.sum(dim=1).clamp_min(1)).clamp_max(1)[:, None]

    def _overlap(self, labels_N: Tensor, source_N: Tensor) -> Tensor:
        share_CK = self._number_CK / self._number_CK.sum(dim=1, keepdim=True).clamp_min(1e-12)
        share_K = self._number_CK.sum(dim=0) / self._number_CK.sum().clamp_min(1e-12)
        others_N = (1 - share_K[source_N]).clamp_min(1e-12)
        return ((1 - share_CK[labels_N, source_N]) / others_N).clamp(0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self._mean_C.clone(), "numbers": self._number_CK.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean_C, self._number_CK = state["means"].clone(), state["numbers"].clone()
