"""Where the examples are in a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The axis of an output that counts examples.

    Attributes:
        fold: How many rows each example has on that axis.
        positions_first: Of a folded axis, whether its rows are ordered by position, and then by example.
    """

    axis: int = 0
    fold: int = 1
    positions_first: bool = False

    def example_of_row(self, num_rows: int) -> Tensor | None:
        """None if every row is an example."""
        if self.fold == 1:
            return None
        rows = torch.arange(num_rows)
        return rows % (num_rows // self.fold) if self.positions_first else rows // self.fold


# By name of the module and index of the output; an operation outside of layers has the name OPERATION and its number in the pass.
Layouts = Mapping[tuple[str, int], Layout]
OPERATION = "(operation)"
