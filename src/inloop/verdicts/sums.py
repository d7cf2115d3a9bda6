"""Running sums for each of K sources, and their state.

Steps are added by NumPy, whose operations on a few numbers take a fraction of torch's.
"""

from typing import Any

import numpy as np
import torch

from inloop.errors import UsageError


class SourceSums:
    """``num_sums`` sums for each source, [num_sums, K]."""

    def __init__(self, num_sums: int, num_sources: int) -> None:
        self._sums = torch.zeros(num_sums, num_sources, dtype=torch.float64, device="cpu")

    @property
    def _array(self) -> "np.ndarray[Any, Any]":
        """The sums, in the same memory."""
        return self._sums.numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sums"].shape != self._sums.shape:
            raise UsageError(f"The state is of {state['sums'].shape[1]} sources; this has {self._sums.shape[1]}.")
        self._sums.copy_(state["sums"])
