"""StepRecorder opens a tape when a batch is announced and closes it in ``learner.step``. It decides how to record the next step, and whether this one can be used."""

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from inloop.alignment import Direction, Recording, Tape, gradients_of
from inloop.alignment.capture import make_recorder
from inloop.alignment.direction import Compute
from inloop.alignment.early import EarlyAlignment
from inloop.alignment.replay import SegmentFinder
from inloop.alignment.tape import Structure, structure_of
from inloop.distributed import is_distributed, is_sharded, world_size
from inloop.errors import InloopError, UsageError
from inloop.hooks import Hook
from inloop.host import refuse_graph_capture
from inloop.references import Reference
from inloop.refusals import (
    agree,
    are_gone,
    gradient_norm,
    refuse_changed_model,
    refuse_missing_gradients,
    refuse_missing_tape,
    refuse_other_recordings,
    warn_of_late_held_out_loss,
    what_is_not_finite,
)
from inloop.report import is_power_of_two
from inloop.step import Draw

log = logging.getLogger("inloop")


class StepRecorder:
    """Records the steps of a model, one after the other: from the announcement of a batch to ``learner.step``.

    Args:
        may_align_early: Whether the step that waits can be aligned while the next gradient is formed.

    Attributes:
        is_open: Whether a step has begun.
        tape: Of the step that is open; None for a plain step.
        optimizer_stepped: Whether an optimizer has moved the model since the backward pass of the open step.
    """

    def __init__(self, model: nn.Module, record: Recording, needs_tape: bool, may_align_early: bool) -> None:
        self.record = record
        self.is_open = False
        self._is_removed = False
        self.optimizer_stepped = False
        self._abandoned_in_a_row = 0
        self._may_align_at_once = True  # if a step's direction is known before its backward pass
        self.early = EarlyAlignment(may_align_early)
        self._model, self._needs_tape = model, needs_tape
        self._is_sharded = any(map(is_sharded, model.parameters()))
        self._recorder = make_recorder(model, record)
        self._recorder.early = self.early
        self._verified: Counter[str] = Counter()  # how often each kind of step was, with these segments
        self._kinds: dict[Structure, str] = {}
        self._has_new_kind = False
        finds_segments = record.retain != "recompute"
        self._finder = SegmentFinder(model) if finds_segments else None
        self._segments: list[str] | None = None if finds_segments else []  # None: not known yet
        handle = register_optimizer_step_post_hook(_AfterOptimizer(self))
        self._remove = weakref.finalize(self, handle.remove)

    @property
    def tape(self) -> Tape | None:
        return self._recorder.tape

    # ---------------------------------------------------------------- one step

    def open(self, waiting: Tape | None, compute: Compute | None = None, known: Direction | None = None) -> None:
        """A step begins. Its gradient will reward the step that ``waiting`` has recorded, if any.

        Args:
            compute: What that gradient is changed by before the step is aligned with it.
            known: The direction that the new step will be aligned with, if it is known already.
        """
        refuse_graph_capture()
        if self._is_sharded or is_distributed():
            self.early.turn_off()  # gradients are averaged after they have arrived
        self.is_open, self.optimizer_stepped, self._recorder.saw_gradient = True, False, False
        self.early.begin(waiting, compute)
        if self._needs_tape:
            less = self.may_record_less()
            at_once = self._may_align_at_once and not self._is_sharded and less
            self._recorder.start(self.record.reduction, known if at_once else None, magnitudes=not less)

    def expect(self, batch: int, num_examples: int, rows: Tensor | None) -> None:
        """The next passes belong to this micro-batch, of which only the examples ``rows`` are rewarded; None for all."""
        if self.tape is not None:
            self.tape.batch, self.tape.announced = batch, num_examples
            if rows is not None:
                self.tape.part[batch] = rows

    def expect_plain(self) -> None:
        """The next pass is never rewarded, so there is nothing to record."""
        self._recorder.stop()

    def close(self) -> None:
        """Record nothing more of this step."""
        self.is_open = False
        self._recorder.stop()
        self.early.stop()

    def finish(self, draws: list[Draw], reference: Reference) -> "Finished":
        """Close the recording of a step, and refuse what cannot be a training step, as far as that shows without reading a number.

        Args:
            reference: Has the step that this one may judge.
        """
        refuse_graph_capture()
        gradients = gradients_of(self._model)
        tape = self._take_tape(draws, gradients)
        if self.optimizer_stepped and not reference.is_training_data:
            warn_of_late_held_out_loss()
        waiting = None if reference.waiting is None else reference.waiting.tape
        self._abandoned_in_a_row = 0
        problem = self.early.learn_from(tape, waiting, gradients)
        if problem is not None:
            self._may_align_at_once = False
        wants = self._wants_verification(tape)
        return Finished(tape, gradients, gradient_norm(gradients), wants, problem)

    def _take_tape(self, draws: list[Draw], gradients: Direction) -> Tape | None:
        """The tape of the step that is open; None for a plain one."""
        plain = all([draw.plain for draw in draws])
        tape = None if plain else self.tape
        self.close()
        refuse_changed_model(self._recorder.plan, gradients)
        refuse_missing_gradients(tape, gradients)
        if tape is not None:
            refuse_other_recordings(tape, draws)
            tape.mean_over = sum([draw.num_everyone for draw in draws]) / world_size()
        elif self._needs_tape and not plain:
            refuse_missing_tape()
        return tape

    def look(
        self, finished: "Finished", loss: Tensor, norm: Tensor, position: tuple[int, Sequence[Tensor]]
    ) -> tuple[float, str | None]:
        """Look at the numbers of a finished step. Return the loss, a mean over processes, and why the step cannot be used, if so.

        Args:
            loss, norm: Of the step, on the CPU.
            position: The number of the step, and what must be the same in all processes.

        Raises:
            VerificationError: If the recorded examples do not add up to the gradients.
        """
        tape, gradients = finished.tape, finished.gradients
        refuse_missing_gradients(tape, gradients, float(norm))
        agreed = agree(float(loss), float(norm), finished.wants_verification, *position)
        problem = what_is_not_finite(self._model, agreed.loss, gradients, agreed.norm) or finished.problem
        return agreed.loss, problem or self._problem_of(tape, gradients, agreed.verifies)

    def was_abandoned(self) -> bool:
        """Whether the gradients of the open step were used by an optimizer, or cleared, without ``learner.step``; warns of it.

        Several processes might see it differently (and accumulated gradients of sharded parameters cannot be seen): there
        ``skip`` must be called.
        """
        if not self.is_open or not self._recorder.saw_gradient or is_distributed():
            return False
        if not self.optimizer_stepped and not are_gone(self.tape, gradients_of(self._model)):
            return False
        self._abandoned_in_a_row += 1
        repeated = self._abandoned_in_a_row > 1 and is_power_of_two(self._abandoned_in_a_row)
        log.log(
            logging.WARNING
            if repeated
            else logging.INFO,  # one batch may be given up; a second in a row has its reason
            "inloop: gradients were cleared, or used by the optimizer, without learner.step (%d time(s) in a row); their draws are "
            "dropped. Fix: call learner.step(loss) after loss.backward(), before the optimizer",
            self._abandoned_in_a_row,
        )
        self.early.turn_off()  # the next such pass costs no rewards
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes in this block leave no trace."""
        is_open, self.is_open = self.is_open, False
        try:
            with self._recorder.paused():
                yield
        finally:
            self.is_open = is_open and not self._is_removed

    # ---------------------------------------------------------------- can it be relied on

    def _wants_verification(self, tape: Tape | None) -> bool:
        """Whether the examples of this step are to be added up."""
        if tape is None:
            return False
        when = self.record.verify
        is_new = when == "first" and self._verified[self._kind_of(tape)] < 2
        self._has_new_kind |= is_new and not tape.magnitudes
        if tape.part or tape.known is not None:
            self._has_new_kind |= is_new  # what is left of it cannot be added up; the next step is recorded whole
            return False
        return when is True or is_new or self._has_untried_segments()

    def _kind_of(self, tape: Tape) -> str:
        """A digest of which layers were called how often: the same in another process, for the state."""
        structure = structure_of(tape.seen)
        if structure not in self._kinds:
            self._kinds[structure] = hashlib.sha256(repr(sorted(structure)).encode()).hexdigest()[:16]
        return self._kinds[structure]

    def _problem_of(self, tape: Tape | None, gradients: Direction, verify: bool) -> str | None:
        """Return the reason to drop this step, or None. Also choose how to record the next step."""
        if tape is None:
            return None
        if verify and (problem := self._verify(tape, gradients)):
            return problem
        if self._finder is not None:
            self._record_segments(self._finder.segments(tape))
        return None

    def may_record_less(self) -> bool:
        """Whether steps need not be recorded whole any more, to be verified or to find out which modules are checkpointed."""
        when = self.record.verify
        verified = when is False or (when == "first" and self._verified.total() >= 2 and not self._has_new_kind)
        return self._segments is not None and not self._has_untried_segments() and verified

    def _verify(self, tape: Tape, gradients: Direction) -> str | None:
        """Check the tape. If checkpointed modules cannot be run again as a whole, they are not tried again, and this says so."""
        try:
            tape.verify(gradients)
        except (InloopError, RuntimeError) as error:
            if not self._segments:
                raise
            self._record_segments([])
            return (
                f"the checkpointed modules cannot be run again as a whole ({str(error).splitlines()[0]}); from now on each of their layers is "
                "recorded, which takes more memory"
            )
        if tape.magnitudes:
            self._verified[self._kind_of(tape)] += 1
            self._has_new_kind = False
        return None

    def _has_untried_segments(self) -> bool:
        return bool(self._segments) and not self._verified

    def _record_segments(self, segments: list[str]) -> None:
        """From here on, keep of checkpointed modules no more than their checkpoints do."""
        if self._finder is not None:
            self._finder.remove()
        self._finder = None
        if segments != (self._segments or []):
            self._verified.clear()
            self._recorder.remove()
            self._recorder = make_recorder(self._model, self.record, segments)
            self._recorder.early = self.early
        self._segments = segments

    # ---------------------------------------------------------------- lifetime and state

    def remove(self) -> None:
        """Take all hooks off the model."""
        self._is_removed = True
        self.close()
        self._recorder.remove()
        if self._finder is not None:
            self._finder.remove()
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self._digest_of_model(),
            "segments": self._segments,
            "verified": dict(self._verified),
            "has_new_kind": self._has_new_kind,
            "early": self.early.state,
            "may_align_at_once": self._may_align_at_once,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["model"] != self._digest_of_model():
            raise UsageError(
                "The state is of a learner of another model, whose parameters have other names or shapes. Fix: make the model as it was; or keep the "
                "shares alone, with policy.load_state_dict(state['policy'])."
            )
        segments = state["segments"]
        if unknown := set(segments or ()) - {name for name, _ in self._model.named_modules()}:
            raise UsageError(f"The state is of a model with a module '{min(unknown)}', which this one has not.")
        self.close()
        if self.early.state != "off":
            self.early.state = state["early"]
        self._may_align_at_once = state["may_align_at_once"]
        if segments is not None:
            self._record_segments(list(segments))
        self._verified, self._has_new_kind = Counter(state["verified"]), state["has_new_kind"]

    def _digest_of_model(self) -> str:
        """A digest of the names and shapes of the parameters."""
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self._model.named_parameters()]
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]

    def optimizer_has_stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer, of this model or of another, has done a step; fused ones do not raise the versions of tensors."""
        if not self.is_open or not self._recorder.saw_gradient:
            return
        own = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self.optimizer_stepped = True


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was trained on.

    Attributes:
        tape: What was recorded of it; None for a plain step.
        gradients, norm: What it has left, where they are.
        wants_verification: Whether its examples are to be added up.
        problem: Why it cannot be used, nor judge another; None if nothing shows so far.
    """

    tape: Tape | None
    gradients: Direction
    norm: Tensor
    wants_verification: bool
    problem: str | None

    @property
    def must_be_looked_at(self) -> bool:
        """Whether its numbers decide what is done with it, before anything is aligned."""
        return self.wants_verification or self.problem is not None or is_distributed()


class _AfterOptimizer(Hook[StepRecorder]):
    """Torch calls it after every step of any optimizer."""

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self.owner()
        if recorder is not None:
            recorder.optimizer_has_stepped(optimizer)
