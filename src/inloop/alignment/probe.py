"""Find where the examples are in each output by trial: exchange some at the entrance and see which rows change.

Most models keep examples on the first axis. Some put them second, or fold them with positions into one axis. Shapes
cannot tell [T, N] from [N, T] if T = N, and gradients do not tell the owner of a row. So in the first step the probe
runs the model three more times: as given, and twice with half of the examples replaced by others of the batch. It runs
twins that share the model's parameters and mode, but with BatchNorm, which mixes examples, in evaluation mode. (A
sharded model has no twins and runs itself, in evaluation mode.) All passes draw the same random numbers. Under the
right layout only rows of replaced examples change. If others change too, examples may depend on all others alike; then
the probe puts all into another order, without dropout, and the rows must move with them. An output that passes neither test may
belong to a few examples in a way that only their gradients show: brute force decides (``trial.py``). If that disagrees,
too, the model is refused. If the model cannot run so, the first axis is assumed, with a warning; other checks remain.
"""

import ast
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from inloop.alignment.call import SHARED, Layout, Layouts, make_twin
from inloop.alignment.follow import Found, Watch
from inloop.alignment.inputs import (
    Inputs,
    copied,
    exchanged,
    has_several_rows,
    neighbours,
    num_examples_of,
    tensors_of,
)
from inloop.alignment.kept import tensors_in
from inloop.alignment.operation import HANDED_OVER, Use
from inloop.alignment.plan import Plan
from inloop.alignment.trial import agrees_with_brute_force
from inloop.distributed import gather_counts, gather_numbers, is_sharded
from inloop.errors import UnsupportedLayerError

log = logging.getLogger("inloop")

# for each call: shape, rounding, sums over all axes but one, and whether it has a gradient
_Sums = list[tuple[torch.Size, float, dict[int, Tensor], bool]]
_Key = tuple[str, int]
_Seen = dict[_Key, _Sums]

_OUTPUT = "the model's output"
_MOST_KINDS = 16
_AXES = (0, 1, 2)
_MOST_GROUPS = 257  # of all examples, on one axis
_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[object, Layouts]]" = weakref.WeakKeyDictionary()


def find_examples(model: nn.Module, part: str, inputs: Inputs, announced: int | None, plan: Plan) -> Found:
    """Find the examples of a pass in all outputs.

    Args:
        part: The name of the part of the model that is called with these inputs; "" for the model.
        announced: How many examples the pass should have, if that is known. The first tensor counts them, unless it has
            several rows for each, such as the patches of all images.

    Raises:
        UnsupportedLayerError: If the rows of an output are not the examples in their order.
    """
    tensors, counted = tensors_of(inputs), num_examples_of(inputs)
    if any(tensor.is_nested for tensor in tensors):
        return Found(counted, {})  # refused by the first layer
    if (
        announced is not None
        and announced > 1
        and not part
        and has_several_rows(tensors[0] if tensors else None, announced)
    ):
        with suppress(UnsupportedLayerError):
            return Found(announced, _known_layouts(model, part, plan, inputs, announced, only_folded=True))
    return Found(counted, _known_layouts(model, part, plan, inputs, counted or 0))


def _known_layouts(
    model: nn.Module, part: str, plan: Plan, inputs: Inputs, num_examples: int, only_folded: bool = False
) -> Layouts | None:
    """Return the layouts as the first pass of this kind has shown them."""
    options = tuple(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, bool | int | str))
    dims = tuple(tensor.dim() for tensor in tensors_of(inputs))
    kind = part, tuple(site.name for site in plan.sites), dims, options, only_folded
    known = _KNOWN.setdefault(model, {})
    # A number among the options may count steps, say. If it makes no difference, try no more.
    if kind not in known and len(known) >= _MOST_KINDS:
        first, *others = known.values()
        if all(layouts == first for layouts in others):
            return first
        known.clear()
    if kind not in known:
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        if min(gather_counts(num_examples) if sharded else (num_examples,)) < 2:  # too few to exchange
            return None
        try:
            known[kind] = _try(model, part, plan, inputs, num_examples, sharded, only_folded)
        except UnsupportedLayerError:
            if not part:
                raise
            known[kind] = {}  # the first input of a part need not have the examples
    return known[kind]


def _try(
    model: nn.Module, part: str, plan: Plan, inputs: Inputs, num_examples: int, sharded: bool, only_folded: bool
) -> Layouts:
    groups = _groups(num_examples)
    has_square = any(tensor.shape == (num_examples, num_examples) for tensor in tensors_of(inputs))
    has_folded = any(has_several_rows(tensor, num_examples) for tensor in tensors_of(inputs)) and not sharded
    before: _Seen = {}
    shared: dict[_Key, Layout] = {}  # outputs that belong to no example: parameters are followed from them to the data

    def outputs(inputs: Inputs, dropout: bool = True) -> _Seen:
        if sharded:
            return _outputs_in_place(model, part, plan, inputs)
        return _outputs(model, part, plan, inputs, shared, dropout)

    def anyone(lost: list[_Key]) -> bool:
        """Whether a process lost an output: all run a sharded model together, as often as one of them needs it."""
        return bool(gather_numbers(bool(lost)).any()) if sharded else bool(lost)

    def after(**how: Any) -> tuple[dict[_Key, Layout], list[_Key]]:
        """The layouts that fit if examples are exchanged in this way, and the outputs that fit none."""
        nonlocal before
        given = [exchanged(inputs, neighbours(some), **how) for some in groups]
        # The first input of a part need not be the batch, and equal examples show nothing.
        may_be_shared = not part and all(_differ(inputs, others) for others in given)
        seen = [outputs(others) for others in given]
        if not sharded and any(each.keys() != before.keys() for each in seen):  # the first pass may have filled a cache
            before = outputs(copied(inputs))
        return _find(before, list(zip(seen, groups, strict=True)), may_be_shared)

    try:
        with _nothing_outside_moves(model):
            before = outputs(copied(inputs))
            how: dict[str, Any] = {}
            found, lost = ({}, list(before)) if only_folded else after()
            if anyone(lost) and has_square and not only_folded:  # it may be a mask over positions, which must stay
                how = {"squares": False}
                found, lost = after(**how)
            if has_folded and (lost or SHARED in found.values()):
                together, lost_together = after(folded="together")
                if not lost_together and after(folded="apart")[1]:  # else the rows might be apart as well
                    how = {"folded": "together"}
                    found, lost = together, []
            while not sharded and not lost and (new := [k for k in found if found[k] is SHARED and k not in shared]):
                shared |= dict.fromkeys(new, SHARED)
                before = outputs(copied(inputs))
                found, lost = after(**how)
            if anyone(lost) and not only_folded and num_examples > 2:  # two have one other order, which shows little
                found |= _find_moved(outputs, inputs, num_examples, lost)
            lost = [key for key in lost if key not in found]
            if lost and not sharded and not only_folded:
                _set_seed(0)
                twin = _sample(model)
                lost = [] if agrees_with_brute_force(twin, part, plan, inputs, found, num_examples) else lost
    except Exception as error:  # a user's model may raise anything when called like this
        log.warning(
            "inloop: could not find out where the examples are in the outputs of the model's layers (%s: %s). They are taken to be on the "
            "first axis; if they are not, rewards are wrong. inloop.check compares them with brute force",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return {}
    if lost:
        lost.sort(key=lambda key: key[0] == _OUTPUT)
        shape = tuple(before[lost[0]][0][0])
        raise UnsupportedLayerError(
            f"When some of the batch's {num_examples} examples are exchanged, other rows of {_named(lost[0][0])}, of shape {shape}, change than theirs, or "
            f"none. So it is unknown whose a row is. {_REASONS}"
        )
    return {key: layout for key, layout in (found | shared).items() if layout != Layout() and key[0] != _OUTPUT}


_REASONS = """Fix: see which of the usual reasons it is.
  - examples are not on the first axis of the model's input ([positions, N, ...]): transpose it, with batch_first=True in the layers
  - the model sorts, shifts or routes examples: do that outside of it, and give each layer a row for each example, in order
  - the model compares examples (contrastive scores): leave that layer out
  - the first tensor that the model is given is not the batch (a mask): pass the batch first, or say capture(num_examples=N), as a learner does by itself
  - all examples share it, and it has as many rows as there are examples (texts of classes): hold it in a buffer of the model
Or leave the layer out with layers=."""


def _named(key: str) -> str:
    """Name a layer, the output of the model, or an operation with its parameters, whose key is the text of a tuple."""
    if key == _OUTPUT or not key.startswith("("):
        return key if key == _OUTPUT else f"'{key}'"
    *parameters, operation = ast.literal_eval(key)
    return f"parameter '{', '.join(parameters)}' {operation}"


def _differ(inputs: Inputs, others: Inputs) -> bool:
    pairs = zip(tensors_of(inputs), tensors_of(others), strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)


def _groups(num_examples: int) -> list[Tensor]:
    """Return masks of two halves of the examples, [N], that overlap by half: rows in another order do not fit both."""
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(0), device="cpu")
    half, start = num_examples // 2, max(1, num_examples // 4)
    groups = torch.zeros(2, num_examples, dtype=torch.bool, device="cpu")
    groups[0, order[:half]] = True
    groups[1, order[start : start + half]] = True
    return list(groups)


def _find(
    before: _Seen, exchanges: list[tuple[_Seen, Tensor]], may_be_shared: bool
) -> tuple[dict[_Key, Layout], list[_Key]]:
    """Return the layouts under which only rows of replaced examples change, and the outputs that fit none.

    Args:
        exchanges: The outputs after each exchange, and a mask of the replaced examples.
        may_be_shared: Whether an output that does not change belongs to no example.
    """
    found, lost = {}, []
    for key, calls in before.items():
        candidates = _candidates(calls[0][0], len(exchanges[0][1]))
        fits = [
            one for one in candidates if all(_fits(calls, after.get(key, []), one, some) for after, some in exchanges)
        ]
        if fits:
            found[key] = fits[0]
        elif (
            may_be_shared
            and HANDED_OVER not in key[0]
            and all(_misfit(calls, after.get(key, []), None, _same) <= 1 for after, _ in exchanges)
        ):
            found[key] = SHARED
        elif candidates and all(requires_grad for *_, requires_grad in calls):  # else other checks say it better
            lost.append(key)
    return found, lost


def _fits(before: _Sums, after: _Sums, layout: Layout, replaced_N: Tensor) -> bool:
    """Whether only rows of replaced examples change, and some do if these examples differ from their replacements."""
    n = len(replaced_N)
    if _misfit(before, after, layout, lambda rows, later: (later - rows)[~replaced_N], n) > 1:
        return False
    differ = _misfit(before, after, layout, lambda rows, later: (rows.roll(1, 0) - rows)[replaced_N], n) > 1
    return not differ or _misfit(before, after, None, _same) > 1


def _find_moved(
    outputs: Callable[..., _Seen], inputs: Inputs, num_examples: int, keys: list[_Key]
) -> dict[_Key, Layout]:
    """Return layouts of outputs that depend on all examples alike (batch statistics): rows move with the examples.

    They move to any place: a model that moves its examples on by one, and back, would pass if they were only moved on by one.
    """
    order_N = torch.randperm(num_examples, generator=torch.Generator().manual_seed(1), device="cpu")
    if (
        len(((order_N - torch.arange(num_examples, device="cpu")) % num_examples).unique()) == 1
    ):  # all moved on alike, or none
        order_N[:2] = order_N[:2].flip(0)

    def moved(rows: Tensor, rows_after: Tensor) -> Tensor:
        return rows_after - rows[order_N]

    before = outputs(copied(inputs), dropout=False)
    after = outputs(exchanged(inputs, order_N), dropout=False)
    found: dict[_Key, Layout] = {}
    for key in keys:
        calls = before.get(key, [])
        for layout in _candidates(calls[0][0], num_examples) if calls else []:
            if _misfit(calls, after.get(key, []), layout, moved, num_examples) <= 1:
                found.setdefault(key, layout)
    return found


def _candidates(shape: torch.Size, num_examples: int) -> list[Layout]:
    """Return the possible layouts, in order of preference."""
    found = [Layout(axis) for axis in _AXES if len(shape) > axis and shape[axis] == num_examples]
    for axis in _AXES:
        if len(shape) > axis and shape[axis] > num_examples and shape[axis] % num_examples == 0:
            found += [Layout(axis, folded=True), Layout(axis, folded=True, positions_first=True)]
            each = shape[axis] // num_examples
            found += [Layout(axis, folded=True, groups=n) for n in range(2, min(each, _MOST_GROUPS)) if each % n == 0]
    return found


def _same(rows: Tensor, rows_after: Tensor) -> Tensor:
    return rows_after - rows


def _misfit(
    before: _Sums,
    after: _Sums,
    layout: Layout | None,
    difference: Callable[[Tensor, Tensor], Tensor],
    num_examples: int = 1,
) -> float:
    """Return how far the calls after are from those expected; up to 1 is rounding.

    Args:
        layout: Where the examples are in the rows; None if each row counts by itself.
        difference: Maps the rows by example before and after, [N, rows of each, 2], to values that should be zero.
    """
    if len(before) != len(after):
        return float("inf")
    worst = 0.0
    for (shape, rounding, sums, _), (shape_after, _, sums_after, _) in zip(before, after, strict=True):
        axis = 0 if layout is None else layout.axis
        rows, rows_after = sums.get(axis), sums_after.get(axis)
        if shape != shape_after or rows is None or rows_after is None:
            return 0.0 if rows is None and shape == shape_after else float("inf")
        if layout is not None and len(rows) % (num_examples * layout.groups):  # another call of the same layer
            return float("inf")
        if not len(rows):  # an expert that got nothing
            continue
        far = difference(_by_example(layout, rows, num_examples), _by_example(layout, rows_after, num_examples)).abs()
        spread = float((rows - rows.mean(dim=0)).abs().max())
        worst = max(worst, float(far.max()) / (1e-3 * spread + rounding) if far.numel() else 0.0)
    return worst


def _by_example(layout: Layout | None, rows: Tensor, num_examples: int) -> Tensor:
    """Group the rows by example, [N, rows of each, 2]."""
    if layout is None:
        return rows
    if layout.positions_first:
        return rows.view(-1, num_examples, 2).transpose(0, 1)
    return rows.view(layout.groups, num_examples, -1, 2).transpose(0, 1).flatten(1, 2)


# ---------------------------------------------------------------- passes


@contextmanager
def _nothing_outside_moves(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of torch, Python and numpy afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def _sample(model: nn.Module, dropout: bool = True) -> nn.Module:
    """Return a twin with the model's parameters, random where all zero: a layer that starts at zero shows nothing."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = parameter.detach()
        if value.is_floating_point() and not bool(value.any()):
            value = (0.02 * torch.randn(value.shape, generator=generator, device="cpu")).to(value)
        parameters[name] = value.requires_grad_(parameter.requires_grad)
    twin = make_twin(model, parameters, copy_tensors=True)
    for module in twin.modules():
        is_off = isinstance(module, _BatchNorm) or (not dropout and isinstance(module, _DropoutNd))
        module.training = module.training and not is_off
    return twin


def _outputs(model: nn.Module, part: str, plan: Plan, inputs: Inputs, shared: Layouts, dropout: bool) -> _Seen:
    """Return the outputs of every recorded module and operation of a twin of the model.

    Args:
        shared: Those that are known to belong to no example.
    """
    twin = _sample(model, dropout)
    sites = tuple(replace(site, module=twin.get_submodule(site.name)) for site in plan.sites)
    seen: _Seen = {}
    watch = Watch(
        twin, replace(plan, sites=sites), lambda: True, lambda use, parameters, key: _keep_use(seen, use, key)
    )
    watch.layouts = shared
    for site in sites:
        site.module.register_forward_hook(_keep(seen, site.name, watch), prepend=True)
    _set_seed(0)
    try:
        # Use our own saved-tensor hooks: the model may run in a checkpoint, which counts the saved tensors.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
            results = twin.get_submodule(part)(*inputs[0], **inputs[1])
        for index, out in enumerate(tensors_in(results) if not part else ()):
            if out.is_floating_point() or out.is_complex():  # places of words, say, are whole numbers
                _keep_output(seen, (_OUTPUT, index), out, out.requires_grad)
    finally:
        watch.leave_model(entirely=True)
        # The hooks refer to the watch, which refers to the twin. Without them all is released at once.
        for module in twin.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    return seen


def _outputs_in_place(model: nn.Module, part: str, plan: Plan, inputs: Inputs) -> _Seen:
    """Return the outputs of every recorded module of the model itself, in evaluation mode, without gradients."""
    seen: _Seen = {}
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        site.module.register_forward_hook(_keep(seen, site.name, None), prepend=True)
        for site in plan.sites
        if site.trainable()
    ]
    _set_seed(0)
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            model.get_submodule(part)(*inputs[0], **inputs[1])
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()
    return seen


def _nothing(value: Any) -> Any:
    """Replace a tensor saved for a backward pass that will not come."""


def _keep(seen: _Seen, name: str, watch: Watch | None) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if watch is not None and watch.follows_operations:
            return
        packed = any(isinstance(part, PackedSequence) for part in (output if isinstance(output, tuple) else ()))
        for index, out in enumerate(tensors_in(output)):
            # With gradients off this may be a reentrant checkpoint, which runs again with them on.
            if (out.requires_grad or not torch.is_grad_enabled()) and not (packed and index == 0):
                _keep_output(seen, (name, index), out, out.requires_grad or watch is None)

    return keep


def _keep_use(seen: _Seen, use: Use, key: tuple[str, int]) -> None:
    _keep_output(seen, key, use.out, True)


def _keep_output(seen: _Seen, key: tuple[str, int], out: Tensor, has_gradient: bool) -> None:
    real = torch.view_as_real(out.detach().resolve_conj()) if out.is_complex() else out.detach()
    sums = {axis: _sums(real, axis) for axis in _AXES if out.dim() > axis}
    largest = max((float(values[:, 1].max()) for values in sums.values() if len(values)), default=0.0)
    rounding = 300 * torch.finfo(real.dtype).eps * largest + 1e-30
    seen.setdefault(key, []).append((out.shape, rounding, sums, has_gradient))


def _sums(out: Tensor, axis: int) -> Tensor:
    """Return two numbers for each place on the axis, [places, 2], in main memory."""
    rows = out.double().movedim(axis, 0)
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return torch.stack([rows @ weights, rows.abs() @ weights], dim=1).cpu()
