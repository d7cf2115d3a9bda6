"""The protocol of all references: which step to reward now, and what judges it."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from inloop.alignment import Direction
from inloop.errors import UsageError
from inloop.rewards import Reward
from inloop.step import Judge, Step


class Reference(ABC):
    """Matches steps with their judges.

    Attributes:
        waiting: The step that waits for its judge; None if none does.
        is_next_gradient: Whether the next gradient, as it is, judges the waiting step. Then that step can be rewarded
            layer by layer while the gradient forms.
        is_gradient: Whether the direction is a gradient of a loss, for which rewards take the optimizer's step into
            account; else it is a displacement of the parameters, which has the optimizer in it.
        tells_better: Whether higher rewards mean better data. A trail only tells which examples do not go with the rest.
        least_effect: The smallest advantage of a source, in standard deviations of a step's rewards, that counts for a verdict.
        rewards_persist: Whether an example has about the same reward each time it is drawn. Then equal sources differ by the examples that
            they happen to have, and verdicts allow for that.
        is_training_data: Whether the judge comes from the mixture that is learned, which then may agree with itself.
    """

    is_next_gradient: bool = False
    is_gradient: bool = True
    tells_better: bool = True
    least_effect: float = 0.02
    rewards_persist: bool = False
    is_training_data: bool = True

    def __init__(self) -> None:
        self.waiting: Step | None = None
        self._is_attached = False

    def attach(self, model: nn.Module, reward: Reward) -> None:
        """Attach the reference to a learner with this model and reward."""
        if self._is_attached:
            raise UsageError(
                f"This {type(self).__name__} belongs to another learner already. Fix: make one for each learner."
            )
        self.begin(model, reward)
        self._is_attached = True

    def begin(self, model: nn.Module, reward: Reward) -> None:  # noqa: B027  a reference may need no setup
        """Begin anew with the model in training, and the reward to judge for. Raise if they do not go together."""

    def detach(self) -> None:
        """Detach the reference from a closed learner."""
        self._is_attached = False
        self.drop()

    @abstractmethod
    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        """Return the step to reward now, if any, and its judge.

        Args:
            current: The step that just trained the model; a plain one is never rewarded.
            now: Its gradient and loss, before the optimizer moves the parameters.
        """

    def known_direction(self) -> Direction | None:
        """Return the direction that ``match`` will give for the step that begins, if known before its backward pass."""
        return None

    def batch_begins(self, number: int) -> None:  # noqa: B027
        """A micro-batch of the open step is announced; ``number`` counts from 0."""

    def end_step(self) -> None:  # noqa: B027
        """End a step that was judged or begins to wait; the optimizer has not moved the parameters yet."""

    def drop(self) -> None:
        """Release and forget the waiting step."""
        if self.waiting is not None:
            self.waiting.release()
        self.waiting = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the waiting step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue from :meth:`state_dict`."""
