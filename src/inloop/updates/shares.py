"""What rules that set the shares of sources by themselves have in common."""

from collections.abc import Sequence

from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Policy, Shares, concatenate, source_of, source_policy
from inloop.step import Draw
from inloop.updates.update import Update


def shares_in(policy: Policy, update: Update) -> Shares:
    """The shares that a rule can set: the policy itself, or the factor "source" of a product."""
    chooser = source_policy(policy)
    if not isinstance(chooser, Shares):
        raise UsageError(
            f"{type(update).__name__} sets the shares of sources by itself, and the policy is a {type(chooser).__name__}. Fix: use "
            "inloop.policies.Shares.uniform(K), or another update."
        )
    return chooser


def joined_actions(draws: Sequence[Draw]) -> Tensor:
    """The sources that were chosen for the rewarded examples of a step."""
    return source_of(concatenate([draw.rewarded for draw in draws]))
