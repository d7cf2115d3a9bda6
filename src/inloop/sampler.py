"""Draws actions, each with a copy of the policy that drew them, and keeps them until their step."""

import copy
import numbers
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inloop.alignment.kept import tensors_in
from inloop.distributed import begin_alike, gather_counts, gather_rows, world_size
from inloop.step import Draw
from inloop.errors import UsageError
from inloop.policies import Actions, Policy, count_actions, map_actions, same_actions


class Sampler:
    """A policy, a generator, and the draws that wait for their step.

    A *version* counts the policy's updates: draws of one version share one copy of the policy.
    """

    def __init__(self, policy: Policy, generator: torch.Generator) -> None:
        self.policy = policy
        self.generator = generator
        self.waiting: list[Draw] = []
        self._copy: Policy | None = None
        self._num_processes = 1  # that draw together
        self._version = -1

    def draw(self, n: int, version: int, plain: bool) -> Draw:
        """For ``n`` examples of this process; all processes draw together, for the examples of all of them."""
        if not isinstance(n, numbers.Integral) or n < 0:
            raise UsageError(f"A number of examples is a whole number from 0; got {n!r}.")
        self._join_others()
        source = self.policy.neutral if plain else self.policy.sample
        counts = gather_counts(n)
        with torch.no_grad():
            everyone = source(sum(counts), self.generator)
        return Draw(everyone, counts, self._copy_of(version), version, plain)

    def shared(self, draws: Sequence[Draw]) -> list[Tensor]:
        """What must be the same in all processes."""
        chosen = tensors_in([draw.everyone for draw in draws])
        return [self.generator.get_state(), *self.policy.state_dict().values(), *chosen]

    def _join_others(self) -> None:
        """Before drawing together for the first time: with the random state, and the policy, of the first process."""
        if self._num_processes != world_size():
            self._num_processes = world_size()
            begin_alike(self.generator, self.policy)
            self._copy = None

    def choose_rewarded(self, draw: Draw, part: float) -> Draw:
        """The draw with a random part of its examples to be rewarded: at least one, the same whatever the number of processes."""
        if draw.num_everyone == 0:
            return draw
        some = max(1, round(part * draw.num_everyone))
        rows = torch.randperm(draw.num_everyone, generator=self.generator)[:some].sort().values
        return replace(draw, rewarded_rows=rows)

    def take(self, actions: Actions | None, version: int) -> list[Draw]:
        """The draws of a step: all that wait, or the one of these actions, or a new one if they were drawn elsewhere."""
        if actions is None:
            if not self.waiting:
                raise UsageError(
                    "learner.step was called without actions. Fix: call learner.sample(n) before the forward pass of each step, or "
                    "pass step(loss, actions=...)."
                )
            return list(self.waiting)
        self._join_others()
        fits = [place for place, draw in enumerate(self.waiting) if same_actions(draw.actions, actions)]
        place = next((place for place in fits if self.waiting[place].actions is actions), *fits[:1] or [-1])
        places = gather_counts(place + 1)
        if len(set(places)) > 1:
            raise UsageError(
                "The actions that learner.step was given are those of different draws in different processes. Fix: train on batches in the order "
                "in which they were sampled, in all processes, and call learner.step(loss) without actions."
            )
        if place >= 0:
            return [self.waiting[place]]
        with torch.no_grad():
            self.policy.log_prob(actions)  # refuses what is no action of this policy
        counts = gather_counts(count_actions(actions))
        everyone = map_actions(lambda tensor: gather_rows(tensor, counts), actions)
        return [Draw(everyone, counts, self._copy_of(version), version)]

    def forget(self, draws: Sequence[Draw]) -> None:
        """They were used. If none of them waits, they are in the place of what does: a part of it, or in another order."""
        left = [draw for draw in self.waiting if draw not in draws]
        self.waiting = [] if draws and len(left) == len(self.waiting) else left

    def restore(self, waiting: list[Draw]) -> None:
        """After loading a state: these draws wait, and the policy is another than the copy."""
        self.waiting = waiting
        self._copy = None

    def _copy_of(self, version: int) -> Policy:
        if self._copy is None or self._version != version:
            self._copy, self._version = copy.deepcopy(self.policy), version
        return self._copy
