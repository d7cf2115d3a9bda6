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

from inloop.alignment.call import LayerCall
from inloop.alignment.direction import resolve_direction
from inloop.alignment.plan import Plan
from inloop.errors import BatchSizeError, UsageError, VerificationError

Reduction = Literal["mean", "sum"]
Direction = Mapping[str, Tensor | None]

# Of the sum of |c_i|: far above rounding, far below any real omission.
_VERIFY_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


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

    @property
    def batch_sizes(self) -> list[int]:
        """The number of examples of each micro-batch.

        Raises:
            BatchSizeError: If the layers of one micro-batch disagree.
        """
        first: dict[int, LayerCall] = {}
        for call in self.calls:
            known = first.setdefault(call.batch, call)
            if call.num_examples != known.num_examples:
                raise BatchSizeError(
                    f"Layer '{call.name}' saw {call.num_examples} rows, layer '{known.name}' {known.num_examples}. The first axis of "
                    "every layer's output must count the examples. Fix: keep examples on the first axis instead of folding "
                    "them into another, or leave one of the two layers out with layers=."
                )
        return [call.num_examples for _, call in sorted(first.items())]

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
        batch_sizes = self.batch_sizes
        totals: dict[int, Tensor] = {}
        for call in self.calls:
            local = {name: resolved[canonical] for name, canonical in call.parameter_names.items()}
            if any(value is not None for value in local.values()):
                part = call.align(local)
                totals[call.batch] = totals[call.batch] + part if call.batch in totals else part
        device = self.calls[0].dout.device
        order = sorted({call.batch for call in self.calls})
        empty = (torch.zeros(size, device=device) for size in batch_sizes)
        return torch.cat([totals.get(batch, zeros) for batch, zeros in zip(order, empty, strict=True)])

    def verify(self, gradients: Direction) -> None:
        """Check ``sum_i c_i(p.grad) = ‖p.grad‖²`` for every parameter p.

        This is what catches silent errors: weights used without calling their module, a lost hook, a penalty in the loss.

        Args:
            gradients: The gradients that the recorded backward pass itself has left, by name.

        Raises:
            VerificationError: Naming the first parameter that does not add up.
        """
        resolved = resolve_direction(gradients, self._plan.aliases, self._plan.shapes, self._trainable)
        sums = dict.fromkeys(self._trainable - self._plan.partly_covered, (0.0, 0.0))
        for call in self.calls:
            for local, name in call.parameter_names.items():
                if name in sums and resolved[name] is not None:
                    part = call.align({local: resolved[name]}).double()
                    total, magnitude = sums[name]
                    sums[name] = total + float(part.sum()), magnitude + float(part.abs().sum())
        for name, (total, magnitude) in sorted(sums.items()):
            gradient = resolved[name]
            squared = 0.0 if gradient is None else float(gradient.double().square().sum())
            tolerance = _VERIFY_TOLERANCE[self._precision(gradient)] * max(magnitude, squared)
            if not abs(total - squared) <= tolerance:
                raise VerificationError(_what_is_wrong(name, total, squared))

    def _precision(self, gradient: Tensor | None) -> torch.dtype:
        """The coarsest precision that took part."""
        dtypes = {call.dout.dtype for call in self.calls} | ({gradient.dtype} if gradient is not None else set())
        return max(dtypes, key=lambda dtype: _VERIFY_TOLERANCE[dtype], default=torch.float32)


def _what_is_wrong(name: str, total: float, squared: float) -> str:
    if total == 0.0:
        cause = (
            "No recorded layer used it. It is used without calling its module (functional use of the weight), or the hooks were "
            "lost (a model compiled before recording began). Fix: call the module, or leave the parameter out with layers=."
        )
    else:
        cause = (
            "Either the gradient held something else before (call zero_grad before backward), or the loss reaches the parameter "
            "past the examples (a penalty on weights: move it to the optimizer), or the layer is used in a way that was not "
            "recorded. Fix that, or pass verify=False if you mean it."
        )
    return (
        f"Parameter '{name}': the recorded examples add up to {total:.6g}, its gradient's squared norm is {squared:.6g}; "
        f"the two must be equal. {cause}"
    )
