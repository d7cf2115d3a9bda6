"""Aligning while the gradient is being formed: each call as soon as its layer's gradient is final, and then it is let go.

A tape would otherwise be held until the backward pass of the next step has ended, on top of what that pass records. Backward
passes go from the last layer to the first, so the old tape shrinks as the new one grows.
"""

from collections.abc import Mapping

from torch import Tensor

from inloop.alignment.batch_size import of_part
from inloop.alignment.reduced import AnyCall, ReducedCall
from inloop.alignment.spare import Spare
from inloop.errors import OverwrittenTensorError


class EarlyAlignment:
    """What is known of the contributions to the product with a gradient that is being formed.

    Args:
        calls: The tape's own list: what is aligned leaves it.
        spare: Where its memory goes.
        part: By micro-batch, the rows of the examples that count; all, where there is no entry.

    Attributes:
        sums: Contributions [N] of the calls that were aligned, by micro-batch.
    """

    def __init__(self, calls: list[AnyCall], spare: Spare, part: Mapping[int, Tensor] | None = None) -> None:
        self._part = part or {}
        self.sums: dict[int, Tensor] = {}
        self._calls = calls
        self._spare = spare
        self._gradients: dict[str, Tensor] = {}
        self._aligned_with: dict[str, tuple[int, int]] = {}
        self._users: dict[str, list[AnyCall]] = {}  # by parameter
        for call in calls:
            if (
                isinstance(call, ReducedCall) or not call.rule.replays
            ):  # which needs a backward pass of its own, and that has no place within another
                for name in call.parameter_names.values():
                    self._users.setdefault(name, []).append(call)

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        """A backward pass has added all that it has to the gradient of the parameter ``name``."""
        if gradient.is_sparse or not self._users.get(name):
            return
        self._gradients[name] = gradient.detach()
        for call in list(self._users[name]):
            if self._gradients.keys() >= set(call.parameter_names.values()):
                self._align(call)
        if not self._users[name]:
            del self._gradients[name]

    def _align(self, call: AnyCall) -> None:
        local = {name: self._gradients[canonical] for name, canonical in call.parameter_names.items()}
        try:
            part = of_part(call, call.align(local), self._part)
        except OverwrittenTensorError:
            return  # comes up again when the rest of the tape is aligned, outside of the user's backward pass
        self.sums[call.batch] = self.sums[call.batch] + part if call.batch in self.sums else part
        self._calls.remove(call)
        if isinstance(call, ReducedCall):
            call.give_back(self._spare)
        for name, canonical in call.parameter_names.items():
            self._aligned_with[canonical] = _identity(local[name])
            self._users[canonical].remove(call)

    def forget(self) -> None:
        """Let go of everything."""
        self._calls.clear()
        self._users.clear()
        self._gradients.clear()

    @property
    def begun(self) -> bool:
        """Whether a call was aligned, so that its tensors are gone."""
        return bool(self._aligned_with)

    def differs_from(self, direction: Mapping[str, Tensor | None]) -> bool:
        """Whether ``direction`` is not, or not any more, the gradient that calls were aligned with."""
        return any(
            (value := direction.get(name)) is None or _identity(value) != then
            for name, then in self._aligned_with.items()
        )


def _identity(gradient: Tensor) -> tuple[int, int]:
    """Where it is stored, and how often it was written to: a second backward pass or a change in place shows."""
    return gradient.data_ptr(), gradient._version
