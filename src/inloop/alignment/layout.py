"""Where the examples are in a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The axis of an output that counts examples.

    Attributes:
        folded: Whether each example has several rows on that axis.
        positions_first: Of a folded axis, whether its rows are ordered by position, and then by example.
    """

    axis: int = 0
    folded: bool = False
    positions_first: bool = False

    def fold(self, output: Tensor, num_examples: int | None) -> int:
        """How many rows each example has."""
        return output.shape[self.axis] // num_examples if self.folded and num_examples else 1

    def example_of_row(self, fold: int, output: Tensor) -> Tensor | None:
        """None if every row is an example."""
        if fold <= 1:
            return None
        rows = torch.arange(output.shape[self.axis], device=output.device)
        return rows % (len(rows) // fold) if self.positions_first else rows // fold


# By name of the module and index of the output, or by the key of an operation.
Layouts = Mapping[tuple[str, int], Layout]
