"""What recorded calls hold until they are paid."""

from collections.abc import Iterable

from torch import Tensor

from inloop.alignment.call import leaves_of
from inloop.alignment.reduced import AnyCall, ReducedCall


def kept_bytes(calls: Iterable[AnyCall]) -> int:
    """Each tensor once, however many calls share it; ids are not counted."""
    sizes: dict[int, int] = {}
    for call in calls:
        held = dict(call.gradients) if isinstance(call, ReducedCall) else (call.args, call.kwargs, call.dout)
        for leaf in leaves_of(held):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return sum(sizes.values())
