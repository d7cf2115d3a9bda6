"""What was drawn for a step, kept until the step is paid."""

import copy
from dataclasses import dataclass
from typing import Any

from inloop.alignment import Direction
from inloop.alignment.plan import Plan
from inloop.alignment.saved_tape import restore_tape, tape_state
from inloop.policies import Actions, Policy, count_actions
from inloop.rewards import Step


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Actions, and a copy of the policy as it was when it drew them.

    Attributes:
        version: How many updates the policy had seen by then.
        neutral: Whether these are the plain choices of an interleaved step, which are never paid.
    """

    actions: Actions
    policy: Policy
    version: int
    neutral: bool = False

    @property
    def num_examples(self) -> int:
        return count_actions(self.actions)

    def state_dict(self) -> dict[str, Any]:
        policy = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return {"actions": self.actions, "policy": policy, "version": self.version, "neutral": self.neutral}

    @classmethod
    def restored(cls, policy: Policy, state: dict[str, Any]) -> "Draw":
        """The draw of ``state_dict``, by a copy of ``policy`` with the parameters of then."""
        drawn_by = copy.deepcopy(policy)
        drawn_by.load_state_dict(state["policy"])
        return cls(state["actions"], drawn_by, state["version"], state["neutral"])


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step with the draws, one for each micro-batch, that chose its examples.

    Attributes:
        scale: What its loss was multiplied with before it was back-propagated.
    """

    step: Step
    draws: list[Draw]
    scale: float = 1.0

    @property
    def neutral(self) -> bool:
        return any(draw.neutral for draw in self.draws)

    @property
    def begun(self) -> bool:
        """Whether a part of the step was paid already, so that it cannot be paid by another gradient."""
        return self.step.tape is not None and self.step.tape.begun

    def begun_with_other(self, gradients: Direction) -> bool:
        return self.step.tape is not None and self.step.tape.begun_with_other(gradients)

    def release(self) -> None:
        if self.step.tape is not None:
            self.step.tape.release()

    def state_dict(self) -> dict[str, Any]:
        tape = None if self.step.tape is None else tape_state(self.step.tape)
        return {
            "draws": [draw.state_dict() for draw in self.draws],
            "num_examples": self.step.num_examples,
            "tape": tape,
            "scale": self.scale,
        }

    @classmethod
    def restored(cls, policy: Policy, plan: Plan, state: dict[str, Any]) -> "DrawnStep":
        tape = None if state["tape"] is None else restore_tape(plan, state["tape"])
        draws = [Draw.restored(policy, saved) for saved in state["draws"]]
        return cls(Step(state["num_examples"], tape), draws, state["scale"])
