"""Draws actions and keeps them until their step, with a copy of the policy that drew them."""

import copy
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inloop.alignment.kept import tensors_in
from inloop.distributed import begin_alike, gather_counts, gather_rows, world_size
from inloop.errors import UsageError
from inloop.policies import Actions, Policy, count_actions, map_actions
from inloop.step import Draw


class Sampler:
    """A policy, a generator, and the draws that wait for their step."""

    def __init__(self, policy: Policy, generator: torch.Generator) -> None:
        self.policy = policy
        self.generator = generator
        self.announced: list[Draw] = []
        self._copy: Policy | None = None
        self._value: tuple[bytes, ...] = ()  # of the policy that was copied
        self._probabilities: Tensor | Mapping[str, object] | None = None  # of the copy
        self._num_processes = 1  # the processes that draw together

    def draw(self, n: int, version: int, plain: bool) -> Draw:
        """Draw for ``n`` examples of this process. All processes draw together, for the examples of all."""
        if not isinstance(n, numbers.Integral) or n < 0:
            raise UsageError(f"A number of examples is a whole number from 0; got {n!r}.")
        self._join_others()
        source = self.policy.neutral if plain else self.policy.sample
        counts = gather_counts(n)
        with torch.no_grad():
            everyone = source(sum(counts), self.generator)
        return Draw(everyone, counts, self._copy_of_policy(), version, plain)

    def shared(self, draws: Sequence[Draw]) -> list[Tensor]:
        """The tensors that must be equal in all processes."""
        chosen = tensors_in([draw.everyone for draw in draws])
        return [self.generator.get_state(), *self.policy.state_dict().values(), *chosen]

    def _join_others(self) -> None:
        """Take over the first process's random state and policy, before the first common draw."""
        if self._num_processes != world_size():
            self._num_processes = world_size()
            begin_alike(self.generator, self.policy)
            self._copy = None

    def choose_rewarded(self, draw: Draw, part: float) -> Draw:
        """The draw with a random part of its examples to reward: at least one, the same for any number of processes."""
        if draw.num_everyone == 0:
            return draw
        some = max(1, round(part * draw.num_everyone))
        rows = torch.randperm(draw.num_everyone, generator=self.generator, device="cpu")[:some].sort().values
        return replace(draw, rewarded_rows=rows)

    def chosen_elsewhere(self, actions: Actions, version: int) -> Draw:
        """A draw of the user's own choices, as if the present policy had drawn them."""
        self._join_others()
        actions = tree_map_only(Tensor, Tensor.cpu, actions)
        with torch.no_grad():
            self.policy.log_prob(actions)  # refuses actions that this policy does not have
        counts = gather_counts(count_actions(actions))
        everyone = map_actions(lambda tensor: gather_rows(tensor, counts), actions)
        return Draw(everyone, counts, self._copy_of_policy(), version)

    def of_step(self) -> list[Draw]:
        """The draws since the last step."""
        if not self.announced:
            raise UsageError(
                "learner.step was called without actions. Fix: call learner.sample(n) before the forward pass of each step, or "
                "learner.use(actions) with choices of your own."
            )
        return list(self.announced)

    def loss_weight(self) -> float:
        """The factor for the mean loss of the last draw's examples, if processes have different numbers of them."""
        draw = self.announced[-1] if self.announced else None
        return 1.0 if draw is None or not draw.num_everyone else world_size() * draw.num_examples / draw.num_everyone

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "draws": [draw.state_dict() for draw in self.announced]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the generator of :meth:`state_dict`; its draws are to be announced again."""
        self.generator.set_state(state["generator"])

    def restored_draws(self, state: dict[str, Any]) -> list[Draw]:
        draws = [Draw.restored(self.policy, saved) for saved in state["draws"]]
        for draw in draws:
            with torch.no_grad():
                self.policy.log_prob(draw.everyone)  # refuses actions that this policy does not have
            if type(draw.plain) is not bool or type(draw.version) is not int:
                raise UsageError(
                    "The state cannot be loaded: sampler.draws has a draw with other entries than the learner's."
                )
        return draws

    def _copy_of_policy(self) -> Policy:
        """The policy as it is now; draws share one copy until it changes."""
        value = self.policy.value()
        if self._copy is None or self._value != value:
            self._copy, self._value, self._probabilities = copy.deepcopy(self.policy), value, None
        return self._copy

    def probabilities(self) -> Tensor | Mapping[str, object]:
        """The policy's present distribution, computed once until it changes."""
        policy = self._copy_of_policy()
        if self._probabilities is None:
            self._probabilities = policy.probabilities()
        return self._probabilities
