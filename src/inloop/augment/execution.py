"""Does to each example the operations that were chosen for it.

A record is a dict of tensors; R operations follow each other on each of N examples:

    operation_NR   number of the operation, 0 (identity) for none
    magnitude_NR   its argument, with its sign
    center_NR2     a point, as shares of width and height

Further entries are the policy's own. The examples of a batch are grouped by primitive, not done one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.augment.registry import STRENGTHS, Arguments, Operation, get_operation, operation_with_code
from inloop.augment.spaces import Space, get_space
from inloop.errors import UsageError
from inloop.policies import Actions

MOST_PIXELS = 32_767  # on a side: Pillow's fixed point, and ours, has 16 bits before the point


def apply(images: Tensor, actions: Actions) -> Tensor:
    """New images, each with its operations done; the given images stay unchanged. No gradient flows through it.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; for your own operations any tensor with first axis N.
        actions: The actions that a policy of ``inloop.augment`` sampled for N examples.
    """
    names = ("operation", "magnitude", "center")
    parts = {name: actions.get(name) for name in names} if isinstance(actions, Mapping) else {}
    record = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    if missing := set(names) - set(record):
        raise UsageError(
            f"The actions lack {', '.join(sorted(missing))}. Fix: give the actions of an augmentation policy; of a Product's "
            "actions, that factor's."
        )
    _check_tensor(images)
    operation_NR, magnitude_NR, center_NR2 = (record[name].cpu() for name in names)
    if (
        operation_NR.ndim != 2
        or magnitude_NR.shape != operation_NR.shape
        or center_NR2.shape != (*operation_NR.shape, 2)
    ):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in record.items())
        raise UsageError(f"The actions have {shapes}; expected [N, R], [N, R] and [N, R, 2], as a policy samples them.")
    if len(operation_NR) != len(images):
        raise UsageError(
            f"Got {len(operation_NR)} actions for {len(images)} images. Fix: give one for each image, and images with a "
            "batch axis."
        )
    new = images.detach().clone(memory_format=torch.contiguous_format)
    if not bool(operation_NR.any()):
        return new
    plan = _plan(operation_NR)
    # Built-in operations run an eighth faster in inference mode. A user's may keep tensors; these must not be inference tensors.
    ours = all(operation.builtin for operation in plan.operations)
    with torch.inference_mode() if ours else torch.no_grad():
        _take_all_turns(new, plan, magnitude_NR, center_NR2)
    return new


def _take_all_turns(images: Tensor, plan: "_Plan", magnitude_NR: Tensor, center_NR2: Tensor) -> None:
    """Do all operations, in place."""
    row_E = plan.row_E.to(images.device)
    magnitude_E = magnitude_NR[plan.row_E, plan.place_E].to(images.device)
    center_E2 = (center_NR2[plan.row_E, plan.place_E] * _size(images)).to(images.device)
    prepared = _prepare_at_once(images, plan, magnitude_E, center_E2)
    for turn in plan.turns:
        now = images.index_select(0, row_E[turn.entries])
        done = _take_turn(now, turn, prepared, magnitude_E[turn.entries], center_E2[turn.entries])
        _words(images).index_copy_(0, row_E[turn.entries], _words(torch.cat(done).contiguous()))


def _words(images: Tensor) -> Tensor:
    """A view of each image as a row of 8 byte words, if it fits: rows are copied word by word."""
    rows = images.view(len(images), -1)
    return rows.view(torch.int64) if rows.shape[1] * rows.element_size() % 8 == 0 else rows


@dataclass(frozen=True)
class _Turn:
    """Operations that are done at once, one to each of some images, sorted by primitive, and the count of each."""

    entries: slice
    operations: list[Operation]
    counts: list[int]
    starts: list[int]  # entries of the same operation in earlier turns


@dataclass(frozen=True)
class _Plan:
    """All operations to do: E entries, by turn, then by primitive, then by operation.

    Attributes:
        place_E: The entry's place among its image's R places.
        operations: All operations that occur.
        totals: The number of entries of each.
        by_operation_E: The entries in the order of their operations.
    """

    row_E: Tensor
    place_E: Tensor
    operations: list[Operation]
    totals: list[int]
    by_operation_E: Tensor
    turns: list[_Turn]


def _plan(operation_NR: Tensor) -> _Plan:
    """An image's n-th operation that is no identity is done in turn n."""
    turn_NR = (operation_NR != 0).cumsum(dim=1) - 1
    row_E, place_E = operation_NR.nonzero(as_tuple=True)
    codes, which_E = torch.unique(operation_NR[row_E, place_E], return_inverse=True)
    found = [operation_with_code(code) for code in codes.tolist()]
    primitives = list(dict.fromkeys(operation.primitive for operation in found))
    sequence = sorted(range(len(found)), key=lambda i: primitives.index(found[i].primitive))
    operations = [found[i] for i in sequence]
    rank_E = torch.tensor(sequence, dtype=torch.long, device="cpu").argsort()[which_E]
    key_E = turn_NR[row_E, place_E] * len(operations) + rank_E
    key_E, order_E = key_E.sort(stable=True)
    row_E, place_E, rank_E = row_E[order_E], place_E[order_E], rank_E[order_E]
    num_turns = int(key_E[-1]) // len(operations) + 1
    count_TA = torch.bincount(key_E, minlength=num_turns * len(operations)).view(num_turns, -1)
    start_TA = (count_TA.cumsum(dim=0) - count_TA).tolist()
    turns, first = [], 0
    for counts, starts in zip(count_TA.tolist(), start_TA, strict=True):
        present = [a for a, count in enumerate(counts) if count]
        entries = slice(first, first := first + sum(counts))
        turns.append(
            _Turn(entries, [operations[a] for a in present], [counts[a] for a in present], [starts[a] for a in present])
        )
    return _Plan(row_E, place_E, operations, count_TA.sum(dim=0).tolist(), rank_E.argsort(stable=True), turns)


def _prepare_at_once(images: Tensor, plan: _Plan, magnitude_E: Tensor, center_E2: Tensor) -> dict[str, Arguments]:
    """The arguments of all entries whose operations do not need the pixels."""
    order = plan.by_operation_E.to(images.device)
    parts = [torch.split(part.index_select(0, order), plan.totals) for part in (magnitude_E, center_E2)]
    prepared = {}
    for operation, *part in zip(plan.operations, *parts, strict=True):
        check_examples(images, operation)
        if not operation.needs_pixels:
            prepared[operation.name] = operation.prepared(images, *part)
    return prepared


def _take_turn(
    images: Tensor, turn: _Turn, prepared: dict[str, Arguments], magnitude_n: Tensor, center_n2: Tensor
) -> list[Tensor]:
    """Do a turn: its first operation to the first images, and so on. Arguments are prepared by operation, done by primitive."""
    groups: list[tuple[Callable[..., Tensor], int, list[Arguments]]] = []
    parts = zip(*(torch.split(part, turn.counts) for part in (images, magnitude_n, center_n2)), strict=True)
    for operation, count, start, part in zip(turn.operations, turn.counts, turn.starts, parts, strict=True):
        if operation.needs_pixels:
            arguments = operation.prepared(*part)
        else:
            arguments = tuple(argument[start : start + count] for argument in prepared[operation.name])
        if groups and groups[-1][0] is operation.primitive:
            primitive, size, columns = groups.pop()
            groups.append((primitive, size + count, [*columns, arguments]))
        else:
            groups.append((operation.primitive, count, [arguments]))
    sizes = [size for _, size, _ in groups]
    return [
        primitive(examples, *(_joined(column) for column in zip(*columns, strict=True)))
        for examples, (primitive, _, columns) in zip(torch.split(images, sizes), groups, strict=True)
    ]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _size(images: Tensor) -> Tensor:
    """Width and height of images; 1 for other examples."""
    sides = images.shape[:1:-1] if images.ndim == 4 else (1, 1)
    return torch.tensor(sides, dtype=torch.float64, device="cpu")


def apply_operation(
    images: Tensor,
    name: str,
    strength_N: Tensor | int,
    space: str | Space = "wl",
    sign_N: Tensor | int | None = None,
    center_N2: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Do one operation to all images, each with its own strength.

    Args:
        strength_N: 0..30, one for each image or one for all.
        space: The magnitudes of the strengths.
        sign_N: +1 or -1, for rotate, shears and translates; drawn if None.
        center_N2: (x, y) in pixels, for cutout; drawn if None.
        generator: The generator of the draws; by default torch's own.

    Example:
        >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_operation(images, "rotate", torch.tensor([0, 20]), sign_N=1).shape
        torch.Size([2, 3, 32, 32])
    """
    _check_tensor(images)
    space, operation, n = get_space(space), get_operation(name), len(images)
    magnitudes = space.magnitudes.get(name, operation.magnitudes)  # a user's operation need not be in the space
    if magnitudes is None:
        raise UsageError(f"Space '{space.name}' has no operation {name!r}; it has {', '.join(space.operations)}.")
    check_examples(images, operation)
    strength_N = _one_for_each("strength_N", strength_N, n)
    if not bool(((strength_N >= 0) & (strength_N < STRENGTHS)).all()) or strength_N.dtype.is_floating_point:
        got = f"{strength_N.dtype} from {strength_N.min().item()} to {strength_N.max().item()}"
        raise UsageError(f"Operation '{name}': strengths are whole numbers 0..{STRENGTHS - 1}; got {got}.")
    magnitude_N = torch.tensor(magnitudes, dtype=torch.float64, device="cpu")[strength_N.long().cpu()].to(images.device)
    if operation.signed:
        sign_N = draw_signs((n,), generator) if sign_N is None else _one_for_each("sign_N", sign_N, n)
        if not bool((sign_N.abs() == 1).all()):
            raise UsageError(f"Operation '{name}': signs are +1 or -1; got {sorted(set(sign_N.tolist()))}.")
        magnitude_N = magnitude_N * sign_N.to(magnitude_N)
    if center_N2 is None:
        center_N2 = torch.rand(n, 2, dtype=torch.float64, generator=generator, device="cpu") * _size(images)
    center_N2 = torch.as_tensor(center_N2)
    if center_N2.shape != (n, 2):
        raise UsageError(f"center_N2 has shape {list(center_N2.shape)}; give (x, y) in pixels for each of {n} images.")
    images = images.clone()
    if n == 0:
        return images
    arguments = operation.prepared(images, magnitude_N, center_N2.to(images.device, torch.float64))
    return operation.primitive(images, *arguments)


def _check_tensor(images: object) -> None:
    if not isinstance(images, Tensor) or images.ndim < 1:
        raise UsageError(f"Images are a tensor with one row for each example; got {type(images).__name__}.")


def draw_signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(2, shape, generator=generator, device="cpu") * 2 - 1


def _one_for_each(what: str, value: Tensor | int, n: int) -> Tensor:
    value = torch.as_tensor(value)
    if value.shape not in ((), (n,)):
        raise UsageError(f"{what} has shape {list(value.shape)}; give one number, or one for each of {n} images.")
    return value.expand(n)


def check_examples(images: Tensor, operation: Operation) -> None:
    """Refuse examples that a built-in operation cannot work on; the identity takes any."""
    if not operation.builtin or operation.code == 0:
        return
    fix = "give uint8 images [N, C, H, W], values 0..255, with 1 or 3 channels"
    if images.dtype != torch.uint8:
        got = f"{images.dtype}" + (
            f" from {images.min().item():.3g} to {images.max().item():.3g}"
            if images.numel() and not images.is_complex()
            else ""
        )
        raise UsageError(
            f"Operation '{operation.name}' got {got}. Fix: {fix}; images in 0..1 by (images * 255).round().to(torch.uint8). "
            "Normalise after augmenting."
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UsageError(f"Operation '{operation.name}' got images of shape {list(images.shape)}. Fix: {fix}.")
    if not 0 < min(images.shape[2:]) <= max(images.shape[2:]) <= MOST_PIXELS:
        raise UsageError(
            f"Operation '{operation.name}' got images of shape {list(images.shape)}: sides are 1 to {MOST_PIXELS} pixels."
        )
