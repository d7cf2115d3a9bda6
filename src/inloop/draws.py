"""What was drawn for a step, kept until the step is paid."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inloop.alignment import Direction, Tape
from inloop.alignment.plan import Plan
from inloop.alignment.saved_tape import restore_tape, tape_state
from inloop.distributed import gather_rows, is_distributed, rank, world_size
from inloop.policies import Actions, Policy, map_actions, part_of
from inloop.rewards import Step


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Actions for a (micro-)batch, and a copy of the policy as it was when it drew them.

    Attributes:
        everyone: For the examples of all processes that train together, in their order.
        counts: How many of them each process has.
        version: How many updates the policy had seen by then.
        plain: Whether these are the neutral choices of a plain step, which is never paid.
        paid_examples: Which of everyone's examples will be paid, in order; None for all.
    """

    everyone: Actions
    counts: tuple[int, ...]
    policy: Policy
    version: int
    plain: bool = False
    paid_examples: Tensor | None = None

    @property
    def paid(self) -> Actions:
        """Everyone's actions that will be paid."""
        return (
            self.everyone
            if self.paid_examples is None
            else map_actions(lambda all_N: all_N[self.paid_examples], self.everyone)
        )

    @property
    def paid_counts(self) -> tuple[int, ...]:
        """How many of them each process has."""
        if self.paid_examples is None:
            return self.counts
        ends = torch.tensor(self.counts).cumsum(0)
        return tuple(
            torch.bincount(torch.bucketize(self.paid_examples, ends, right=True), minlength=len(ends)).tolist()
        )

    @property
    def paid_here(self) -> Tensor | None:
        """Which of this process's examples will be paid; None for all."""
        if self.paid_examples is None:
            return None
        start, stop = self.mine.start, self.mine.stop
        rows: Tensor = self.paid_examples[(self.paid_examples >= start) & (self.paid_examples < stop)] - start
        return rows

    @property
    def mine(self) -> slice:
        """The range of this process's examples among everyone's."""
        start = sum(self.counts[: rank()])
        return slice(start, start + self.num_examples)

    @property
    def actions(self) -> Actions:
        """For this process's examples."""
        return self.everyone if len(self.counts) == 1 else part_of(self.everyone, self.mine)

    @property
    def num_examples(self) -> int:
        """Of this process."""
        return self.counts[rank()]

    @property
    def num_everyone(self) -> int:
        """Of all processes."""
        return sum(self.counts)

    def state_dict(self) -> dict[str, Any]:
        policy = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return {
            "everyone": self.everyone,
            "counts": list(self.counts),
            "policy": policy,
            "version": self.version,
            "plain": self.plain,
            "paid_examples": self.paid_examples,
        }

    @classmethod
    def restored(cls, policy: Policy, state: dict[str, Any]) -> "Draw":
        """The draw of ``state_dict``, by a copy of ``policy`` with the parameters of then; for as many processes as there are now."""
        drawn_by = copy.deepcopy(policy)
        drawn_by.load_state_dict(state["policy"])
        counts, processes = tuple(state["counts"]), world_size()
        if len(counts) != processes:
            counts = tuple(len(part) for part in torch.arange(sum(counts)).tensor_split(processes))
        return cls(state["everyone"], counts, drawn_by, state["version"], state["plain"], state["paid_examples"])


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step with the draws, one for each micro-batch, that chose its examples.

    Attributes:
        scale: What its loss was multiplied with before it was back-propagated.
    """

    kept: Step
    draws: list[Draw]
    scale: float = 1.0

    @classmethod
    def of(cls, draws: list[Draw], tape: Tape | None, losses_N: Tensor | None, scale: float) -> "DrawnStep":
        num_examples = sum(draw.num_examples for draw in draws)
        return cls(Step(num_examples, tape, None if losses_N is None else losses_N.detach()), draws, scale)

    @property
    def plain(self) -> bool:
        return any(draw.plain for draw in self.draws)

    @property
    def num_everyone(self) -> int:
        """Examples of all processes."""
        return sum(draw.num_everyone for draw in self.draws)

    def rewards_of_everyone(self, rewards_N: Tensor) -> Tensor:
        """The rewards of all processes' examples, in the order of the draws' ``paid``, from those of this process's own."""
        rewards_N = (
            rewards_N.double() if is_distributed() else rewards_N
        )  # a process without examples has them in no precision
        parts = torch.split(rewards_N, [draw.paid_counts[rank()] for draw in self.draws])
        return torch.cat([gather_rows(part, draw.paid_counts) for draw, part in zip(self.draws, parts, strict=True)])

    def begun_with_other(self, gradients: Direction) -> bool:
        """Whether a part was paid already, by what are not, or not any more, these gradients."""
        return self.kept.tape is not None and self.kept.tape.begun_with_other(gradients)

    def release(self) -> None:
        if self.kept.tape is not None:
            self.kept.tape.release()

    def state_dict(self) -> dict[str, Any]:
        tape = None if self.kept.tape is None else tape_state(self.kept.tape)
        return {
            "draws": [draw.state_dict() for draw in self.draws],
            "num_examples": self.kept.num_examples,
            "tape": tape,
            "losses": self.kept.losses_N,
            "scale": self.scale,
        }

    @classmethod
    def restored(cls, policy: Policy, plan: Plan, state: dict[str, Any]) -> "DrawnStep":
        tape = None if state["tape"] is None else restore_tape(plan, state["tape"])
        draws = [Draw.restored(policy, saved) for saved in state["draws"]]
        return cls(Step(state["num_examples"], tape, state["losses"]), draws, state["scale"])
