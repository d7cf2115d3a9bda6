"""A learner's reference, from a short name or an object."""

from typing import Literal

from inloop.errors import UsageError
from inloop.references.held_out import HeldOut, HeldOutLoss
from inloop.references.next import Next
from inloop.references.other_half import OtherHalf
from inloop.references.previous import Previous
from inloop.references.reference import Reference
from inloop.references.trail import Trail

_NAMED: dict[str, type[Reference]] = {"next": Next, "previous": Previous, "other half": OtherHalf, "trail": Trail}
Named = Literal["next", "previous", "other half", "trail"]


def as_reference(reference: Named | HeldOutLoss | Reference) -> Reference:
    """Return the reference for a short name, for a held-out loss, or the given reference itself."""
    if isinstance(reference, Reference):
        return reference
    if callable(reference):
        return HeldOut(reference)
    if not isinstance(reference, str) or reference not in _NAMED:
        got = repr(reference) if isinstance(reference, str) else f"a {type(reference).__name__}"
        raise UsageError(
            f"reference={got}: allowed are {', '.join(map(repr, _NAMED))}, a function that returns a held-out loss, as in "
            "lambda: F.cross_entropy(model(x_held_out), y_held_out), and an inloop.references.Reference."
        )
    return _NAMED[reference]()
