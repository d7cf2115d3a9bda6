"""Doing to each example what was chosen for it.

A record is a dict of tensors; R operations follow each other on each of N examples:

    operation_NR   number of the operation, 0 (identity) for none
    magnitude_NR   its argument, with its sign
    center_NR2     a point, as shares of width and height

Further entries are the policy's own. The examples of a batch are grouped by primitive, never gone through one by one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from inloop.augment.registry import STRENGTHS, Operation, get_operation, operation_with_code
from inloop.augment.spaces import Space, get_space
from inloop.errors import UsageError


def apply(images: Tensor, actions: Mapping[str, Any]) -> Tensor:
    """The images, each with its operations done; new ones, the given stay as they are.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; for operations of your own whatever they work on, first axis N.
        actions: What a policy of ``inloop.augment`` sampled for N examples.
    """
    missing = {"operation", "magnitude", "center"} - set(actions if isinstance(actions, Mapping) else ())
    if missing:
        raise UsageError(
            f"The actions lack {', '.join(sorted(missing))}. Fix: give what an augmentation policy sampled."
        )
    operation_NR, magnitude_NR, center_NR2 = (actions[name] for name in ("operation", "magnitude", "center"))
    if len(operation_NR) != len(images):
        raise UsageError(
            f"{len(operation_NR)} actions were given for {len(images)} images; there must be one for each."
        )
    # Identities last, so that an image whose turn is an identity is finished.
    order_NR = (operation_NR == 0).byte().argsort(dim=1, stable=True)
    operation_NR, magnitude_NR = operation_NR.gather(1, order_NR), magnitude_NR.gather(1, order_NR)
    center_NR2 = center_NR2.gather(1, order_NR.unsqueeze(2).expand(-1, -1, 2)) * _size(images)
    rows, finished, finished_rows = torch.arange(len(images)), [], []
    for turn in range(operation_NR.shape[1]):
        operations, counts, order = _grouped(operation_NR[:, turn].index_select(0, rows))
        rows = rows.index_select(0, order)
        images = images.index_select(0, order.to(images.device))
        if operations and operations[0].code == 0:
            finished.append(images[: counts[0]])
            finished_rows.append(rows[: counts[0]])
            images, rows, operations, counts = images[counts[0] :], rows[counts[0] :], operations[1:], counts[1:]
        if not operations:
            break
        magnitude_n = magnitude_NR[:, turn].index_select(0, rows).to(images.device)
        center_n2 = center_NR2[:, turn].index_select(0, rows).to(images.device)
        images = _apply_grouped(images, operations, counts, magnitude_n, center_n2)
    back = torch.cat([*finished_rows, rows]).argsort().to(images.device)
    return torch.cat([*finished, images]).index_select(0, back)


def _size(images: Tensor) -> Tensor:
    """Width and height, of images; 1 for what has none."""
    sides = images.shape[:1:-1] if images.ndim == 4 else (1, 1)
    return torch.tensor(sides, dtype=torch.float64)


def _grouped(code_n: Tensor) -> tuple[list[Operation], list[int], Tensor]:
    """The operations among some codes, how many of each, and the order that sorts them so.

    The identity comes first, then those of one primitive side by side.
    """
    codes, which_n, counts = torch.unique(code_n, return_inverse=True, return_counts=True)
    operations = [operation_with_code(code) for code in codes.tolist()]
    primitives = list(dict.fromkeys(operation.primitive for operation in operations))
    place = sorted(
        range(len(operations)), key=lambda i: (operations[i].code != 0, primitives.index(operations[i].primitive))
    )
    order = torch.tensor(place, dtype=torch.long).argsort()[which_n].argsort()
    number = counts.tolist()
    return [operations[i] for i in place], [number[i] for i in place], order


def _apply_grouped(
    images: Tensor, operations: list[Operation], counts: list[int], magnitude_n: Tensor, center_n2: Tensor
) -> Tensor:
    """Do the first operation to the first so many images, and so on: prepared by operation, then done by primitive."""
    prepared: list[tuple[Callable[..., Tensor], list[Tensor], list[tuple[Tensor, ...]]]] = []
    parts = zip(operations, *(torch.split(part, counts) for part in (images, magnitude_n, center_n2)), strict=True)
    for operation, examples, magnitudes, centers in parts:
        check_examples(examples, operation)
        arguments = operation.prepare(examples, magnitudes, centers)
        if not prepared or prepared[-1][0] is not operation.primitive:
            prepared.append((operation.primitive, [], []))
        prepared[-1][1].append(examples)
        prepared[-1][2].append(arguments if isinstance(arguments, tuple) else (arguments,))
    done, start = [], 0
    for primitive, examples_of, arguments_of in prepared:
        count = sum(map(len, examples_of))
        together = [torch.cat(columns) for columns in zip(*arguments_of, strict=True)]
        done.append(primitive(images[start : start + count], *together))
        start += count
    return torch.cat(done)


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
        space: What a strength means.
        sign_N: +1 or -1, for rotate, shears and translates; drawn if None.
        center_N2: (x, y) in pixels, for cutout; drawn if None.
        generator: For what is drawn; by default torch's own.

    Example:
        >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        >>> apply_operation(images, "rotate", torch.tensor([0, 20]), sign_N=1).shape
        torch.Size([2, 3, 32, 32])
    """
    space, operation, n = get_space(space), get_operation(name), len(images)
    if name not in space.magnitudes:
        raise UsageError(f"Space '{space.name}' has no operation {name!r}; it has {', '.join(space.operations)}.")
    check_examples(images, operation)
    strength_N = _one_for_each("strength_N", strength_N, n)
    if not bool(((strength_N >= 0) & (strength_N < STRENGTHS)).all()) or strength_N.dtype.is_floating_point:
        got = f"{strength_N.dtype} from {strength_N.min().item()} to {strength_N.max().item()}"
        raise UsageError(f"Operation '{name}': strengths are whole numbers 0..{STRENGTHS - 1}; got {got}.")
    magnitude_N = torch.tensor(space.magnitudes[name], dtype=torch.float64)[strength_N.long().cpu()].to(images.device)
    if operation.signed:
        sign_N = draw_signs((n,), generator) if sign_N is None else _one_for_each("sign_N", sign_N, n)
        if not bool((sign_N.abs() == 1).all()):
            raise UsageError(f"Operation '{name}': signs are +1 or -1; got {sorted(set(sign_N.tolist()))}.")
        magnitude_N = magnitude_N * sign_N.to(magnitude_N)
    if center_N2 is None:
        center_N2 = torch.rand(n, 2, dtype=torch.float64, generator=generator) * _size(images)
    if center_N2.shape != (n, 2):
        raise UsageError(f"center_N2 has shape {list(center_N2.shape)}; give (x, y) in pixels for each of {n} images.")
    arguments = operation.prepare(images, magnitude_N, center_N2.to(images.device, torch.float64))
    return operation.primitive(images, *(arguments if isinstance(arguments, tuple) else (arguments,))).clone()


def draw_signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(2, shape, generator=generator) * 2 - 1


def _one_for_each(what: str, value: Tensor | int, n: int) -> Tensor:
    value = torch.as_tensor(value)
    if value.shape not in ((), (n,)):
        raise UsageError(f"{what} has shape {list(value.shape)}; give one number, or one for each of {n} images.")
    return value.expand(n)


def check_examples(images: Tensor, operation: Operation) -> None:
    """Refuse what an operation of ours cannot work on."""
    if not operation.builtin:
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
