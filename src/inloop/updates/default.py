"""The update rule that a learner is given, or the default. ``results/settings`` has the runs that chose it."""

from typing import Literal

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.rewards import Reward
from inloop.updates.anchored import Anchored, alternatives_of
from inloop.updates.reinforce import Reinforce, trainable
from inloop.updates.update import NoUpdate, Update


def as_update(update: Update | Literal[False] | None, policy: Policy, reward: Reward) -> Update:
    """Return the given rule. None means the default for this policy and reward. False means NoUpdate."""
    if update is None:
        return _default(policy, reward)
    if update is False:
        return NoUpdate()
    if not isinstance(update, Update):
        fix = f" Fix: make one, {update.__name__}()." if isinstance(update, type) else ""
        raise UsageError(f"update={update!r}: allowed are an inloop.updates.Update, False (watch only) and None.{fix}")
    return update


def _default(policy: Policy, reward: Reward) -> Update:
    """Anchored for a policy whose parameters are all scores of alternatives, else REINFORCE; NoUpdate without parameters.

    Anchored compares the examples of a step, so REINFORCE takes rewards that are the same for all of them.
    """
    count = sum(parameter.numel() for parameter in trainable(policy))
    if count == 0:
        return NoUpdate()
    only_scores = sum(places.numel() for places in alternatives_of(policy)) == count
    return Anchored() if only_scores and reward.normalisation != "none" else Reinforce()
