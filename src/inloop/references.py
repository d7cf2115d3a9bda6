"""References: which step is rewarded now, and what judges it.

next        step t by the gradient of step t+1 (the paper)
previous    step t by the gradient of step t-1
held-out    step t by the gradient of a loss on held-out data, at θ_{t+1}
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inloop.distributed import average_gradient, gather_numbers, is_sharded
from inloop.errors import UsageError
from inloop.rewards import Reward
from inloop.step import Judge, Step

log = logging.getLogger("inloop")

HeldOutLoss = Callable[[], Tensor]


class Reference(ABC):
    """Matches steps with what judges them.

    Attributes:
        waiting: The step that waits for its judge; None if none does.
        is_next_gradient: Whether the step that waits is judged by the gradient that is formed next, as it is. Then it can be rewarded
            layer by layer while that gradient is formed.
        is_training_data: Whether the judge comes from the mixture that is learned, which then may agree with itself.
    """

    is_next_gradient: bool = False
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


class Next(Reference):
    """Step t is judged by step t+1: its gradient and its loss, at the parameters that step t has led to."""

    is_next_gradient = True

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        rewarded, self.waiting = self.waiting, None if current.plain else current
        return rewarded, now


class Previous(Reference):
    """Step t is judged by the gradient of step t-1: known before the step, and a weaker judge."""

    def __init__(self) -> None:
        super().__init__()
        self._before: Judge | None = None

    def begin(self, model: nn.Module, reward: Reward) -> None:
        if not reward.needs_tape:
            raise UsageError(
                f"reference='previous' is a gradient, of which {type(reward).__name__} makes no use. Fix: use reference='next', or reward='gar'."
            )
        self._before = None

    def drop(self) -> None:
        """Forget the gradient of the step before, too: after a step that is dropped it would be of the one before that."""
        super().drop()
        self._before = None

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        before, self._before = self._before, now.detached()
        return (None, now) if before is None or current.plain else (current, before)

    def state_dict(self) -> dict[str, Any]:
        if self._before is None or any(is_sharded(value) for value in self._before.direction.values()):
            self._before = (
                None  # sharded, it would be a gradient of the whole model; the next step goes unrewarded, here, too
            )
            return {"previous": None}
        before = self._before
        return {"previous": {"direction": dict(before.direction), "loss": before.loss, "scale": before.scale}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = None if state["previous"] is None else Judge(**state["previous"])


class HeldOut(Reference):
    """Step t is judged by a loss on held-out data, at the parameters that step t has led to.

    Args:
        loss: Takes no argument and returns a scalar loss of the model, with its graph.
    """

    is_training_data = False

    def __init__(self, loss: HeldOutLoss) -> None:
        super().__init__()
        self.loss = loss

    def begin(self, model: nn.Module, reward: Reward) -> None:
        self._model, self._needs_gradient = model, reward.needs_tape

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        rewarded, self.waiting = self.waiting, None if current.plain else current
        return rewarded, now if rewarded is None else held_out_judge(self._model, self.loss, self._needs_gradient)


def as_reference(reference: Literal["next", "previous"] | HeldOutLoss | Reference) -> Reference:
    """A reference by its short name, a held-out loss as one, or the reference itself."""
    if isinstance(reference, Reference):
        return reference
    if callable(reference):
        return HeldOut(reference)
    if reference == "next":
        return Next()
    if reference == "previous":
        return Previous()
    raise UsageError(
        f"reference={reference!r}: allowed are 'next', 'previous', a function that returns a held-out loss, and an "
        "inloop.references.Reference."
    )


# ---------------------------------------------------------------- held-out data


def held_out_judge(model: nn.Module, held_out_loss: HeldOutLoss, with_gradient: bool = True) -> Judge:
    """The value and, if asked for, gradient of a loss at the model's present parameters.

    Leaves ``.grad`` and buffers alone: held-out data does not enter BatchNorm's running statistics. Only buffers that were changed are
    written back: a write would spoil the graphs and tapes that have read them.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return _evaluate(model, held_out_loss, with_gradient)
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _evaluate(model: nn.Module, held_out_loss: HeldOutLoss, with_gradient: bool) -> Judge:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if with_gradient and any(is_sharded(parameter) for parameter in named.values()):
        raise UsageError(
            "A held-out reference needs gradients on the side, which a sharded model has not. Fix: use 'next'."
        )
    with torch.enable_grad():
        loss = held_out_loss()
        if not isinstance(loss, Tensor) or loss.dim() != 0 or (with_gradient and not loss.requires_grad):
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"The reference function returned {got}. It must take no argument and return a scalar loss of the model with its "
                "graph: not .item(), not under no_grad, and without calling backward."
            )
        mean_loss = float(gather_numbers(float(loss.detach())).mean())
        if not with_gradient:
            return Judge({}, mean_loss)
        try:
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        except RuntimeError as error:
            if "second time" in str(error):
                raise UsageError(
                    "The reference function has called backward on its loss. Fix: only return the loss; its gradient is taken on the side."
                ) from error
            if "checkpoint" not in str(error).lower():
                raise
            raise UsageError(
                "A held-out reference needs gradients on the side, which a reentrant checkpoint does not give. Fix: use_reentrant=False."
            ) from error
    return Judge(average_gradient(dict(zip(named, gradients, strict=True))), mean_loss)
