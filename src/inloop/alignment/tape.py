"""A tape: the recorded calls of one training step, to align with a direction.

    c_i = sum over calls of <dout_i, J_θ f(x; θ_t)[g]_i>          the contribution of example i to <∇L_t, g>
    r_i = N c_i for a mean loss, c_i for a sum                     the paper's reward, <∇l_i, g>

N is the number of examples of the whole step, over all its micro-batches.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from inloop.alignment import sizes
from inloop.alignment.black_box import BeforeCall
from inloop.alignment.call import LayerCall, Recorded
from inloop.alignment.direction import Compute, Computed, Direction, in_parts, resolve_direction, values_of
from inloop.alignment.groups import Group, groups_of
from inloop.alignment.kept import Halves, Kept
from inloop.alignment.plan import Plan
from inloop.alignment.sums import Sums
from inloop.alignment.verify import refuse_unseen_uses, verify_calls
from inloop.errors import BatchSizeError, OverwrittenTensorError, UnsupportedLayerError, UsageError
from inloop.host import current_stream, refuse_graph_capture, to_device

Reduction = Literal["mean", "sum"]
Retention = Literal["exact", "half", "recompute"]


class Waiting:
    """A call that waits for its gradient. The graph holds this, not the call: a user may hold the graph for long."""

    __slots__ = ("_tape", "batch", "call", "fused", "within_backward", "written")

    def __init__(self, tape: "Tape", call: Recorded, fused: bool) -> None:
        self._tape = weakref.ref(tape)
        self.call: Recorded | None = call
        self.fused = fused
        self.batch = call.batch
        self.written = False
        self.within_backward = torch._C._current_graph_task_id() != -1

    def write(self, dout: Tensor) -> Kept | None:
        """Write the call with the gradient of its output. Return its form; None if the tape has released the call."""
        tape = self._tape()
        return None if tape is None else tape.complete(self, dout)


class Tape:
    """The calls of one step, written by the hooks of a recorder.

    Args:
        retain: How to keep their tensors.
        expect_one_pass: Release a layer's input once the gradient of its output has arrived. The tape then misses
            another backward pass through the same graph, and notes that it did.
        known: The direction to align the step with, if it is known before the backward pass. The tape then aligns and
            releases each call when the gradient of its output arrives.

    Attributes:
        part: The rows of the rewarded examples, by micro-batch; all, where there is no entry.
        mean_over: How many examples a mean loss averages; None for the recorded ones. If W processes average their
            gradients, the loss of each counts like the mean of a W-th of all examples.
        magnitudes: Whether calls keep the magnitudes that verifying needs where gradients cancel within an example.
        reached: How many backward passes reached each parameter.
        missed_a_pass: Whether a call received another gradient after its input was released.
        lost_gradients: Whether gradients were cleared between two backward passes.
        stream: On which the tape was closed, so that all it has kept is there; None on a CPU.
    """

    stream: torch.Stream | None = None
    mean_over: float | None = None
    first_parameters: list[Tensor] | None = None  # those that the data meets first, for replay.py

    def __init__(
        self,
        plan: Plan,
        reduction: Reduction,
        retain: Retention = "exact",
        expect_one_pass: bool = False,
        known: Direction | None = None,
        magnitudes: bool = True,
    ) -> None:
        self.reduction = reduction
        self.magnitudes = magnitudes
        self.calls: list[Kept] = []
        self.part: dict[int, Tensor] = {}
        self._part_on: dict[tuple[int, torch.device], Tensor] = {}
        self.batch = 0  # the micro-batch of forward passes now
        self.announced: int | None = None  # how many examples that has, if it is known
        self.given: dict[int, int] = {}  # how many examples the model was given, by micro-batch, where that is known
        self.running: dict[str, BeforeCall] = {}  # black boxes whose forward pass is running
        self.reached: Counter[str] = Counter()
        self.missed_a_pass = False
        self.lost_gradients = False
        self._first_gradient: tuple[str, Tensor] | None = None
        self.accounted: set[str] = set()  # parameters of written calls
        self.plan = plan
        self.known = known
        self._one_pass = expect_one_pass or known is not None
        self._shapes: list[Kept] = []  # of calls that were aligned at once
        self._is_open = True
        self._halves = Halves() if retain == "half" else None
        self._waiting: list[Waiting] = []
        # Calls aligned ahead leave the list. Keep their contributions, and the gradients that they were aligned with.
        self._sums: dict[int, Sums] = {}
        self._ready = Group(plan.sizes)  # calls to align with the known direction
        self._sizes: dict[int, int] | None = None
        self._aligned_with: dict[str, tuple[int, int]] = {}
        self._bytes = plan.nbytes  # of the parameters, and of all calls that were written

    # ---------------------------------------------------------------- writing

    @property
    def fuses(self) -> bool:
        """Whether layers may form per-example gradients in their backward pass, which does so for all examples."""
        return self.batch not in self.part

    def wait_for_gradient(self, call: Recorded, fused: bool = False) -> Waiting:
        """Write ``call`` when the gradient of its output arrives, unless the tape is closed by then.

        Args:
            fused: Form the per-example gradients at once, even if they are a little larger than x and dout.
        """
        if not self._waiting:
            refuse_graph_capture()
        waiting = Waiting(self, call, fused)
        self._waiting.append(waiting)
        return waiting

    def complete(self, waiting: Waiting, dout: Tensor) -> Kept | None:
        """Write a call, in the form to keep, now that the gradient of its output has arrived."""
        call = waiting.call
        if call is None:
            self.missed_a_pass |= waiting.written and self._is_open
            return None
        if waiting.within_backward:
            self._refuse_mixed_batches(waiting)
        dout = dout.detach()
        if self.part and isinstance(call, LayerCall):
            call, dout = self._rows_to_keep(call, dout)
        complete: Kept = call.with_gradient(dout)
        if isinstance(complete, LayerCall):
            complete = self.form(complete, waiting.fused)
        if self.known is None or complete.needs_backward:
            self.write(complete if self._halves is None else complete.map(self._halves))
        else:
            self.accounted.update(complete.parameter_names.values())
            if self._ready.add(complete):
                self._align_ready()
        waiting.written = True
        waiting.call = None if self._one_pass else call
        return complete

    def form(self, call: LayerCall, fused: bool) -> Kept:
        """Return the form to keep of a complete call: the smaller of x and dout, and the per-example gradients."""
        form = call.rule.per_example
        return form.form(call, self.magnitudes) if form is not None and form.is_worthwhile(call, fused) else call

    def write(self, call: Kept) -> None:
        self.calls.append(call)
        self._bytes += call.nbytes
        self.accounted.update(call.parameter_names.values())

    def _rows_to_keep(self, call: LayerCall, dout: Tensor) -> tuple[LayerCall, Tensor]:
        """Return the call and the gradient of the rewarded examples, if their rows can be taken out."""
        rows = self.part.get(call.batch)
        if rows is None or call.batch_axis:
            return call, dout
        if call.taken_from is None and len(rows) and int(rows[-1]) >= len(dout):
            raise BatchSizeError(
                f"Example {int(rows[-1])} of the batch is to be rewarded, as was chosen when it was sampled, but the model saw {len(dout)}. "
                "Fix: with part= below 1, train on the whole batch that was sampled, in its order."
            )
        rows = self._rows_on(call.batch, dout.device)
        call = call.only(rows, len(dout))
        return call, dout if call.taken_from is None else dout[rows]

    def _rows_on(self, batch: int, device: torch.device) -> Tensor:
        """Return the rewarded rows of a micro-batch on a device; they are copied once."""
        key = batch, device
        if key not in self._part_on:
            self._part_on[key] = to_device(self.part[batch], device)
        return self._part_on[key]

    def _refuse_mixed_batches(self, written: Waiting) -> None:
        """Raise if a reentrant checkpoint, which runs layers in the backward pass, sees several micro-batches."""
        done = {waiting.batch for waiting in self._waiting if waiting.written}
        if any(waiting.batch != written.batch and waiting.batch not in done for waiting in self._waiting):
            raise UnsupportedLayerError(
                "Several micro-batches are differentiated in one backward pass, through a reentrant checkpoint: which of them a layer's call belongs "
                "to is unknown. Fix: use_reentrant=False, or call backward for each micro-batch."
            )

    def note_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Note that a backward pass reached a parameter. A second one adds to its gradient, unless it was cleared."""
        self.reached[name] = self.reached.get(name, 0) + 1
        if gradient is None:
            return
        if self._first_gradient is None:
            self._first_gradient = name, gradient
        elif self._first_gradient[0] == name:
            self.lost_gradients |= self._first_gradient[1] is not gradient

    def own_parameters(self) -> None:
        """Copy the parameters that running again will need, before anything changes them."""
        self.calls = [call.own_parameters() for call in self.calls]

    def close(self) -> None:
        """Record nothing more, also of backward passes still to come, and release the waiting calls."""
        self._align_ready()
        if self._is_open and self.calls:
            self.stream = current_stream(self.calls[0].device)
        self._is_open = False
        for waiting in self._waiting:
            waiting.call = None
        self._waiting.clear()
        self._first_gradient = None
        self.running.clear()
        if self._halves is not None:
            self._halves.clear()

    def release(self) -> None:
        """Free the memory; the tape is empty afterwards."""
        self.calls.clear()
        self._ready.take()
        self._sums.clear()
        self._shapes.clear()
        self._aligned_with.clear()
        self.known = None
        self.close()

    # ---------------------------------------------------------------- reading

    def align(self, direction: Direction) -> Tensor:
        """Return the reward of every example, ``r_i = <∇l_i(θ_t), direction>``, shape [N].

        Args:
            direction: A tensor for every trainable parameter by its name in the model, as in
                ``{name: p.grad for name, p in model.named_parameters()}``. None is zero. A tied one may have any name.

        Raises:
            DirectionError: If an entry is missing, unknown or of another shape.
            UsageError: If nothing was recorded, or a part is released already, aligned with another direction.
            OverwrittenTensorError: If a recorded tensor has changed in place since.
        """
        contributions_N = self.contributions(direction)
        count = len(contributions_N) if self.mean_over is None else self.mean_over
        return contributions_N * count if self.reduction == "mean" else contributions_N

    def align_batch(self, batch: int, direction: Direction) -> Tensor:
        """Return the rewards of one micro-batch's examples alone."""
        contributions_N = self.contributions(direction, batch)
        count = sum(self.batch_sizes().values()) if self.mean_over is None else self.mean_over
        return contributions_N * count if self.reduction == "mean" else contributions_N

    def contributions(self, direction: Direction, only_batch: int | None = None) -> Tensor:
        """Return the contribution of every example to ``<∇L_t, direction>``; they add up to that product.

        Args:
            only_batch: The micro-batch whose examples are wanted; None for all.
        """
        plan = self.plan
        trainable = plan.trainable()
        resolved = resolve_direction(direction, plan.aliases, plan.shapes, trainable)
        if self.differs_from(resolved) or (self._shapes and direction is not self.known):
            raise UsageError(
                "A part of this tape was aligned with other gradients already and is gone. Fix: align with the gradients that the "
                "backward pass has left, before anything changes them."
            )
        if not self.calls and not self._aligned_with and not self._shapes:
            raise UsageError(
                "Nothing was recorded. A tape is filled by a forward and a backward pass while it is open, through layers with "
                "trainable parameters that meet the data. Fix: run both inside the `with inloop.capture(model) as tape:` block."
            )
        if unseen := (trainable & self.reached.keys()) - self.accounted - plan.used_elsewhere:
            refuse_unseen_uses(unseen)
        wanted = {batch: size for batch, size in self.batch_sizes().items() if only_batch in (None, batch)}
        sums = {batch: each.copy() for batch, each in self._sums.items() if batch in wanted}
        calls = [call for call in self.calls if call.batch in wanted]
        for some in in_parts(resolved, plan):
            for group in [calls] if calls and self.is_one_group else groups_of(calls, plan.sizes):
                self._add(sums, group, some)
        totals = {batch: each.total() for batch, each in sums.items()}
        if len(wanted) == 1 and len(totals) == 1:
            return next(iter(totals.values()))
        device = next(iter(totals.values())).device if totals else self.calls[0].device
        return torch.cat(
            [
                totals[batch] if batch in totals else torch.zeros(len(self.part.get(batch, range(size))), device=device)
                for batch, size in wanted.items()
            ]
        )

    @torch.no_grad()
    def _add(
        self, sums: dict[int, Sums], calls: Sequence[Kept], direction: Direction, may_fail: bool = False
    ) -> list[Kept]:
        """Add calls' contributions, of the rewarded examples, to those of their micro-batches.

        Args:
            may_fail: Leave out calls of which a tensor has changed since.

        Returns:
            The calls that were added.
        """
        along = values_of(direction, dict.fromkeys(name for call in calls for name in call.parameter_names.values()))
        added = []
        for call in calls:
            local = {name: along.get(canonical) for name, canonical in call.parameter_names.items()}
            if all([value is None for value in local.values()]):
                continue
            into = sums.setdefault(call.batch, Sums())
            try:
                if call.batch in self.part and call.num_examples == call.num_recorded:
                    aligned = call.align(local)
                    into.add(aligned[self._rows_on(call.batch, aligned.device)])
                else:
                    call.add_to(into, local)
            except OverwrittenTensorError:
                if not may_fail:
                    raise
            else:
                added.append(call)
        for into in sums.values():
            into.flush()
        return added

    def batch_sizes(self) -> dict[int, int]:
        """Return the number of examples of each micro-batch, in order."""
        if self._sizes is not None:
            return self._sizes
        sizes = batch_sizes(self.seen)
        if not self._is_open:
            self._sizes = sizes  # no more calls come, and calls aligned ahead leave
        return sizes

    def refuse_other_number(self) -> None:
        """Raise if the model was given more examples than its layers saw in one call, and called them as often as it takes."""
        for batch, size in self.batch_sizes().items():
            given = self.given.get(batch, size)
            if given <= size:
                continue
            calls = Counter(call.name for call in self.seen if call.batch == batch)
            if max(calls.values()) * size == given:
                raise BatchSizeError(
                    f"The model was given {given} examples, and its layers saw {size} at a time: they pass through it one after the other, and "
                    "cannot be told apart. Fix: give the layers the whole batch at once."
                )

    def verify(self, gradients: Direction) -> None:
        """Check ``sum_i c_i(p.grad) = ‖p.grad‖²`` for every parameter p; in several processes, for their mean.

        Args:
            gradients: The gradients that the recorded backward pass itself left, by name.

        Raises:
            VerificationError: If a parameter does not add up; it names the first.
        """
        plan = self.plan
        trainable = plan.trainable()
        resolved = resolve_direction(gradients, plan.aliases, plan.shapes, trainable)
        verify_calls(self.calls, resolved, trainable - plan.used_elsewhere, plan, only_large=not self.magnitudes)

    # ---------------------------------------------------------------- aligning ahead (early.py says when)

    def align_early(self, calls: Sequence[Kept], gradients: Direction, compute: Compute | None = None) -> None:
        """Align calls with final gradients, changed by ``compute`` if given, and release them.

        Calls of which a tensor has changed stay: that is an error when the tape is aligned, outside of the user's backward pass.
        """
        self.batch_sizes()
        direction = gradients if compute is None else Computed(gradients, compute)
        aligned = {id(call) for call in self._add(self._sums, calls, direction, may_fail=True)}
        self.calls = [call for call in self.calls if id(call) not in aligned]
        for name in dict.fromkeys(name for call in calls for name in call.parameter_names.values()):
            gradient = gradients[name]
            assert gradient is not None
            # Its address and version reveal a second backward pass or a change in place.
            self._aligned_with[name] = gradient.data_ptr(), gradient._version

    def _align_ready(self) -> None:
        """Align calls with the known direction, and keep only their shapes.

        Those that cannot be aligned are kept whole: they are refused when the tape is aligned, outside of the user's backward pass.
        """
        calls = self._ready.take()
        if not calls:
            return
        assert self.known is not None
        sizes = {call.batch: call.num_recorded for call in reversed(self._shapes + calls)}
        fitting = [call for call in calls if call.num_recorded == sizes[call.batch]]
        aligned = {id(call) for call in self._add(self._sums, fitting, self.known, may_fail=True)}
        for call in calls:
            if id(call) in aligned:
                self._shapes.append(call.map(_without_values))
            else:
                self.calls.append(call)

    def is_zero(self) -> bool:
        """Whether no example contributes along the direction of all ones (with calls aligned at once: along theirs)."""
        if self._shapes:
            return not any(bool(sums.total().any()) for sums in self._sums.values())
        if not self.calls:
            return False
        shapes = {name: self.plan.shapes[name] for name in self.plan.trainable()}
        device = self.calls[0].device
        return not self.contributions({name: torch.ones(shape, device=device) for name, shape in shapes.items()}).any()

    @property
    def seen(self) -> list[Kept]:
        """The recorded calls; of those aligned at once, only the shapes."""
        return self.calls + self._shapes if self._shapes else self.calls

    @property
    def begun(self) -> bool:
        """Whether a call was aligned ahead, so that its tensors are released."""
        return bool(self._aligned_with)

    @property
    def is_one_group(self) -> bool:
        """Whether the tape is too small to be aligned in several groups."""
        return not self.calls or self._bytes <= sizes.of_device(sizes.GROUP, self.calls[0].device)

    def differs_from(self, direction: Direction) -> bool:
        """Whether ``direction`` is not, or no longer, the gradients that calls were aligned with ahead."""
        raw = direction.raw if isinstance(direction, Computed) else direction
        for name, then in self._aligned_with.items():
            value = raw.get(name)
            if value is None or (value.data_ptr(), value._version) != then:
                return True
        return False


def _without_values(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if tensor.is_floating_point() else tensor


# ---------------------------------------------------------------- how many examples

Structure = frozenset[tuple[tuple[int, str, int], int]]

_SHARED = (
    "Fix: what all examples share (positions) needs a batch axis of its own, as in positions.expand(N, -1), so that each "
    "example has a part of its own in the gradient."
)
_REASONS_FOR_OTHER_ROWS = """Fix: see which of the usual reasons it is.
  - all examples share it (positions): give it a batch axis of its own, as in positions.expand(N, -1)
  - it is given some of the examples, or of their rows (experts, early exits, masked tokens): give it all of them, and multiply by a mask
  - examples are folded with positions: keep examples on the first axis
  - its rows are those of a packed sequence or a graph: give it a padded batch, [N, rows, ...]"""


def structure_of(calls: Sequence[Kept]) -> Structure:
    """Return how often each layer was called in each micro-batch; another structure is another kind of step."""
    return frozenset(Counter([(call.batch, call.name, call.output_index) for call in calls]).items())


def batch_sizes(calls: Sequence[Kept]) -> dict[int, int]:
    """Return the number of examples of each micro-batch, in order.

    Raises:
        BatchSizeError: If the layers of one micro-batch disagree, or if one computes an output that examples share.
        UnsupportedLayerError: If a layer's output belongs to no example.
    """
    sizes: dict[int, int] = {}
    for call in calls:
        if isinstance(call, Recorded) and len(call.dout.shape) <= call.batch_axis:
            raise UnsupportedLayerError(
                f"'{call.name}' ({type(call.layer).__name__}) returned a scalar that reaches the loss; no part of it "
                "belongs to one example. Fix: return a value for each example and average outside, or leave it out with layers=."
            )
        num_examples = call.num_recorded
        if sizes.setdefault(call.batch, num_examples) != num_examples:
            known = next(other for other in calls if other.batch == call.batch)
            raise BatchSizeError(_disagreement(call, known))
        length = call.consecutive_ids if isinstance(call, LayerCall) and isinstance(call.layer, nn.Embedding) else 0
        if length and any(other.num_positions == length for other in calls):
            raise BatchSizeError(
                f"Layer '{call.name}' (Embedding) was given {call.num_examples} consecutive positions, as many as there are "
                f"examples, and its output looks shared by all of them. {_SHARED}"
            )
    return sizes if len(sizes) < 2 else dict(sorted(sizes.items()))


def _disagreement(call: Kept, known: Kept) -> str:
    if call.name == known.name:
        return (
            f"Layer '{call.name}' was called with {known.num_recorded} and with {call.num_recorded} examples in one micro-batch. "
            "Fix: record one pass at a time. With a learner, call learner.sample(n) before each micro-batch; put passes that do not train the model "
            "into learner.paused(); and back-propagate a loss on other examples after learner.step."
        )
    return (
        f"Layer '{call.name}' saw {call.num_recorded} rows, layer '{known.name}' {known.num_recorded}. The first axis of every "
        f"layer's output must count the examples. {_REASONS_FOR_OTHER_ROWS}\nOr leave the layer out: layers=lambda name, module: name != '{call.name}'."
    )
