"""How many steps parameters have done, if all have done equally many. Optimizers may count on the device, and reading there would wait for it.

Parameters whose counts were equal once, and that took part in the same steps since, have equal
counts. A step that an optimizer skips on the device (for a gradient that is not finite) counts for none of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from inloop.many import are_small, joined

Key = tuple[int, float, int]  # when the count was read, what it was, and the number of steps since


class StepCounts:
    """Keys of parameters; equal keys mean equal counts."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[Tensor, Key]
        ] = {}  # by the id of a parameter: its count, by which a loaded state is noticed
        self._num_steps = 0

    def common(self, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> float | Tensor | None:
        """Return the number of steps of all parameters, on the device if it is counted there; None if they differ, or it is not known.

        On the device it is in float64: fused optimizers count in float32.
        """
        counts = [state.get("step") for state in states]
        if any(count is None for count in counts):
            return None
        if are_small(counts):
            values_P = joined(counts).numpy()
            return float(values_P[0]) if (values_P == values_P[0]).all() else None
        if all(not isinstance(count, Tensor) or count.device.type == "cpu" for count in counts):
            values = {float(count) for count in counts}  # type: ignore[arg-type]
            return values.pop() if len(values) == 1 else None
        keys = {self._known[id(p)][1] if id(p) in self._known else None for p in parameters}
        if None in keys or len(keys) > 1:
            return None
        first = counts[0]
        assert isinstance(first, Tensor)
        return first.double()

    def add_step(self, optimizer: Optimizer) -> None:
        """Note a step that the optimizer has done."""
        self._num_steps += 1
        unknown: list[tuple[int, Tensor]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                count = optimizer.state.get(parameter, {}).get("step")
                if not isinstance(count, Tensor) or count.device.type == "cpu":
                    break  # of this group; those on the CPU can be read
                if parameter.grad is None:
                    continue
                known = self._known.get(id(parameter))
                if known is None or known[0] is not count:
                    unknown.append((id(parameter), count))
                else:
                    when, value, since = known[1]
                    self._known[id(parameter)] = count, (when, value, since + 1)
        if unknown:
            values = torch.stack([count.detach().reshape(()) for _, count in unknown]).tolist()
            for (key, count), value in zip(unknown, values, strict=True):
                self._known[key] = count, (self._num_steps, value, 0)
