"""A tape: the recorded layer calls of one training step, and what can be asked of it.

    c_i = sum over calls of <dout_i, J_θ f(x; θ_t)[g]_i>          what example i contributes to <∇L_t, g>
    r_i = N c_i for a mean loss, c_i for a sum                     the paper's reward, <∇l_i, g>

N is the number of examples of the whole step, over all its micro-batches.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from inloop.alignment.batch_size import batch_sizes, of_part
from inloop.alignment.black_box import BlackBoxState
from inloop.alignment.call import LayerCall
from inloop.alignment.direction import Direction, in_parts, resolve_direction
from inloop.alignment.early import EarlyAlignment
from inloop.alignment.half import Halves
from inloop.alignment.plan import Plan
from inloop.alignment.reduced import AnyCall, ReducedCall, reduced
from inloop.alignment.reduced_box import reduced_box
from inloop.alignment.spare import Spare
from inloop.alignment.verification import refuse_unseen_uses, verify_calls
from inloop.errors import BatchSizeError, UnsupportedLayerError, UsageError

Reduction = Literal["mean", "sum"]
Retention = Literal["exact", "half", "recompute"]


def check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"reduction={reduction!r}: allowed are 'mean' and 'sum', as in the loss that is back-propagated."
        )


def check_retention(retain: str) -> None:
    if retain not in ("exact", "half", "recompute"):
        raise UsageError(
            f"retain={retain!r}: allowed are 'exact' (tensors as they are), 'half' (in float16, each with a scale) and 'recompute' "
            "(only the batch and the parameters)."
        )


class _Waiting:
    """A call whose gradient may still come. The graph holds this, not the call: a user may hold the graph for long."""

    def __init__(self, call: LayerCall) -> None:
        self.call: LayerCall | None = call
        self.batch = call.batch
        self.written = False
        self.within_backward = torch._C._current_graph_task_id() != -1


class Tape:
    """Layer calls of one step, written by the hooks of a recorder.

    Args:
        retain: How to keep their tensors.
        expect_one_pass: Let go of a layer's input once its output's gradient has been there; another backward pass through the
            same graph is then missed.
        spare: Where the memory of what it keeps comes from and goes to.

    Attributes:
        part: By micro-batch, the rows of the examples that count; all, where there is no entry.
        mean_over: How many examples a mean loss is the mean of; None for those that were recorded. Of W processes that average their
            gradients, each has a loss that counts like the mean of a W-th of all examples.
    """

    mean_over: float | None = None

    def __init__(
        self,
        plan: Plan,
        reduction: Reduction,
        retain: Retention = "exact",
        expect_one_pass: bool = False,
        spare: Spare | None = None,
    ) -> None:
        check_reduction(reduction)
        check_retention(retain)
        self.reduction = reduction
        self.retain: Retention = retain
        self.calls: list[AnyCall] = []
        self.part: dict[int, Tensor] = {}
        self.batch = 0  # the micro-batch that forward passes belong to at the moment
        self.black_box_state: dict[str, BlackBoxState] = {}  # of the black boxes that are running
        self.passes: Counter[str] = Counter()  # backward passes that reached each parameter
        self.versions: dict[str, int] = {}  # of each parameter, when the first of them did
        self.missed_a_pass = False
        self.accounted: set[str] = set()  # parameters of calls that were written
        self.early: EarlyAlignment | None = None
        self._num_settled = 0
        self._owns_parameters = False
        self._one_pass = expect_one_pass
        self._spare = spare or Spare()
        self._is_open = True
        self._sizes: dict[int, int] | None = None
        self._halves = Halves() if retain == "half" else None
        self._waiting: list[_Waiting] = []
        self._plan = plan
        self._trainable = plan.trainable()

    @property
    def parameter_shapes(self) -> Mapping[str, torch.Size]:
        """Of all parameters of the model, by name."""
        return self._plan.shapes

    @property
    def fuses(self) -> bool:
        """Whether layers may form their examples' gradients in their own backward pass; they form those of all examples, there."""
        return self.batch not in self.part

    def note_first(self, parameters: Iterable[Tensor]) -> None:
        """They are used before those of any other recorded layer."""

    def wait_for_gradient(
        self, call: LayerCall, output_index: int = 0, batch_axis: int = 0, form_gradients: bool = False
    ) -> Callable[[Tensor], AnyCall | None]:
        """What writes ``call`` when it is given the gradient of its output; it does nothing once the tape is closed.

        Args:
            form_gradients: Write the examples' gradients at once, also if they are a little larger than x and dout.
        """
        waiting = _Waiting(call)
        self._waiting.append(waiting)
        tape = weakref.ref(self)

        def write(dout: Tensor) -> AnyCall | None:
            open_tape = tape()
            if open_tape is None:
                return None
            if waiting.call is None:
                open_tape.missed_a_pass |= waiting.written and open_tape._is_open
                return None
            open_tape._refuse_mixed_batches(waiting)
            rows = open_tape.part.get(waiting.call.batch)
            if rows is not None and batch_axis == 0 and len(rows) and int(rows[-1]) >= len(dout):
                raise BatchSizeError(
                    f"Example {int(rows[-1])} of the batch is to be rewarded, as was chosen when it was sampled, but the model saw {len(dout)}. Fix: "
                    "with part= below 1, train on the whole batch that was sampled, in its order."
                )
            if rows is not None and waiting.call.taken_from is None and batch_axis == 0:
                waiting.call = waiting.call.only(rows, len(dout))
            part = dout.detach() if waiting.call.taken_from is None else dout.detach()[rows]
            complete = waiting.call.with_gradient(part, output_index, batch_axis)
            written = reduced(complete, open_tape._spare, fused=True) if form_gradients else complete
            open_tape.write(written)
            waiting.written = True
            if open_tape._one_pass:
                waiting.call = None  # its input may be kept in a smaller form now, or not at all
            return written

        return write

    def _refuse_mixed_batches(self, written: _Waiting) -> None:
        """A reentrant checkpoint runs its layers in the backward pass: then it must be the pass of the last micro-batch alone."""
        if not written.within_backward:
            return
        done = {waiting.batch for waiting in self._waiting if waiting.written}
        if any(waiting.batch != written.batch and waiting.batch not in done for waiting in self._waiting):
            raise UnsupportedLayerError(
                "Several micro-batches are differentiated in one backward pass, through a reentrant checkpoint: which of them a layer's call belongs "
                "to cannot be told. Fix: use_reentrant=False, or call backward for each micro-batch."
            )

    def write(self, call: AnyCall) -> None:
        """A call is complete: the gradient of its output has arrived."""
        self.accounted.update(call.parameter_names.values())
        self.calls.append(call)

    def moved_between_passes(self, name: str, parameter: Tensor) -> bool:
        """Whether the parameter, which a backward pass has reached, was changed since the first that did.

        A pass that has nothing to do with the model's calls, of a penalty on its weights, is no part of a step.
        """
        return bool(self.calls) and self.versions.setdefault(name, parameter._version) != parameter._version

    def settle(self) -> None:
        """Bring the calls that were written since the last time into the form that they are kept in.

        It is best done when a layer's backward pass is over, and needs no memory any more.
        """
        for index in range(self._num_settled, len(self.calls)):
            call = self.calls[index]
            kept = reduced(call, self._spare) if isinstance(call, LayerCall) else call
            if self._halves is not None:
                whole, kept = kept, kept.in_half(self._halves)
                if isinstance(whole, ReducedCall):
                    whole.give_back(self._spare)
            self.calls[index] = kept
        self._num_settled = len(self.calls)

    def own_parameters(self) -> None:
        """Copy the parameters that replays will need, before anything changes them."""
        if self._owns_parameters:
            return
        self._owns_parameters = True
        self.calls = [
            call.with_own_parameters() if isinstance(call, LayerCall) and call.rule.visit_layers else call
            for call in self.calls
        ]

    def close(self) -> None:
        """Record nothing more, also of backward passes still to come, and let go of what waited for them."""
        self._is_open = False
        for waiting in self._waiting:
            waiting.call = None
        self._waiting.clear()
        self.settle()
        self.calls = [reduced_box(call) if isinstance(call, LayerCall) else call for call in self.calls]
        if self._halves is not None:
            self._halves.forget()
        self.black_box_state.clear()

    def release(self) -> None:
        """Give back the memory; the tape is empty afterwards."""
        self.calls.clear()
        self._num_settled = 0
        self.close()
        if self.early is not None:
            self.early.forget()
        self.early = self._sizes = None

    @property
    def had_one_pass(self) -> bool:
        """Whether one backward pass, and not several, has formed the gradients of the recorded step."""
        return max(self.passes.values(), default=0) == 1

    @property
    def begun(self) -> bool:
        """Whether a part has been aligned early, and is gone."""
        return self.early is not None and self.early.begun

    def begun_with_other(self, gradients: Direction) -> bool:
        """Whether a part has been aligned early with what are not, or not any more, these gradients."""
        return self.early is not None and self.early.differs_from(gradients)

    def align_early(self) -> EarlyAlignment:
        """Begin to align with the gradients of the next backward pass as they arrive, for one later ``align`` with them all."""
        self._sizes = batch_sizes(self.calls)
        self.early = EarlyAlignment(self.calls, self._spare, self.part)
        return self.early

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
        count = len(contributions_N) if self.mean_over is None else self.mean_over
        return contributions_N * count if self.reduction == "mean" else contributions_N

    def contributions(self, direction: Direction) -> Tensor:
        """What every example contributed to ``<∇L_t, direction>``; their sum is that product."""
        resolved = resolve_direction(direction, self._plan.aliases, self._plan.shapes, self._trainable)
        if self.early is not None and self.early.differs_from(resolved):
            raise UsageError(
                "A part of this tape was aligned with other gradients already and is gone. Fix: align with the gradients that the "
                "backward pass has left, before anything changes them."
            )
        if not self.calls and self._sizes is None:
            raise UsageError(
                "Nothing was recorded. A tape is filled by a forward and a backward pass while it is open, through layers with "
                "trainable parameters that meet the data. Fix: run both inside the `with inloop.capture(model) as tape:` block."
            )
        refuse_unseen_uses(self._trainable & set(self.passes) - self.accounted - self._plan.used_elsewhere)
        sizes = batch_sizes(self.calls) if self._sizes is None else self._sizes
        totals = {} if self.early is None else dict(self.early.sums)
        for part in in_parts(resolved, self._plan.layers()):
            for call in self.calls:
                local = {name: part.get(canonical) for name, canonical in call.parameter_names.items()}
                if any(value is not None for value in local.values()):
                    aligned = of_part(call, call.align(local), self.part)
                    totals[call.batch] = totals[call.batch] + aligned if call.batch in totals else aligned
        device = self.calls[0].device if self.calls else next(iter(totals.values())).device
        return torch.cat(
            [
                totals[batch] if batch in totals else torch.zeros(len(self.part.get(batch, range(size))), device=device)
                for batch, size in sizes.items()
            ]
        )

    def verify(self, gradients: Direction) -> None:
        """Check ``sum_i c_i(p.grad) = ‖p.grad‖²`` for every parameter p; with several processes, for the mean over them.

        Args:
            gradients: The gradients that the recorded backward pass itself has left, by name.

        Raises:
            VerificationError: Naming the first parameter that does not add up.
        """
        resolved = resolve_direction(gradients, self._plan.aliases, self._plan.shapes, self._trainable)
        verify_calls(self.calls, resolved, self._trainable - self._plan.used_elsewhere, self._plan.layers())
