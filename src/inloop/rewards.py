"""Rewards: how good was what was chosen in step t, judged by a reference, usually the step after it.

gradient alignment (GAR)     r_i = <∇l_i(θ_t), ∇L(θ_{t+1})>        one reward for each example (equation 1)
next-step loss (NSLR)        r   = -L(θ_{t+1})                     one reward for the whole batch
loss                         r_i = l_i(θ_t)                        for baselines that follow the loss
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inloop.alignment import Direction, Tape
from inloop.distributed import average_gradient, gather_numbers, is_sharded
from inloop.errors import UsageError

Normalisation = Literal["step", "center", "window", "none"]


@dataclass(frozen=True, slots=True)
class Step:
    """What is kept of step t until it is paid.

    Attributes:
        tape: None if the reward does not need one.
        losses_N: Of its examples, if they were given.
    """

    num_examples: int
    tape: Tape | None
    losses_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """What step t is judged by: a gradient, by parameter name, and a loss.

    Attributes:
        scale: What the gradient is multiplied with.
    """

    direction: Direction
    loss: float
    scale: float = 1.0

    def detached(self) -> "Reference":
        """A copy that outlives the step's gradients."""
        return Reference(
            {name: None if g is None else g.detach().clone() for name, g in self.direction.items()},
            self.loss,
            self.scale,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"direction": dict(self.direction), "loss": self.loss, "scale": self.scale}


def held_out_reference(model: nn.Module, held_out_loss: Callable[[], Tensor], with_gradient: bool = True) -> Reference:
    """The value and, if asked for, gradient of a loss at the model's present parameters.

    Leaves ``.grad`` and buffers alone: held-out data does not enter BatchNorm's running statistics.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        return _evaluate(model, held_out_loss, with_gradient)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


def _evaluate(model: nn.Module, held_out_loss: Callable[[], Tensor], with_gradient: bool) -> Reference:
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
            return Reference({}, mean_loss)
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
    return Reference(average_gradient(dict(zip(named, gradients, strict=True))), mean_loss)


class Reward(ABC):
    """A reward for every example of a step.

    Attributes:
        needs_tape: Whether the step's layer calls must be recorded.
        normalisation: How REINFORCE normalises this reward unless told otherwise.
        aligns_once: Whether ``step.tape.align(reference.direction)`` is all that it asks of the tape, so that it can be begun while
            that direction is being formed.
    """

    needs_tape: bool
    aligns_once: bool = False
    normalisation: Normalisation

    @abstractmethod
    def __call__(self, step: Step, reference: Reference) -> Tensor:
        """The rewards of the step's examples, shape [N]."""


class GradientAlignment(Reward):
    """``r_i = <∇l_i(θ_t), g>``, exact for each example."""

    needs_tape = True
    aligns_once = True
    normalisation: Normalisation = "step"

    def __call__(self, step: Step, reference: Reference) -> Tensor:
        assert step.tape is not None
        return step.tape.align(reference.direction)


class NextStepLoss(Reward):
    """``r = -L(θ_{t+1})``, the same for all examples; normalising it within the step would make it zero."""

    needs_tape = False
    normalisation: Normalisation = "none"

    def __call__(self, step: Step, reference: Reference) -> Tensor:
        return torch.full((step.num_examples,), -reference.loss, dtype=torch.float64)


class ExampleLoss(Reward):
    """``r_i = l_i(θ_t)``, for baselines that prefer what is not learned yet; ``learner.step`` must be given the losses."""

    needs_tape = False
    normalisation: Normalisation = "none"

    def __call__(self, step: Step, reference: Reference) -> Tensor:
        if step.losses_N is None:
            raise UsageError(
                "The reward 'loss' needs the loss of each example. Fix: call learner.step(losses.mean(), losses=losses)."
            )
        return step.losses_N


_REWARDS: dict[str, type[Reward]] = {"gar": GradientAlignment, "nslr": NextStepLoss, "loss": ExampleLoss}


def as_reward(reward: str | Reward) -> Reward:
    """A reward by its short name, or the reward itself."""
    if isinstance(reward, Reward):
        return reward
    if reward not in _REWARDS:
        raise UsageError(
            f"reward={reward!r}: allowed are {', '.join(map(repr, _REWARDS))} and an inloop.rewards.Reward."
        )
    return _REWARDS[reward]()


def check_options(reward: Reward, normalisation: Normalisation | None, **of_tapes: bool) -> None:
    """Refuse options that this reward makes no use of.

    Args:
        of_tapes: Options of what is recorded -> whether they were given.
    """
    if isinstance(reward, NextStepLoss) and normalisation in ("step", "center"):
        raise UsageError(
            f"normalisation={normalisation!r} leaves nothing of the next step's loss, which is the same for all examples of a step. Fix: use 'window' "
            "or 'none', or leave it out."
        )
    if not reward.needs_tape and (useless := [name for name, is_given in of_tapes.items() if is_given]):
        raise UsageError(
            f"{useless[0]}= is about recorded layers, of which {type(reward).__name__} makes no use. Fix: leave it out, or use reward='gar'."
        )


def check_reference(reference: object, reward: Reward) -> None:
    """Refuse what is no reference, or none for this reward."""
    if not callable(reference) and reference not in ("next", "previous"):
        raise UsageError(
            f"reference={reference!r}: allowed are 'next', 'previous' and a function that returns a held-out loss."
        )
    if reference == "previous" and not reward.needs_tape:
        raise UsageError(
            f"reference='previous' is a gradient, of which {type(reward).__name__} makes no use. Fix: use reference='next', or reward='gar'."
        )
