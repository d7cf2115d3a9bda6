"""The update rule that a learner is given, or the default."""

from typing import Literal

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.updates.reinforce import Reinforce
from inloop.updates.update import NoUpdate, Update


def as_update(update: Update | Literal[False] | None, policy: Policy) -> Update:
    """The rule itself; by default REINFORCE, as in the paper; a policy without parameters stays as it is, as does any with False."""
    if update is None:
        return Reinforce() if any(True for _ in policy.parameters()) else NoUpdate()
    if update is False:
        return NoUpdate()
    if not isinstance(update, Update):
        raise UsageError(f"update={update!r}: allowed are an inloop.updates.Update, False (watch only) and None.")
    return update
