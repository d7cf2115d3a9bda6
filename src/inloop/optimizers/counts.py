"""Which parameters have done equally many steps, where an optimizer counts them on the device.

Reading a count would wait for the device. Parameters whose counts were equal once, and that took part in the same steps since, have equal
counts. A step that an optimizer skips on the device (for a gradient that is not finite) counts for none of them.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

Key = tuple[int, float, int]  # when the count was read, what it was, and the number of steps since


class StepCounts:
    """Keys of parameters; equal keys mean equal counts."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[Tensor, Key]
        ] = {}  # by the id of a parameter: its count, by which a loaded state is noticed
        self._num_steps = 0

    def get(self, parameter: Tensor) -> Key | None:
        """Return the parameter's key; None if its count is on the CPU, or not known."""
        known = self._known.get(id(parameter))
        return None if known is None else known[1]

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
