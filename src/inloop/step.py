"""A training step as the learner keeps it: the choices that were drawn for it, its tape, and what judges it."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inloop.alignment import Direction, Tape
from inloop.alignment.direction import Compute, Computed
from inloop.distributed import gather_rows, is_distributed, rank, world_size
from inloop.policies import Actions, Policy, map_actions, part_of


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Actions for a (micro-)batch, and a copy of the policy as it was when it drew them.

    Attributes:
        everyone: For the examples of all processes that train together, in their order.
        counts: How many of them each process has.
        version: How many updates the policy had seen by then.
        plain: Whether these are the neutral choices of a plain step, which is never rewarded.
        rewarded_rows: The examples of everyone's that are rewarded, in order; None for all.
    """

    everyone: Actions
    counts: tuple[int, ...]
    policy: Policy
    version: int
    plain: bool = False
    rewarded_rows: Tensor | None = None

    @property
    def rewarded(self) -> Actions:
        """Everyone's actions that are rewarded."""
        rows = self.rewarded_rows
        return self.everyone if rows is None else map_actions(lambda all_N: all_N[rows], self.everyone)

    @property
    def rewarded_counts(self) -> tuple[int, ...]:
        """How many of them each process has."""
        if self.rewarded_rows is None:
            return self.counts
        ends = torch.tensor(self.counts, device="cpu").cumsum(0)
        return tuple(
            torch.bincount(torch.bucketize(self.rewarded_rows, ends, right=True), minlength=len(ends)).tolist()
        )

    @property
    def rewarded_here(self) -> Tensor | None:
        """The examples of this process that are rewarded; None for all."""
        if self.rewarded_rows is None:
            return None
        start, stop = self.mine.start, self.mine.stop
        rows: Tensor = self.rewarded_rows[(self.rewarded_rows >= start) & (self.rewarded_rows < stop)] - start
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
        return self.counts[0] if len(self.counts) == 1 else self.counts[rank()]

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
            "rewarded_rows": self.rewarded_rows,
        }

    @classmethod
    def restored(cls, policy: Policy, state: dict[str, Any]) -> "Draw":
        """The draw of ``state_dict``, by a copy of ``policy`` with the parameters of then; for as many processes as there are now."""
        drawn_by = copy.deepcopy(policy)
        drawn_by.load_state_dict(state["policy"])
        counts, processes = tuple(state["counts"]), world_size()
        if len(counts) != processes:
            counts = tuple(len(part) for part in torch.arange(sum(counts), device="cpu").tensor_split(processes))
        return cls(state["everyone"], counts, drawn_by, state["version"], state["plain"], state["rewarded_rows"])


@dataclass(frozen=True, slots=True)
class Judge:
    """What a step is judged by: a gradient, by parameter name, and a loss.

    Attributes:
        loss: Its value; reading it may wait for the device.
        scale: What the gradient is multiplied with.
        by_batch: If each micro-batch has a judge of its own, their gradients, in place of ``direction``.
    """

    direction: Direction
    loss: float | Tensor
    scale: float = 1.0
    by_batch: tuple[Direction, ...] = ()

    def changed_by(self, compute: Compute) -> "Judge":
        """The judge with ``compute`` of its gradients."""
        by_batch = tuple([Computed(direction, compute) for direction in self.by_batch])
        return replace(self, direction=Computed(self.direction, compute), by_batch=by_batch)

    def detached(self) -> "Judge":
        """A copy that outlives the gradients of the step."""
        direction = {name: None if g is None else g.detach().clone() for name, g in self.direction.items()}
        return Judge(direction, self.loss, self.scale)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was trained on, until its examples are rewarded.

    Attributes:
        draws: One for each micro-batch.
        tape: What was recorded of it; None if the reward does not need that.
        losses_N: The losses of its examples, if they were given.
        scale: What its loss was multiplied with before it was back-propagated.
    """

    draws: list[Draw]
    tape: Tape | None
    losses_N: Tensor | None = None
    scale: float = 1.0

    @property
    def num_examples(self) -> int:
        """Of this process."""
        return sum([draw.num_examples for draw in self.draws])

    @property
    def plain(self) -> bool:
        return any([draw.plain for draw in self.draws])

    @property
    def is_empty(self) -> bool:
        """Whether no process has an example."""
        return not any([draw.num_everyone for draw in self.draws])

    def own_parameters(self) -> None:
        """Copy the parameters that aligning will need, before an optimizer changes them."""
        if self.tape is not None:
            self.tape.own_parameters()

    def gather_rewards(self, rewards_N: Tensor) -> Tensor:
        """The rewards of all processes' examples, in the order of the draws' ``rewarded``, from those of this process's own."""
        if not is_distributed():
            return rewards_N
        rewards_N = rewards_N.double()  # a process without examples has them in no precision
        parts = torch.split(rewards_N, [draw.rewarded_counts[rank()] for draw in self.draws])
        pairs = zip(self.draws, parts, strict=True)
        return torch.cat([gather_rows(part, draw.rewarded_counts) for draw, part in pairs])

    def align(self, judge: Judge) -> Tensor:
        """``<∇l_i, g>`` for every example of this process, [N]; factors that losses were scaled with are divided out."""
        assert self.tape is not None
        scale = self.scale * judge.scale
        if judge.by_batch:
            aligned_N = torch.cat([self.tape.align_batch(b, direction) for b, direction in enumerate(judge.by_batch)])
        else:
            aligned_N = self.tape.align(judge.direction)
        return aligned_N if scale == 1 else aligned_N / scale

    def release(self) -> None:
        if self.tape is not None:
            self.tape.release()
