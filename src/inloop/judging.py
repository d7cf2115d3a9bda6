"""Judging picks the step to reward and its direction. The reference gives the direction; a gradient is multiplied by Pᵀ.

    r_i = <∇l_i(θ_t), Pᵀ g_ref>          P = -∂(θ_{t+1} - θ_t) / ∂g_t, the identity without an optimizer

A trail, a displacement of the parameters, is not multiplied: it has the optimizer in it already.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from inloop.alignment import Direction, Tape
from inloop.alignment.direction import Compute, Computed
from inloop.errors import UsageError
from inloop.optimizers import StepDerivative, as_derivative
from inloop.references import Reference
from inloop.step import Judge, Step

NOT_TAKEN = (
    "the learner's optimizer has not stepped since the last learner.step, so the step before had no effect (is optimizer= the one that your loop "
    "steps?)"
)


class Judging:
    """A reference, and the derivative of the optimizer's steps if the learner knows its optimizer."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.derivative: StepDerivative | None = None
        self._known: Direction | None = None  # the direction that judges the open step, if it is known already

    def use_optimizer(self, model: nn.Module, optimizer: object) -> None:
        """Reward the steps of this optimizer from here on; None for none."""
        derivative = as_derivative(model, optimizer)
        if self.derivative is not None:
            self.derivative.detach()
        if derivative is not None:
            derivative.attach()
        self.derivative = derivative

    def refuse_unknown(self, gradients: Direction) -> None:
        """Raise if a parameter has a gradient, and no optimizer of the learner holds it."""
        if self.derivative is not None:
            self.derivative.refuse_unknown([name for name, g in gradients.items() if g is not None])

    @property
    def waiting(self) -> Tape | None:
        """The tape of the step that waits for its judge."""
        return None if self.reference.waiting is None else self.reference.waiting.tape

    @property
    def _applied(self) -> StepDerivative | None:
        return self.derivative if self.reference.is_gradient else None

    @property
    def of_last_step(self) -> Compute | None:
        """The function that turns the judge's gradient g into Pᵀ g for the waiting step; None for the identity."""
        return None if self._applied is None else self._applied.of_last_step

    def open(self) -> Direction | None:
        """Begin a step. Returns the direction that judges it, if that is known before its backward pass."""
        known = self.reference.known_direction()
        if known is not None and self._applied is not None:
            known = Computed(known, self._applied.of_next_step)
        self._known = known
        return known

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge, str | None]:
        """The step that can be rewarded now, its judge, and why the step that waited was dropped, if it was."""
        problem = self._drop_step_not_taken()
        step, judge = self.reference.match(current, now)
        known, self._known = self._known, None
        if step is current and known is not None:
            judge = replace(judge, direction=known)
        elif self._applied is not None:
            compute = self._applied.of_next_step if step is current else self._applied.of_last_step
            judge = judge.changed_by(compute)
        return step, judge, problem

    def _drop_step_not_taken(self) -> str | None:
        """Drop the step that waits if the optimizer skipped it: it had no effect to judge."""
        if self.derivative is None or self.derivative.has_stepped or self.reference.waiting is None:
            return None
        self.reference.drop()
        return NOT_TAKEN

    def drop(self) -> None:
        """Drop the step that waits, and the judge of the open step."""
        self.reference.drop()
        self._known = None

    def end_step(self) -> None:
        """The step is over; the optimizer has not moved the parameters yet."""
        self.reference.end_step()
        if self.derivative is not None:
            self.derivative.mark()

    def state_dict(self) -> dict[str, Any]:
        optimizer = None if self.derivative is None else self.derivative.state_dict()
        kind = type(self.reference).__name__
        return {"kind": kind, "reference": self.reference.state_dict(), "optimizer": optimizer}

    def refuse_other_state(self, state: dict[str, Any]) -> None:
        """Raise if the state is of a learner with another kind of reference, or only one of the two knows its optimizer."""
        if state["kind"] != type(self.reference).__name__:
            raise UsageError(
                f"The state is of a learner with the reference {state['kind']}; this one has {type(self.reference).__name__}. Fix: make it alike."
            )
        if (state["optimizer"] is None) != (self.derivative is None):
            had, has = ("without", "has") if state["optimizer"] is None else ("with", "has not")
            raise UsageError(f"The state is of a learner {had} optimizer=, which this one {has}. Fix: make it alike.")
        if self.derivative is not None:
            self.derivative.refuse_other_state(state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reference.load_state_dict(state["reference"])
        if self.derivative is not None:
            self.derivative.load_state_dict(state["optimizer"])
