"""The protocol of all references: which step is rewarded now, and what judges it."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from inloop.alignment import Direction
from inloop.errors import UsageError
from inloop.rewards import Reward
from inloop.step import Judge, Step


class Reference(ABC):
    """Matches steps with what judges them.

    Attributes:
        waiting: The step that waits for its judge; None if none does.
        is_next_gradient: Whether the step that waits is judged by the gradient that is formed next, as it is. Then it can be rewarded
            layer by layer while that gradient is formed.
        is_gradient: Whether the direction is a gradient of a loss, which the optimizer's step is taken into account for; else it is a
            displacement of the parameters, which has the optimizer in it.
        zero_is_neutral: Whether a reward of zero means that an example had no effect on what judges it, and below it harm. (Every source of a
            mixture may well be rewarded above zero by the next step: it is a part of it.)
        is_training_data: Whether the judge comes from the mixture that is learned, which then may agree with itself.
    """

    is_next_gradient: bool = False
    is_gradient: bool = True
    zero_is_neutral: bool = False
    is_training_data: bool = True

    def __init__(self) -> None:
        self.waiting: Step | None = None
        self._is_attached = False

    def attach(self, model: nn.Module, reward: Reward) -> None:
        """A learner takes the reference, for this model and reward."""
        if self._is_attached:
            raise UsageError(
                f"This {type(self).__name__} belongs to another learner already. Fix: make one for each learner."
            )
        self.begin(model, reward)
        self._is_attached = True

    def begin(self, model: nn.Module, reward: Reward) -> None:  # noqa: B027  a reference may have nothing to begin with
        """Begin anew with the model in training, and the reward that the judge is for. Raises if they do not go together."""

    def detach(self) -> None:
        """The learner is closed."""
        self._is_attached = False
        self.drop()

    @abstractmethod
    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        """The step that can be rewarded now, and what judges it.

        Args:
            current: The step that was just trained on; a plain one is never rewarded.
            now: Its gradient and loss, before the optimizer moves the parameters.
        """

    def known_direction(self) -> Direction | None:
        """The direction that judges the step that begins now, if it is known before its backward pass; ``match`` gives the same then."""
        return None

    def end_step(self) -> None:  # noqa: B027
        """A step was judged, or begins to wait for its judge; the optimizer has not moved the parameters yet."""

    def drop(self) -> None:
        """Forget the step that waits."""
        if self.waiting is not None:
            self.waiting.release()
        self.waiting = None

    def state_dict(self) -> dict[str, Any]:
        """The state without the step that waits."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue from :meth:`state_dict`."""
