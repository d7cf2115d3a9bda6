"""Finding out where the examples are in each output, by trying: change their order at the entrance and see what moves.

Most models keep examples on the first axis. Some put them second, or fold them with positions into one axis; shapes alone cannot tell
[T, N] from [N, T] where T = N, and nothing in a gradient can tell whose a row is. So once for a model, forward passes in evaluation
mode are done on copies of it, which share nothing with it (a sharded model has none, and is run itself): twice as given, and with the examples moved on by one. Parameters are
disturbed a little, so that a layer that starts at zero has an output, too. Under the right layout what belongs to an example has moved
to the next. An output that is the same each time, but does not move along under any layout, belongs to no examples, or to them in
another order, and is refused. Where nothing can be found out (the model cannot be run so, or is random in evaluation mode),
examples are taken to be on the first axis, and the other checks remain; the former is said.
"""

import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from inloop.alignment.call import tensors_in
from inloop.alignment.layout import Layout, Layouts
from inloop.alignment.plan import Plan
from inloop.alignment.trace import Use, first_length
from inloop.alignment.twin import MODULE_TABLES, remove_hooks
from inloop.alignment.watch import Watch
from inloop.distributed import gather_counts, is_sharded
from inloop.errors import UnsupportedLayerError

log = logging.getLogger("inloop")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# of each call: shape, rounding, sums over all axes but one, and whether it has a gradient
_Sums = list[tuple[torch.Size, float, dict[int, Tensor], bool]]
_Seen = dict[tuple[str, int], _Sums]

_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[object, Layouts]]" = weakref.WeakKeyDictionary()


def layouts_of(model: nn.Module, plan: Plan, inputs: Inputs) -> Layouts:
    """The layouts of all outputs that do not simply have examples on the first axis.

    Raises:
        UnsupportedLayerError: If the rows of an output are not the examples in their order.
    """
    tensors = tensors_in(inputs)
    num_examples = first_length(inputs) or 0
    options = tuple(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, bool | int | str))
    kind = tuple(site.name for site in plan.sites), tuple(tensor.dim() for tensor in tensors), options
    known = _KNOWN.setdefault(model, {})
    if kind in known:
        return known[kind]
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if min(gather_counts(num_examples) if sharded else (num_examples,)) < 2:  # nothing can move
        return {}
    known[kind] = _try(model, plan, inputs, num_examples, sharded)
    return known[kind]


def _try(model: nn.Module, plan: Plan, inputs: Inputs, num_examples: int, sharded: bool = False) -> Layouts:
    try:
        with _nothing_outside_moves(model):
            # No process has a whole sharded model, so that is tried itself, by all of them together.
            sample, outputs = (model, _outputs_in_place) if sharded else (_disturbed(model), _outputs)
            before, again = (outputs(sample, plan, _copied(inputs), seed) for seed in range(2))
            moved = [
                outputs(sample, plan, _moved(_copied(inputs), num_examples, squares), 0) for squares in (True, False)
            ]
    except Exception as error:  # whatever a user's model may raise when it is copied or called like this
        log.warning(
            "where the examples are in the outputs of the model's layers could not be found out (%s: %s); they are taken to be on the first axis. "
            "If they are not everywhere, rewards are wrong: inloop.check compares them with brute force",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return {}
    # A square tensor may be a mask over positions, which must stay as it is.
    found, lost = min((_find(before, again, after, num_examples) for after in moved), key=lambda result: len(result[1]))
    if lost:
        name, shape = lost[0]
        raise UnsupportedLayerError(
            f"When the examples of the batch change places, the rows of '{name}', of shape {tuple(shape)}, do not move along: they are not the "
            f"{num_examples} examples in their order, or examples depend on each other or on their place. Whose a row is cannot be told. "
            "Fix: give the layer a row for each example, in order (sort and route outside of the model), pass the batch as the model's first "
            "tensor, which is where the examples are counted, or leave the layer out with layers=."
        )
    return found


def _find(
    before: _Seen, again: _Seen, after: _Seen, num_examples: int
) -> tuple[dict[tuple[str, int], Layout], list[tuple[str, torch.Size]]]:
    """Layouts other than the usual, and the names and shapes of outputs that have none."""
    found, lost = {}, []
    for key, calls in before.items():
        if key not in again or key not in after or _misfit(Layout(), calls, again[key], 0) > 1:
            continue  # random
        fits = {one: _misfit(one, calls, after[key], 1, num_examples) for one in _candidates(calls, num_examples)}
        if not fits:  # no axis can count the examples; other checks say so, and better
            continue
        best = min(fits, key=lambda one: fits[one])
        if fits[best] > 1:
            if all(requires_grad for *_, requires_grad in calls):
                lost.append((key[0], calls[0][0]))
        elif fits.get(Layout(), 2.0) > 1 or (best != Layout() and fits[best] < 0.1 * fits[Layout()]):
            found[key] = best
    return found, lost


def _candidates(calls: _Sums, num_examples: int) -> list[Layout]:
    shape = calls[0][0]
    found = [Layout(axis) for axis in (0, 1) if len(shape) > axis and shape[axis] == num_examples]
    if shape and shape[0] != num_examples and shape[0] % num_examples == 0:
        found += [Layout(0, folded=True), Layout(0, folded=True, positions_first=True)]
    return found


def _misfit(layout: Layout, before: _Sums, after: _Sums, by: int, num_examples: int = 1) -> float:
    """How far the calls after are from those before with examples moved; up to 1 is rounding."""
    if len(before) != len(after):
        return float("inf")
    worst = 0.0
    for (shape, rounding, sums, _), (shape_after, _, sums_after, _) in zip(before, after, strict=True):
        rows, rows_after = sums.get(layout.axis), sums_after.get(layout.axis)
        if rows is None or rows_after is None or shape != shape_after or len(rows) % num_examples:
            return 0.0 if rows is None and shape == shape_after else float("inf")
        if layout.positions_first:
            expected = rows.view(-1, num_examples, 2).roll(by, 1).reshape(-1, 2)
        else:
            expected = rows.view(num_examples, -1, 2).roll(by, 0).reshape(-1, 2)
        spread = float((rows - rows.mean(dim=0)).abs().max()) if len(rows) else 0.0
        difference = float((rows_after - expected).abs().max()) if len(rows) else 0.0
        worst = max(worst, difference / (1e-3 * spread + rounding))
    return worst


# ---------------------------------------------------------------- passes of copies


@contextmanager
def _nothing_outside_moves(model: nn.Module) -> Iterator[None]:
    """Random generators, of torch, Python and numpy, are afterwards as they were before."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002


class _Uncompiled(nn.Module):
    """What ``torch.compile`` was given, with its parameters under the names that they have in the compiled model."""

    def __init__(self, compiled: nn.Module) -> None:
        super().__init__()
        self._orig_mod = compiled.get_submodule("_orig_mod")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def _copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy with buffers and attributes of its own, but for attributes that cannot be copied (locks, iterators, what an earlier pass left)."""
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # of whatever a user's module may hold
        own = [value for part in model.modules() for name, value in vars(part).items() if name not in MODULE_TABLES]
        return copy.deepcopy(model, memo | {id(value): value for value in own if not _can_be_copied(value, memo)})


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _disturbed(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without hooks, with other parameters."""
    sample = _copy(_Uncompiled(model) if hasattr(model, "_orig_mod") else model, {})
    remove_hooks(sample)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in sample.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * (0.1 * float(parameter.float().abs().mean()) + 0.02))
    for module in sample.modules():
        module.training = False
    return sample


def _copied(inputs: Inputs) -> Inputs:
    args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x), inputs)
    return args, kwargs


def _moved(inputs: Inputs, num_examples: int, squares: bool) -> Inputs:
    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != num_examples:
            return value
        return value if value.shape == (num_examples, num_examples) and not squares else value.roll(1, 0)

    args, kwargs = tree_map(move, inputs)
    return args, kwargs


def _outputs(sample: nn.Module, plan: Plan, inputs: Inputs, seed: int) -> _Seen:
    """The outputs of every recorded module and operation of a copy of ``sample``."""
    model = _copy(sample, {id(parameter): parameter for parameter in sample.parameters()})
    sites = tuple(replace(site, module=model.get_submodule(site.name)) for site in plan.sites)
    seen: _Seen = {}
    watch = Watch(
        model, replace(plan, sites=sites), lambda: True, lambda use, parameters, key: _keep_use(seen, use, key)
    )
    for site in sites:
        site.module.register_forward_hook(_keep(seen, site.name, watch), prepend=True)
    torch.manual_seed(seed)  # another one shows what is random
    try:
        # With hooks of its own for what autograd saves: the model may run in a checkpoint, which counts that.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
            model(*inputs[0], **inputs[1])
    finally:
        watch.leave_model(entirely=True)
        remove_hooks(model)  # which know the watch, which knows the model: without them all is let go at once
    return seen


def _outputs_in_place(model: nn.Module, plan: Plan, inputs: Inputs, seed: int) -> _Seen:
    """The outputs of every recorded module of the model itself, in evaluation mode, without gradients."""
    seen: _Seen = {}
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        site.module.register_forward_hook(_keep(seen, site.name, None), prepend=True)
        for site in plan.sites
        if site.trainable()
    ]
    torch.manual_seed(seed)
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            model(*inputs[0], **inputs[1])
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()
    return seen


def _nothing(value: Any) -> Any:
    """What is kept for a backward pass that will not come."""


def _keep(seen: _Seen, name: str, watch: Watch | None) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if watch is not None and watch.follows_operations:
            return
        packed = any(isinstance(part, PackedSequence) for part in (output if isinstance(output, tuple) else ()))
        for index, out in enumerate(tensors_in(output)):
            # Without gradients it may be a reentrant checkpoint, which will be run again with them.
            if (out.requires_grad or not torch.is_grad_enabled()) and not (packed and index == 0):
                _keep_output(seen, (name, index), out, out.requires_grad or watch is None)

    return keep


def _keep_use(seen: _Seen, use: Use, key: tuple[str, int]) -> None:
    _keep_output(seen, key, use.out, True)


def _keep_output(seen: _Seen, key: tuple[str, int], out: Tensor, has_gradient: bool) -> None:
    real = torch.view_as_real(out.detach().resolve_conj()) if out.is_complex() else out.detach()
    sums = {axis: _sums(real, axis) for axis in (0, 1) if out.dim() > axis}
    largest = max((float(values[:, 1].max()) for values in sums.values() if len(values)), default=0.0)
    rounding = 300 * torch.finfo(real.dtype).eps * largest + 1e-30
    seen.setdefault(key, []).append((out.shape, rounding, sums, has_gradient))


def _sums(out: Tensor, axis: int) -> Tensor:
    """Two numbers for each place on the axis, [places, 2]."""
    rows = out.double().movedim(axis, 0)
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return torch.stack([rows @ weights, rows.abs() @ weights], dim=1)
