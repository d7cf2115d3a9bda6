"""How many examples a step has, as its layers saw it; they must all agree."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from inloop.alignment.call import LayerCall
from inloop.alignment.reduced import AnyCall
from inloop.errors import BatchSizeError, UnsupportedLayerError

Structure = frozenset[tuple[tuple[int, str, int], int]]


def batch_sizes(calls: Sequence[AnyCall]) -> dict[int, int]:
    """The number of examples of each micro-batch, in order.

    Raises:
        BatchSizeError: If the layers of one micro-batch disagree, or if one computes what all examples share.
        UnsupportedLayerError: If a layer's output belongs to no example.
    """
    first: dict[int, AnyCall] = {}
    for call in calls:
        if isinstance(call, LayerCall) and not call.has_examples:
            raise UnsupportedLayerError(
                f"'{call.name}' ({type(call.layer).__name__}) returned a scalar that reaches the loss; no part of it can be told to "
                "belong to an example. Fix: return a value for each example and average outside, or leave it out with layers=."
            )
        known = first.setdefault(call.batch, call)
        if call.num_recorded != known.num_recorded:
            raise BatchSizeError(_disagreement(call, known))
    for call in calls:
        if _looks_like_positions(call, calls):
            raise BatchSizeError(
                f"Layer '{call.name}' (Embedding) was given {call.num_examples} consecutive positions, as many as there are "
                f"examples, and its output looks shared by all of them. {_SHARED}"
            )
    return {batch: call.num_recorded for batch, call in sorted(first.items())}


def of_part(call: AnyCall, contributions: Tensor, part: Mapping[int, Tensor]) -> Tensor:
    """Of a call's contributions those of the examples that count: the rows in ``part``, by micro-batch; all, where there is no entry."""
    rows = part.get(call.batch)
    return contributions if rows is None or len(contributions) != call.num_recorded else contributions[rows]


def structure_of(calls: Sequence[AnyCall]) -> Structure:
    """Which layers were called how often in each micro-batch; another structure is another kind of step."""
    return frozenset(Counter((call.batch, call.name, call.output_index) for call in calls).items())


_SHARED = (
    "Fix: what all examples share (positions) needs a batch axis of its own, as in positions.expand(N, -1), so that each "
    "example's part in its gradient can be told."
)


def _disagreement(call: AnyCall, known: AnyCall) -> str:
    if call.name == known.name:
        return (
            f"Layer '{call.name}' was called with {known.num_recorded} and with {call.num_recorded} examples in one micro-batch. "
            "Fix: record one pass at a time; with a learner, call learner.sample(n) before each micro-batch and put passes that "
            "are not part of the step into learner.paused()."
        )
    return (
        f"Layer '{call.name}' saw {call.num_recorded} rows, layer '{known.name}' {known.num_recorded}. The first axis of every "
        f"layer's output must count the examples. {_SHARED} Or keep examples on the first axis instead of folding them into "
        f"another, or leave the layer out: layers=lambda name, module: name != '{call.name}'."
    )


def _looks_like_positions(call: AnyCall, calls: Sequence[AnyCall]) -> bool:
    """Whether L consecutive ids were looked up once for all while another layer has L positions for each of L examples."""
    length = call.consecutive_ids
    return length > 0 and any(other.num_positions == length for other in calls)
