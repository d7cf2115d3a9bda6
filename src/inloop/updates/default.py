"""The update rule that a learner is given, or the default."""

from typing import Literal

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.updates.reinforce import Reinforce, trainable
from inloop.updates.update import NoUpdate, Update


def as_update(update: Update | Literal[False] | None, policy: Policy) -> Update:
    """Return the given rule. None means REINFORCE, or NoUpdate if the policy has no parameters. False means NoUpdate."""
    if update is None:
        return Reinforce() if trainable(policy) else NoUpdate()
    if update is False:
        return NoUpdate()
    if not isinstance(update, Update):
        fix = f" Fix: make one, {update.__name__}()." if isinstance(update, type) else ""
        raise UsageError(f"update={update!r}: allowed are an inloop.updates.Update, False (watch only) and None.{fix}")
    return update
