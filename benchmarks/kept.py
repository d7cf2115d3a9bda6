"""The memory that recorded calls hold until their examples are rewarded."""

from collections.abc import Iterable

from inloop.alignment.kept import Kept


def kept_bytes(calls: Iterable[Kept]) -> int:
    """Each tensor once, however many calls share it; ids are not counted."""
    tensors = [tensor for call in calls for tensor in call.tensors() if tensor.is_floating_point()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
