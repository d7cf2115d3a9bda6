"""The tapes of a learner's steps: what is recorded of a model, in which form, and whether it can be relied on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from inloop.alignment import Direction, Tape, gradients_of
from inloop.alignment.early import EarlyAlignment
from inloop.alignment.recorder import Recorder
from inloop.alignment.segments import RunAgain
from inloop.alignment.tape import Reduction
from inloop.distributed import is_distributed, is_sharded
from inloop.errors import InloopError, UsageError
from inloop.step_checks import Verifier, has_moved, is_cleared

CHANGED_GRADIENTS = (
    "the gradients changed after the step's first backward pass (by another one, or by scaling or clipping), in which recorded "
    "tensors were let go of; from now on they are kept until learner.step, which takes more memory"
)


class Recording:
    """Records the steps of a model, one after the other.

    Args:
        make_recorder: Makes a recorder for the model; takes ``segments=``, modules to be recorded as a whole.
        finds_segments: Whether to look, in the first step, for modules that activation checkpointing runs again.

    Attributes:
        one_pass: Whether every step had one backward pass (None: not known yet). Then much can be let go of in passing, if the gradients
            that it leaves are final: with other processes they may still have to be averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        make_recorder: Callable[..., Recorder],
        reduction: Reduction,
        verifier: Verifier,
        finds_segments: bool,
    ) -> None:
        self.one_pass: bool | None = None
        self.recorder = make_recorder()
        self._model, self._make_recorder, self._reduction, self._verifier = model, make_recorder, reduction, verifier
        self._run_again = RunAgain(model) if finds_segments else None
        self._segments: list[str] | None = None if finds_segments else []  # None: not known yet
        self._num_verified = 0  # steps, with these

    @property
    def tape(self) -> Tape | None:
        return self.recorder.tape

    def begin(self) -> None:
        """Record a new step."""
        if self.one_pass is not False and (is_distributed() or any(map(is_sharded, self._model.parameters()))):
            self.one_pass = False
        self.recorder.start(self._reduction, expect_one_pass=self.one_pass is True)

    def expect(self, batch: int, rows: Tensor | None) -> None:
        """What is recorded next belongs to this micro-batch, of which only the examples ``rows`` count; None for all."""
        if self.tape is not None:
            self.tape.batch = batch
            if rows is not None:
                self.tape.part[batch] = rows

    def pay_early(self, early: EarlyAlignment | None) -> None:
        """Let an older tape be aligned with the gradients of the next backward pass, while they are formed."""
        self.recorder.early = early

    def end(self) -> None:
        """Record nothing more of this step."""
        self.recorder.stop()
        self.recorder.early = None

    def was_abandoned(self) -> bool:
        """Whether a backward pass was recorded whose gradients were then cleared, or used by an optimizer, without a step.

        Several processes might see it differently (and accumulated gradients of sharded parameters cannot be seen): there
        ``skip`` must be called.
        """
        tape = None if is_distributed() else self.tape
        if tape is None or not tape.calls:
            return self.recorder.gave_up
        return has_moved(self._model, tape) or is_cleared(gradients_of(self._model))

    # ---------------------------------------------------------------- can it be relied on

    def wants_verification(self, tape: Tape | None) -> bool:
        return self._verifier.wants(tape) or (tape is not None and self._has_untried_segments())

    def what_is_wrong(self, tape: Tape, gradients: Direction, verify: bool) -> str | None:
        """Why a step cannot be used, though nothing of it is an error; None if it can. Learns from it how to record the next.

        Raises:
            VerificationError: If the recorded examples do not add up to the gradients.
        """
        if tape.missed_a_pass:
            self.one_pass = False
            return CHANGED_GRADIENTS
        self.one_pass = self.one_pass is not False and tape.had_one_pass
        if verify and (problem := self._verify(tape, gradients)):
            return problem
        if self._run_again is not None:
            self._record_segments(self._run_again.segments(tape))
        return None

    def may_record_less(self) -> bool:
        """Whether steps need not be recorded whole any more, to be verified or to find out what is checkpointed."""
        known = self._segments is not None and not self._has_untried_segments()
        return known and self._verifier.is_done(self._num_verified)

    def _verify(self, tape: Tape, gradients: Direction) -> str | None:
        """Check the tape. If checkpointed modules cannot be run again as a whole, they are not tried again, and this says so."""
        try:
            self._verifier.check(tape, gradients)
        except (InloopError, RuntimeError) as error:
            if not self._segments:
                raise
            self._record_segments([])
            return (
                f"the checkpointed modules cannot be run again as a whole ({str(error).splitlines()[0]}); from now on each of their layers is "
                "recorded, which takes more memory"
            )
        self._num_verified += 1
        return None

    def _has_untried_segments(self) -> bool:
        return bool(self._segments) and self._num_verified == 0

    def _record_segments(self, segments: Sequence[str]) -> None:
        """From here on, keep of checkpointed modules no more than their checkpoints do."""
        if self._run_again is not None:
            self._run_again.remove()
        self._run_again = None
        if list(segments) != (self._segments or []):
            self._num_verified = 0
            self.recorder.remove()
            self.recorder = self._make_recorder(segments=segments)
        self._segments = list(segments)

    # ---------------------------------------------------------------- lifetime and state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes in this block leave no trace."""
        recorder = self.recorder
        tape, early = recorder.tape, recorder.early
        recorder.tape = recorder.early = None
        try:
            yield
        finally:
            recorder.tape, recorder.early = tape, early

    def close(self) -> None:
        """Take all hooks off the model."""
        self.recorder.remove()
        if self._run_again is not None:
            self._run_again.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"segments": self._segments, "num_verified": self._num_verified}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["segments"] is None:
            return
        if unknown := set(state["segments"]) - {name for name, _ in self._model.named_modules()}:
            raise UsageError(f"The state is of a model with a module '{min(unknown)}', which this one has not.")
        self._record_segments(state["segments"])
        self._num_verified = state["num_verified"]
