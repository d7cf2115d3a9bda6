"""A product of policies: several choices for each example, each from a distribution of its own."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.policies.actions import Actions
from inloop.policies.discrete import Discrete
from inloop.policies.policy import Policy


class Product(Policy):
    """``log p(a) = sum over factors of log p(a_f)``; a factor may depend on an earlier one.

    Args:
        factors: The policies by name, in the order of drawing. Actions are a dict with the same names.

    Example:
        A source, an operation, and a strength for each operation:

        >>> from inloop.policies import Categorical, MixturePolicy
        >>> policy = Product({
        ...     "source": MixturePolicy(3),
        ...     "operation": Categorical(5, neutral=0),
        ...     "strength": Categorical(31, given=("operation", 5)),
        ... })
        >>> sorted(policy.sample(8))
        ['operation', 'source', 'strength']
    """

    def __init__(self, factors: Mapping[str, Policy]) -> None:
        super().__init__()
        if not isinstance(factors, Mapping):
            raise UsageError(f"A Product takes a dict of policies by name; got {type(factors).__name__}.")
        if not factors:
            raise UsageError("A Product needs at least one factor; got none.")
        before: dict[str, Policy] = {}
        for name, factor in factors.items():
            self._check_condition(name, factor, before)
            before[name] = factor
        self.factors = nn.ModuleDict(dict(factors))

    @staticmethod
    def _check_condition(name: str, factor: Policy, before: Mapping[str, Policy]) -> None:
        if not isinstance(factor, Discrete) or factor.given is None:
            return
        parent, rows = before.get(factor.given), len(factor.log_probabilities())
        if not isinstance(parent, Discrete) or parent.num_choices != rows:
            got = (
                f"has {parent.num_choices} choices"
                if isinstance(parent, Discrete)
                else "is no discrete factor before it"
            )
            raise UsageError(
                f"Factor '{name}' depends on '{factor.given}' with {rows} choices, but '{factor.given}' {got}. Factors before "
                f"it: {', '.join(before) or 'none'}."
            )

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Actions]:
        actions: dict[str, Actions] = {}
        for name, factor in self._items():
            condition = _condition(factor, actions)
            actions[name] = factor.sample(n, generator, **condition)
        return actions

    def log_prob(self, actions: Actions) -> Tensor:
        parts = self._parts(actions)
        return torch.stack([f.log_prob(parts[name], **_condition(f, parts)) for name, f in self._items()]).sum(dim=0)

    def neutral(self, n: int, generator: torch.Generator | None = None) -> dict[str, Actions]:
        return {name: factor.neutral(n, generator) for name, factor in self._items()}

    def probabilities(self) -> dict[str, object]:
        return {name: factor.probabilities() for name, factor in self._items()}

    def summarise(self, actions: Actions, rewards_N: Tensor) -> dict[str, object]:
        parts = self._parts(actions)
        return {name: factor.summarise(parts[name], rewards_N) for name, factor in self._items()}

    def _items(self) -> list[tuple[str, Policy]]:
        return [(name, cast(Policy, factor)) for name, factor in self.factors.items()]

    def _parts(self, actions: Actions) -> Mapping[str, Actions]:
        if isinstance(actions, Tensor) or set(actions) != set(self.factors):
            got = "a tensor" if isinstance(actions, Tensor) else f"a dict with {sorted(actions)}"
            raise UsageError(f"Actions of this Product are a dict with {sorted(self.factors)}; got {got}.")
        return actions


def source_policy(policy: Policy) -> Policy:
    """The policy that chooses the source: the factor "source" of a product, or the policy itself."""
    has_source = isinstance(policy, Product) and "source" in policy.factors
    return cast(Policy, cast(Product, policy).factors["source"]) if has_source else policy


def source_of(actions: Actions) -> Tensor:
    """The source of each example, of a mixture's actions or a product's."""
    if isinstance(actions, Tensor):
        return actions
    if not isinstance(actions, Mapping) or "source" not in actions:
        got = sorted(actions) if isinstance(actions, Mapping) else type(actions).__name__
        raise UsageError(f"Actions are a tensor of sources, or a dict with the entry 'source'; got {got}.")
    return cast(Tensor, actions["source"])


def _condition(factor: Policy, actions: Mapping[str, Actions]) -> dict[str, Tensor]:
    if isinstance(factor, Discrete) and factor.given is not None:
        return {"given_N": cast(Tensor, actions[factor.given])}
    return {}
