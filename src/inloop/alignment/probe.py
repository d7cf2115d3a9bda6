"""Finding out where the examples are in each output, by trying: exchange some examples at the entrance and see which rows change.

Most models keep examples on the first axis. Some put them second, or fold them with positions into one axis; shapes alone cannot tell
[T, N] from [N, T] where T = N, and nothing in a gradient can tell whose a row is. So in the first step the model is run twice
more, on twins that share its parameters (a sharded model has none, and is run itself): as given, and with half of the examples replaced by
others of the batch. Both passes draw the same random numbers, in the mode that the model is in, but for BatchNorm, which mixes
examples and is in evaluation mode here. Under the right layout only rows of replaced examples change. An output of which others
change, too, belongs to no examples, or to them in another order, and is refused. Where nothing can be found out, examples are taken
to be on the first axis, and the other checks remain: a model that cannot be run so (this is logged), or whose output is another each time.
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from inloop.alignment.call import Layout, Layouts, make_twin
from inloop.alignment.follow import Watch
from inloop.alignment.kept import tensors_in
from inloop.alignment.operation import Use, first_length
from inloop.alignment.plan import Plan
from inloop.distributed import gather_counts, is_sharded
from inloop.errors import UnsupportedLayerError

log = logging.getLogger("inloop")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# of each call: shape, rounding, sums over all axes but one, and whether it has a gradient
_Sums = list[tuple[torch.Size, float, dict[int, Tensor], bool]]
_Seen = dict[tuple[str, int], _Sums]

_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[object, Layouts]]" = weakref.WeakKeyDictionary()


def layouts_of(model: nn.Module, inputs: Inputs, plan: Plan) -> Layouts:
    """The layouts of all outputs that do not simply have examples on the first axis.

    Raises:
        UnsupportedLayerError: If the rows of an output are not the examples in their order.
    """
    num_examples = first_length(inputs) or 0
    options = tuple(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, bool | int | str))
    kind = tuple(site.name for site in plan.sites), tuple(tensor.dim() for tensor in tensors_in(inputs)), options
    known = _KNOWN.setdefault(model, {})
    if kind not in known:
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        if min(gather_counts(num_examples) if sharded else (num_examples,)) < 2:  # nothing can be exchanged
            return {}
        known[kind] = _try(model, plan, inputs, num_examples, sharded)
    return known[kind]


def _try(model: nn.Module, plan: Plan, inputs: Inputs, num_examples: int, sharded: bool = False) -> Layouts:
    outputs = _outputs_in_place if sharded else _outputs
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(0))
    replaced_N = torch.zeros(num_examples, dtype=torch.bool)
    replaced_N[order[: num_examples // 2]] = True
    has_square = any(tensor.shape == (num_examples, num_examples) for tensor in tensors_in(inputs))
    try:
        with _nothing_outside_moves(model):
            before = outputs(model, plan, _copied(inputs))
            found, lost = _find(before, outputs(model, plan, _exchanged(inputs, replaced_N)), replaced_N)
            if lost and has_square:  # which may be a mask over positions, and must stay as it is
                found, lost = _find(before, outputs(model, plan, _exchanged(inputs, replaced_N, False)), replaced_N)
            if lost:
                again = outputs(model, plan, _copied(inputs))
                lost = [key for key in lost if _changes(before[key], again.get(key, [])) <= 1]  # else it is random
    except Exception as error:  # whatever a user's model may raise when it is called like this
        log.warning(
            "inloop: could not find out where the examples are in the outputs of the model's layers (%s: %s). They are taken to be on the "
            "first axis; if they are not, rewards are wrong. inloop.check compares them with brute force",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return {}
    if lost:
        shape = tuple(before[lost[0]][0][0])
        raise UnsupportedLayerError(
            f"When some examples of the batch are exchanged, other rows of '{lost[0][0]}', of shape {shape}, change than theirs: the rows are "
            f"not the {num_examples} examples in their order, or examples depend on each other or on their place. Whose a row is cannot be "
            "told. Fix: give the layer a row for each example, in order (sort and route outside of the model), pass the batch as the "
            "model's first tensor, which is where the examples are counted, or leave the layer out with layers=."
        )
    return found


def _find(
    before: _Seen, after: _Seen, replaced_N: Tensor
) -> tuple[dict[tuple[str, int], Layout], list[tuple[str, int]]]:
    """Layouts other than the usual, and the outputs that have none."""
    found, lost = {}, []
    for key, calls in before.items():
        candidates = _candidates(calls[0][0], len(replaced_N))
        if not candidates:  # no axis can count the examples; other checks say so, and better
            continue
        fits = [one for one in candidates if _changes(calls, after.get(key, []), one, replaced_N) <= 1]
        if not fits:
            if all(requires_grad for *_, requires_grad in calls):
                lost.append(key)
        elif fits[0] != Layout():
            found[key] = fits[0]
    return found, lost


def _candidates(shape: torch.Size, num_examples: int) -> list[Layout]:
    """In the order of preference."""
    found = [Layout(axis) for axis in (0, 1) if len(shape) > axis and shape[axis] == num_examples]
    if shape and shape[0] != num_examples and shape[0] % num_examples == 0:
        found += [Layout(0, folded=True), Layout(0, folded=True, positions_first=True)]
    return found


def _changes(before: _Sums, after: _Sums, layout: Layout | None = None, replaced_N: Tensor | None = None) -> float:
    """How far rows have changed that belong to no replaced example; up to 1 is rounding. Without a layout all rows count."""
    if len(before) != len(after):
        return float("inf")
    worst = 0.0
    for (shape, rounding, sums, _), (shape_after, _, sums_after, _) in zip(before, after, strict=True):
        axis = 0 if layout is None else layout.axis
        rows, rows_after = sums.get(axis), sums_after.get(axis)
        if shape != shape_after or rows is None or rows_after is None:
            return 0.0 if rows is None and shape == shape_after else float("inf")
        kept = slice(None) if layout is None else ~_rows_of(layout, len(rows), replaced_N)
        spread = float((rows - rows.mean(dim=0)).abs().max()) if len(rows) else 0.0
        changed = (rows_after - rows)[kept].abs()
        worst = max(worst, float(changed.max()) / (1e-3 * spread + rounding) if changed.numel() else 0.0)
    return worst


def _rows_of(layout: Layout, num_rows: int, examples_N: Tensor | None) -> Tensor:
    """The rows that belong to the given examples."""
    assert examples_N is not None
    if len(examples_N) == num_rows:
        return examples_N
    fold = num_rows // len(examples_N)
    return examples_N.repeat(fold) if layout.positions_first else examples_N.repeat_interleave(fold)


# ---------------------------------------------------------------- passes


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


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def _copied(inputs: Inputs) -> Inputs:
    args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x), inputs)
    return args, kwargs


def _exchanged(inputs: Inputs, replaced_N: Tensor, squares: bool = True) -> Inputs:
    """A copy in which the replaced examples are those before them in the batch."""
    num_examples = len(replaced_N)

    def exchange(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != num_examples:
            return value
        if value.shape == (num_examples, num_examples) and not squares:
            return value
        rows = replaced_N.to(value.device).view(-1, *[1] * (value.dim() - 1))
        return torch.where(rows, value.roll(1, 0), value)

    args, kwargs = tree_map(exchange, _copied(inputs))
    return args, kwargs


def _sample(model: nn.Module) -> nn.Module:
    """A twin with the model's own parameters, but for those that are zero: a layer that starts at zero would show nothing."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = parameter.detach()
        if value.is_floating_point() and not bool(value.any()):
            value = (0.02 * torch.randn(value.shape, generator=generator)).to(value)
        parameters[name] = value.requires_grad_(parameter.requires_grad)
    twin = make_twin(model, parameters)
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.training = False
    return twin


def _outputs(model: nn.Module, plan: Plan, inputs: Inputs) -> _Seen:
    """The outputs of every recorded module and operation of a twin of the model."""
    twin = _sample(model)
    sites = tuple(replace(site, module=twin.get_submodule(site.name)) for site in plan.sites)
    seen: _Seen = {}
    watch = Watch(
        twin, replace(plan, sites=sites), lambda: True, lambda use, parameters, key: _keep_use(seen, use, key)
    )
    for site in sites:
        site.module.register_forward_hook(_keep(seen, site.name, watch), prepend=True)
    _seed()
    try:
        # With hooks of its own for what autograd saves: the model may run in a checkpoint, which counts that.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
            twin(*inputs[0], **inputs[1])
    finally:
        watch.leave_model(entirely=True)
        for (
            module
        ) in twin.modules():  # hooks know the watch, which knows the twin: without them all is released at once
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    return seen


def _outputs_in_place(model: nn.Module, plan: Plan, inputs: Inputs) -> _Seen:
    """The outputs of every recorded module of the model itself, in evaluation mode, without gradients."""
    seen: _Seen = {}
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        site.module.register_forward_hook(_keep(seen, site.name, None), prepend=True)
        for site in plan.sites
        if site.trainable()
    ]
    _seed()
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
    """Stands for a tensor that is saved for a backward pass that will not come."""


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
    """Two numbers for each place on the axis, [places, 2], in main memory."""
    rows = out.double().movedim(axis, 0)
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return torch.stack([rows @ weights, rows.abs() @ weights], dim=1).cpu()
