"""The step that waits to be paid, and what it is judged by: the next step, the one before, or held-out data."""

import logging
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from inloop.alignment import Tape
from inloop.alignment.early import EarlyAlignment
from inloop.distributed import is_distributed, is_sharded
from inloop.draws import DrawnStep
from inloop.errors import UsageError
from inloop.rewards import Reference, Reward, check_reference, held_out_reference
from inloop.step_checks import warn_of_moved_parameters

log = logging.getLogger("inloop")


class Pending:
    """Matches steps with what judges them.

    Args:
        reference: "next", "previous", or a function that returns a held-out loss.

    Attributes:
        step: That waits to be paid; None if none does.
    """

    def __init__(
        self, model: nn.Module, reward: Reward, reference: Literal["next", "previous"] | Callable[[], Tensor]
    ) -> None:
        check_reference(reference, reward)
        self.reference = reference
        self.step: DrawnStep | None = None
        self._model, self._reward = model, reward
        self._previous: Reference | None = None
        self._matched_since_saved = True

    @property
    def tape(self) -> Tape | None:
        """Of the step that waits."""
        return None if self.step is None else self.step.kept.tape

    @property
    def begun(self) -> bool:
        """Whether a part of the step was paid already, so that no other gradient can pay it."""
        return self.tape is not None and self.tape.begun

    def match(self, current: DrawnStep, now: Reference) -> tuple[DrawnStep | None, Reference]:
        """Which step can be paid now, and what it is judged by; keeps what later steps will need."""
        if self.reference == "previous":
            before, self._previous = self._previous, now.detached()
            paid, now = (None, now) if before is None or current.plain else (current, before)
        else:
            paid, self.step = self.step, None if current.plain else current
            if paid is not None and callable(self.reference):
                warn_of_moved_parameters(self._model, current.kept.tape)
                now = held_out_reference(self._model, self.reference, with_gradient=self._reward.needs_tape)
        self._matched_since_saved = self._matched_since_saved or paid is not None
        return paid, now

    def align_early(self) -> EarlyAlignment | None:
        """Let the next backward pass pay the step that waits, layer by layer: its tape shrinks as the new one grows."""
        if self.tape is None or self.reference != "next" or not self._reward.aligns_once:
            return None
        return self.tape.align_early()

    def drop(self) -> None:
        if self.step is not None:
            self.step.release()
        self.step = None

    def state_dict(self, keep_step: bool) -> dict[str, Any]:
        """Without the step that waits, unless it is to be kept: it is dropped, here and now."""
        if keep_step and is_distributed():
            raise UsageError(
                "state_dict(pending=True) would keep the examples of this process alone. Fix: save without what is pending; the state is then "
                "the same in all processes, and continues with any number of them."
            )
        if any(is_sharded(value) for value in (self._previous.direction.values() if self._previous else ())):
            self._previous = None  # a gradient of the whole model; the next step goes unpaid, here, too
        if self.begun:  # between a backward pass and its step
            self.drop()
        if not keep_step and self.step is not None:
            if not self._matched_since_saved:
                log.warning(
                    "state_dict() drops the step that waits to be paid; called after every step, nothing is ever paid"
                )
            self._matched_since_saved = False
            self.drop()
        return {
            "previous": None if self._previous is None else self._previous.state_dict(),
            "pending": None if self.step is None else self.step.state_dict(),
        }

    def restore(self, step: DrawnStep | None, previous: dict[str, Any] | None) -> None:
        """Let this step wait, in place of what does now, and keep this gradient of the step before."""
        self.drop()
        self.step = step
        self._previous = None if previous is None else Reference(**previous)
