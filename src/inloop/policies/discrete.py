"""Building blocks: one choice out of K for each example, from a table of log-probabilities.

Axes: N examples, K choices, G values of an earlier choice that this one depends on.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.policies.actions import Actions
from inloop.policies.policy import Policy, RewardSummary, summarise_by_choice


class Discrete(Policy):
    """A policy over ``num_choices``, given by the table of its log-probabilities, [K] or [G, K].

    Args:
        neutral: The choice of plain steps; None for a uniform draw.
        given: The name of the earlier choice in a :class:`Product` that picks the row of the table, or None.
    """

    def __init__(self, num_choices: int, neutral: int | None = None, given: str | None = None) -> None:
        super().__init__()
        if neutral is not None and not 0 <= neutral < num_choices:
            raise UsageError(f"neutral={neutral}: allowed are None (uniform) and 0 to {num_choices - 1}.")
        self.num_choices = num_choices
        self.neutral_choice = neutral
        self.given = given
        self._table: tuple[tuple[bytes, ...], Tensor] | None = (
            None  # the last probabilities, and the policy's value then
        )

    @abstractmethod
    def log_probabilities(self) -> Tensor:
        """[K], or [G, K] if the choice depends on an earlier one."""

    def probabilities(self) -> Tensor:
        value = self.value()
        if self._table is None or self._table[0] != value:
            self._table = value, self.log_probabilities().detach().exp()
        return self._table[1].clone()

    def sample(self, n: int, generator: torch.Generator | None = None, given_N: Tensor | None = None) -> Tensor:
        if given_N is None:
            self._refuse_missing_condition()
        if n == 0:
            return torch.zeros(0, dtype=torch.long, device="cpu")
        table = self.probabilities()
        if given_N is None:
            return torch.multinomial(table, n, replacement=True, generator=generator)
        return torch.multinomial(table[given_N], 1, generator=generator).squeeze(1)

    def log_prob(self, actions: Actions, given_N: Tensor | None = None) -> Tensor:
        choice_N = self.check(actions)
        if given_N is None:
            self._refuse_missing_condition()
            return self.log_probabilities()[choice_N]
        return self.log_probabilities()[given_N, choice_N]

    def neutral(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        if self.neutral_choice is None:
            return torch.randint(self.num_choices, (n,), generator=generator, device="cpu")
        return torch.full((n,), self.neutral_choice, device="cpu")

    def summarise(self, actions: Actions, rewards_N: Tensor) -> RewardSummary:
        return summarise_by_choice(self.check(actions), self.num_choices, rewards_N)

    def check(self, actions: Actions) -> Tensor:
        """The actions as a tensor of choices.

        Raises:
            UsageError: If this policy does not have these choices.
        """
        if not isinstance(actions, Tensor) or actions.dim() != 1 or actions.is_floating_point():
            got = f"a tensor of shape {tuple(actions.shape)}" if isinstance(actions, Tensor) else type(actions).__name__
            raise UsageError(f"Actions of {type(self).__name__} are a tensor of integers, one an example; got {got}.")
        if len(actions):
            values = actions.detach().cpu().numpy()
            low, high = int(values.min()), int(values.max())
            if not 0 <= low <= high < self.num_choices:
                raise UsageError(
                    f"Actions range from {low} to {high}; {type(self).__name__} has the choices 0 to {self.num_choices - 1}."
                )
        return actions.long()

    def _refuse_missing_condition(self) -> None:
        if self.given is not None:
            raise UsageError(
                f"This choice depends on '{self.given}'. Fix: use it inside a Product with a factor of that name."
            )


class Categorical(Discrete):
    """``p(k) = softmax(logits)_k``, or ``p(k | earlier choice g) = softmax(logits_g)_k``.

    Args:
        num_choices: The number of choices.
        given: (name, G) of an earlier factor with G choices that this one depends on.
        neutral: The choice of plain steps; None for a uniform draw.

    Example:
        >>> policy = Categorical(4)
        >>> policy.probabilities()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, num_choices: int, given: tuple[str, int] | None = None, neutral: int | None = None) -> None:
        if num_choices < 2:
            raise UsageError(f"num_choices={num_choices}: a choice needs at least 2 possibilities.")
        super().__init__(num_choices, neutral, given[0] if given else None)
        self.alternatives = frozenset({"logits"})
        self.logits = nn.Parameter(torch.zeros((given[1], num_choices) if given else (num_choices,), device="cpu"))

    def log_probabilities(self) -> Tensor:
        return F.log_softmax(self.logits, dim=-1)


class Bernoulli(Discrete):
    """Yes (1) with probability ``sigmoid(logit)``, else no (0); plain steps say no.

    Args:
        given: (name, G) of an earlier factor with G choices that this one depends on.

    Example:
        >>> Bernoulli().probabilities()
        tensor([0.5000, 0.5000])
    """

    def __init__(self, given: tuple[str, int] | None = None) -> None:
        super().__init__(2, neutral=0, given=given[0] if given else None)
        self.logit = nn.Parameter(torch.zeros(given[1] if given else (), device="cpu"))

    def log_probabilities(self) -> Tensor:
        return torch.stack([F.logsigmoid(-self.logit), F.logsigmoid(self.logit)], dim=-1)
