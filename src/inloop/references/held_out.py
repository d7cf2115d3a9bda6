"""A loss on held-out data as the reference."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from inloop.alignment import Direction
from inloop.distributed import average_gradient, gather_numbers, is_sharded
from inloop.errors import UsageError
from inloop.references.reference import Reference
from inloop.rewards import Reward
from inloop.step import Judge, Step

HeldOutLoss = Callable[[], Tensor]


class HeldOut(Reference):
    """Judges step t by a loss on held-out data, at the parameters after step t.

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


def held_out_judge(model: nn.Module, held_out_loss: HeldOutLoss, with_gradient: bool = True) -> Judge:
    """Return the value and, if ``with_gradient``, the gradient of a loss at the model's present parameters.

    It leaves ``.grad`` and buffers alone: held-out data does not enter BatchNorm's running statistics. It writes back
    only buffers that changed: a write would spoil the graphs and tapes that have read them.
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
        if any(is_sharded(parameter) for parameter in named.values()):
            return Judge(_gradients_by_backward(loss, named), mean_loss)
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
    if gather_numbers(all(gradient is None for gradient in gradients)).all():
        raise UsageError(
            "The loss that the reference function returned does not depend on the learner's model. Fix: compute it with that model."
        )
    return Judge(average_gradient(dict(zip(named, gradients, strict=True))), mean_loss)


def _gradients_by_backward(loss: Tensor, named: dict[str, nn.Parameter]) -> Direction:
    """Return the averaged gradients of a sharded model, which come about in ``backward`` alone; leave ``.grad`` as it was."""
    before = {name: parameter.grad for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: parameter.grad for name, parameter in named.items()}
    finally:
        for name, parameter in named.items():
            parameter.grad = before[name]
