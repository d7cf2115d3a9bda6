"""Update rules: how a policy learns from rewards. One file each; a rule of a user's own subclasses :class:`Update`."""

from inloop.updates.anchored import Anchored as Anchored
from inloop.updates.default import as_update as as_update
from inloop.updates.exp3 import Exp3 as Exp3
from inloop.updates.follow_losses import FollowLosses as FollowLosses
from inloop.updates.reinforce import Reinforce as Reinforce
from inloop.updates.update import NoUpdate as NoUpdate
from inloop.updates.update import Update as Update
