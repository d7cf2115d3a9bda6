"""The other half of the batch as the reference.

    g_1 = ∇L_1(θ_t),  g_2 = ∇L_2(θ_t)        r_i = <∇l_i(θ_t), g_2> for i in the first micro-batch, <∇l_i(θ_t), g_1> in the second

Both are taken at the same parameters. The next step's gradient has a term more: at a large learning rate a step overshoots, and the next loss
would have been lower with a smaller step, so examples without any effect look good. The other half does not have that term.
"""

import weakref

import torch
from torch import Tensor, nn

from inloop.alignment import gradients_of
from inloop.distributed import is_distributed
from inloop.errors import UsageError
from inloop.references.reference import Reference
from inloop.rewards import Reward
from inloop.step import Judge, Step


class OtherHalf(Reference):
    """The two micro-batches of a step judge each other. Call ``learner.sample`` and ``backward`` for each of them, then ``learner.step``."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, Tensor | None] = {}

    def begin(self, model: nn.Module, reward: Reward) -> None:
        if not reward.needs_tape:
            raise UsageError(
                f"OtherHalf is a gradient, of which {type(reward).__name__} makes no use. Fix: use reference='next', or reward='gar'."
            )
        self._model = weakref.ref(model)

    def batch_begins(self, number: int) -> None:
        """Keep the gradient of the first micro-batch before the second adds its own."""
        model = self._model()
        if number == 1 and model is not None:
            self._first = {n: None if g is None else g.detach().clone() for n, g in gradients_of(model).items()}

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        if is_distributed():
            raise UsageError("OtherHalf does not work with several processes yet. Fix: use reference='next'.")
        if len(current.draws) != 2:
            raise UsageError(
                f"OtherHalf needs steps of two micro-batches; this one has {len(current.draws)}. Fix: call learner.sample(n) and backward twice before "
                "learner.step, each with half of the batch and half of the loss."
            )
        first, self._first = self._first, {}
        second = {name: _difference(total, first.get(name)) for name, total in now.direction.items()}
        return (None, now) if current.plain else (current, Judge({}, now.loss, now.scale, (second, first)))

    def drop(self) -> None:
        super().drop()
        self._first = {}


def _difference(total: Tensor | None, first: Tensor | None) -> Tensor | None:
    with torch.no_grad():
        return total if total is None or first is None else total.detach() - first
