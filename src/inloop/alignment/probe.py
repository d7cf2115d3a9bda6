"""Finding out where the examples are in each output, by trying: change their order at the entrance and see what moves.

Most models keep examples on the first axis. Some put them second, or fold them with positions into one axis; shapes alone cannot tell
[T, N] from [N, T] where T = N. So once for a model, two forward passes in evaluation mode are done on a twin of it, without
gradients: as given, and with the examples moved on by one. Of the layouts that are known, the first is taken under which
every layer's output has moved in the same way; if none is, for whatever reason, the first axis is left to the other checks.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from inloop.alignment.call import tensors_in
from inloop.alignment.layout import OPERATION, Layout, Layouts
from inloop.alignment.plan import Plan
from inloop.alignment.trace import Use
from inloop.alignment.twin import make_twin
from inloop.alignment.watch import Watch

_Seen = dict[tuple[str, int], list[tuple[torch.Size, dict[int, Tensor]]]]

_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[object, Layouts]]" = weakref.WeakKeyDictionary()


def layouts_of(model: nn.Module, plan: Plan, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Layouts:
    """The layouts of all outputs that do not simply have examples on the first axis."""
    tensors = tensors_in(inputs)
    num_examples = next((len(tensor) for tensor in tensors if tensor.dim()), 0)
    kind = tuple(site.name for site in plan.sites), tuple(tensor.dim() for tensor in tensors)
    known = _KNOWN.setdefault(model, {})
    if num_examples < 2:  # nothing can move
        return known.get(kind, {})
    if kind not in known:
        known[kind] = _try(model, plan, inputs, num_examples)
    return known[kind]


def _try(model: nn.Module, plan: Plan, inputs: tuple[tuple[Any, ...], dict[str, Any]], num_examples: int) -> Layouts:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.roll(1, 0) if tensor.dim() and len(tensor) == num_examples else tensor

    try:
        before = _outputs(model, plan, inputs)
        after = _outputs(model, plan, tree_map_only(Tensor, moved, inputs))
    except Exception:  # whatever a user's model may raise when it is called like this: nothing is known of it then
        return {}
    layouts = {}
    for key in before.keys() & after.keys():
        layout = next(
            (one for one in _candidates(before[key], num_examples) if _fits(one, before[key], after[key])), None
        )
        if layout is not None and layout != Layout():
            layouts[key] = layout
    return layouts


def _outputs(model: nn.Module, plan: Plan, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> _Seen:
    """The outputs of every recorded module and operation, as sums over all axes but one."""
    originals = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: value.detach().requires_grad_(value.requires_grad) for name, value in originals.items()}
    for name, canonical in plan.aliases.items():
        parameters[name] = parameters[canonical]  # tied, as in the model
    twin = make_twin(model, parameters)
    for module in twin.modules():
        module.training = False
    sites = tuple(replace(site, module=twin.get_submodule(site.name)) for site in plan.sites)
    seen: _Seen = {}

    def keep_use(use: Use, parameters: dict[str, Tensor], number: int) -> None:
        _keep_output(seen, (OPERATION, number), use.out)

    watch = Watch(twin, replace(plan, sites=sites), lambda: True, keep_use)
    for site in sites:
        site.module.register_forward_hook(_keep(seen, site.name))
    args, kwargs = tree_map_only(Tensor, Tensor.detach, inputs)
    devices = sorted({p.device.index or 0 for p in parameters.values() if p.device.type == "cuda"})
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):
        twin(*args, **kwargs)
    del watch
    return seen


def _keep(seen: _Seen, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        for index, out in enumerate(tensors_in(output)):
            _keep_output(seen, (name, index), out)

    return keep


def _keep_output(seen: _Seen, key: tuple[str, int], out: Tensor) -> None:
    with torch.no_grad():
        sums = {axis: _sums(out, axis) for axis in (0, 1) if out.dim() > axis}
    seen.setdefault(key, []).append((out.shape, sums))


def _sums(out: Tensor, axis: int) -> Tensor:
    """Two numbers for each place on the axis, [places, 2]."""
    rows = out.detach().double().movedim(axis, 0).flatten(1) if out.dim() > 1 else out.detach().double().unsqueeze(1)
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return torch.stack([rows @ weights, rows.abs() @ weights], dim=1)


def _candidates(calls: list[tuple[torch.Size, dict[int, Tensor]]], num_examples: int) -> list[Layout]:
    shape = calls[0][0]
    found = [Layout(axis) for axis in (0, 1) if len(shape) > axis and shape[axis] == num_examples]
    if shape and shape[0] != num_examples and shape[0] % num_examples == 0:
        fold = shape[0] // num_examples
        found += [Layout(0, fold), Layout(0, fold, positions_first=True)]
    return found


def _fits(layout: Layout, before: list[Any], after: list[Any]) -> bool:
    """Whether in all calls what belongs to one example has moved to the next."""
    if len(before) != len(after):
        return False
    for (shape, sums), (shape_after, sums_after) in zip(before, after, strict=True):
        rows, rows_after = sums.get(layout.axis), sums_after.get(layout.axis)
        if rows is None or rows_after is None or shape != shape_after or len(rows) % layout.fold:
            return False
        count = len(rows) // layout.fold
        if layout.positions_first:
            expected = rows.view(layout.fold, count, 2).roll(1, 1).reshape(-1, 2)
        else:
            expected = rows.view(count, layout.fold, 2).roll(1, 0).reshape(-1, 2)
        if not torch.allclose(rows_after, expected, rtol=1e-3, atol=1e-4 * float(rows[:, 1].mean()) + 1e-30):
            return False
    return True
