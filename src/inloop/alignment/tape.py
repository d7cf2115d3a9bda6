"""A tape: the recorded layer calls of one training step, and what can be asked of it.

    c_i = sum over calls of <dout_i, J_θ f(x; θ_t)[g]_i>          what example i contributes to <∇L_t, g>
    r_i = N c_i for a mean loss, c_i for a sum                     the paper's reward, <∇l_i, g>

N is the number of examples of the whole step, over all its micro-batches.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from inloop.alignment.batch_size import batch_sizes
from inloop.alignment.call import LayerCall
from inloop.alignment.direction import resolve_direction
from inloop.alignment.plan import Plan
from inloop.alignment.verification import verify_calls
from inloop.errors import UsageError

Reduction = Literal["mean", "sum"]
Direction = Mapping[str, Tensor | None]


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"reduction={reduction!r}: allowed are 'mean' and 'sum', as in the loss that is back-propagated."
        )


class Tape:
    """Layer calls of one step, written by the hooks of a recorder."""

    def __init__(self, plan: Plan, reduction: Reduction) -> None:
        check_reduction(reduction)
        self.reduction = reduction
        self.calls: list[LayerCall] = []
        self.batch = 0  # the micro-batch that forward passes belong to at the moment
        self.black_box_state: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {}
        self._open = True
        self._plan = plan
        self._trainable = plan.trainable()

    def writer(self, call: LayerCall, output_index: int, batch_axis: int) -> Callable[[Tensor], None]:
        """The hook for one output of ``call``: it owns the call, and only refers to the tape."""
        reference = weakref.ref(self)

        def write(dout: Tensor) -> None:
            tape = reference()
            if tape is not None and tape._open:
                tape.calls.append(call.with_gradient(dout.detach(), output_index, batch_axis))

        return write

    def close(self) -> None:
        self._open = False
        self.black_box_state.clear()

    def release(self) -> None:
        """Give back the memory; the tape is empty afterwards."""
        self.close()
        self.calls.clear()

    def align(self, direction: Direction) -> Tensor:
        """The reward of every example, ``r_i = <∇l_i(θ_t), direction>``, shape [N].

        Args:
            direction: A tensor for every trainable parameter by its name in the model, as in
                ``{name: p.grad for name, p in model.named_parameters()}``. None means zero. A tied parameter may be given
                under any of its names.

        Raises:
            DirectionError: If an entry is missing, unknown or of another shape.
            UsageError: If nothing was recorded.
            OverwrittenTensorError: If a recorded tensor was changed in place since.
        """
        contributions_N = self.contributions(direction)
        return contributions_N * len(contributions_N) if self.reduction == "mean" else contributions_N

    def contributions(self, direction: Direction) -> Tensor:
        """What every example contributed to ``<∇L_t, direction>``; their sum is that product."""
        resolved = resolve_direction(direction, self._plan.aliases, self._plan.shapes, self._trainable)
        if not self.calls:
            raise UsageError(
                "Nothing was recorded. A tape is filled by a forward and a backward pass while it is open, through layers with "
                "trainable parameters. Fix: run both inside the `with inloop.capture(model) as tape:` block."
            )
        sizes = batch_sizes(self.calls)
        totals: dict[int, Tensor] = {}
        for call in self.calls:
            local = {name: resolved[canonical] for name, canonical in call.parameter_names.items()}
            if any(value is not None for value in local.values()):
                part = call.align(local)
                totals[call.batch] = totals[call.batch] + part if call.batch in totals else part
        device = self.calls[0].dout.device
        order = sorted({call.batch for call in self.calls})
        empty = (torch.zeros(size, device=device) for size in sizes)
        return torch.cat([totals.get(batch, zeros) for batch, zeros in zip(order, empty, strict=True)])

    def verify(self, gradients: Direction) -> None:
        """Check ``sum_i c_i(p.grad) = ‖p.grad‖²`` for every parameter p.

        Args:
            gradients: The gradients that the recorded backward pass itself has left, by name.

        Raises:
            VerificationError: Naming the first parameter that does not add up.
        """
        resolved = resolve_direction(gradients, self._plan.aliases, self._plan.shapes, self._trainable)
        verify_calls(self.calls, resolved, self._trainable - self._plan.partly_covered)
