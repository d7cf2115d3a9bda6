"""Run a model, or a checkpointed part of one, again layer by layer to align it: the tape keeps hardly anything of it.

The whole model is one recorded call: its input, the gradient of its output, its parameters. When a direction is known,
the model runs forward and backward once more as in step t, a quarter of the examples at a time if they do not depend on
each other. Each layer's call is aligned when its gradient arrives, and none is kept. The pass computes weight gradients
only for the first layers, which it must reach.

``retain="recompute"`` does so with the whole model. With activation checkpointing, each checkpointed module is such a
call, a *segment*: recording its layers would keep the very activations that its checkpoint releases. The first step
reveals the segments: they are called during the backward pass.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.black_box import RunAgain, graph_of
from inloop.alignment.call import LayerCall, Layouts, Recorded, make_twin
from inloop.alignment.inputs import num_examples_of
from inloop.alignment.kept import Kept, tensors_in
from inloop.alignment.plan import LayerFilter, Plan, Site, as_predicate, make_plan
from inloop.alignment.probe import find_examples
from inloop.alignment.recorder import Recorder
from inloop.alignment.tape import Tape, batch_sizes
from inloop.alignment.verify import refuse_unseen_uses
from inloop.errors import UnsupportedLayerError, UsageError
from inloop.hooks import Hook, remove_all
from inloop.uncompiled import not_compiled

_NUM_PARTS = 4  # of a batch, to run again one after the other
_CANNOT_RUN = (RuntimeError, ValueError, IndexError, UnsupportedLayerError)


@dataclass(eq=False, kw_only=True)
class ModelCall(RunAgain):
    """A call of a model or a segment, with everything needed to run it again layer by layer.

    Attributes:
        plan: The layers of the model.
        model: The model itself, to find where the examples are in its layers' outputs.
        owns_parameters: Whether ``layer`` has copies of the parameters, not the model's own.
    """

    plan: Plan
    model: "weakref.ref[nn.Module]"
    owns_parameters: bool = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{type(self.layer).__name__}, run again"

    def own_parameters(self) -> "ModelCall":
        if self.owns_parameters:
            return self
        named = dict(self.layer.named_parameters(remove_duplicate=False))
        copies = {value.data_ptr(): value.clone() for value in named.values()}  # one for all names of a tied parameter
        twin = make_twin(self.layer, {name: copies[value.data_ptr()] for name, value in named.items()})
        return self.but(layer=twin, owns_parameters=True)

    def align(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor:
        """Return the sum of the contributions of all layer calls."""
        self.refuse_overwritten()
        named = dict(self.layer.named_parameters(remove_duplicate=False))
        along: dict[str, Tensor] = {}
        for name in self.parameter_names:
            value = direction.get(name)
            along[self.plan.aliases[name]] = (
                torch.zeros_like(named[name]) if value is None else value.to(named[name].dtype)
            )
        layouts = self._layouts()
        parts = _parts(self, [slice(0, 1)])
        if len(parts) > 1:
            try:
                return torch.cat([_align_part(part, along, layouts) for part in parts])
            except _CANNOT_RUN:
                pass  # one example could run alone, but a part cannot
        return _align_part(self, along, layouts)

    def visit_layers(self, visit: Callable[[Kept], None]) -> None:
        """Run again and call ``visit`` with each layer's call, of some of the examples, when its gradient arrives."""
        self.refuse_overwritten()
        layouts = self._layouts()

        def visit_as_of_the_model(call: Recorded) -> None:
            names = {local: self.parameter_names[name] for local, name in call.parameter_names.items()}
            visit(call.but(parameter_names=names))

        for part in _parts(self, _slices(self)):  # try all parts first: a visit cannot be undone
            _run_again(part, layouts, visit_as_of_the_model)

    def _layouts(self) -> Layouts:
        model = self.model()
        if model is None:
            return {}
        return find_examples(model, "", (self.args, self.kwargs), None, self.plan).layouts or {}


def model_call(site: Site) -> Callable[..., ModelCall]:
    """Return a function that makes the calls of a site with an inner plan."""
    assert site.inner is not None
    return partial(ModelCall, plan=site.inner, model=weakref.ref(site.module))


def whole_site(model: nn.Module, plan: Plan) -> Site:
    """Return a model, or a part of one, as one module to record, which runs again layer by layer by its ``plan``."""
    recorded = plan.counted()
    names = {name: canonical for name, canonical in plan.aliases.items() if canonical in recorded}
    return Site("", model, None, names, inner=plan)


def _align_part(call: ModelCall, along: Mapping[str, Tensor], layouts: Layouts) -> Tensor:
    contributions_N = torch.zeros(call.num_examples, dtype=call.dtype, device=call.device)
    shapes = [call.shapes()]

    def add(layer_call: Recorded) -> None:
        shapes.append(layer_call.shapes())
        batch_sizes([shapes[0], shapes[-1]])
        contributions_N.add_(
            layer_call.align({local: along[name] for local, name in layer_call.parameter_names.items()})
        )

    _run_again(call, layouts, add)
    batch_sizes(shapes)
    return contributions_N


def _slices(call: ModelCall) -> list[slice]:
    rows = max(1, -(-call.num_examples // _NUM_PARTS))
    return [slice(start, start + rows) for start in range(0, call.num_examples, rows)]


def _parts(call: ModelCall, tried: Sequence[slice]) -> list[ModelCall]:
    """Divide the call into calls of fewer examples, which take less memory, if that gives the same output.

    Args:
        tried: The slices of examples to test this with.
    """
    coupled = any(_mixes_examples(module) for module in call.layer.modules())
    plain = call.batch_axis == 0 and call.example_of_row is None
    slices = _slices(call)
    if coupled or call.random_state or not plain or len(slices) < 2:
        return [call]
    if not all(_can_be_divided(call, some) for some in tried):
        return [call]
    return [_examples(call, some) for some in slices]


def _mixes_examples(module: nn.Module) -> bool:
    """Whether a part of the batch alone gives other gradients; the outputs may be the same."""
    is_batchnorm = isinstance(module, _BatchNorm) and module.training
    return is_batchnorm or bool(getattr(module, "scale_grad_by_freq", False))


def _can_be_divided(call: ModelCall, tried: slice) -> bool:
    """Whether some examples alone have the same output as among all. A tensor with as many rows may be a mask."""
    one = _examples(call, tried)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint warns that nothing is differentiated here
            one.checked(tensors_in(one.run(dict(call.layer.named_parameters(remove_duplicate=False)))))
    except _CANNOT_RUN:
        return False
    return True


def _examples(call: ModelCall, rows: slice) -> ModelCall:
    def some(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == call.num_examples else tensor

    args, kwargs = tree_map_only(Tensor, some, (call.args, call.kwargs))
    fingerprints = tuple(some(kept.T).T for kept in call.fingerprints)
    return call.but(args=args, kwargs=kwargs, dout=call.dout[rows], fingerprints=fingerprints)


def _run_again(call: ModelCall, layouts: Layouts, visit: Callable[[Recorded], None]) -> None:
    """Run forward and backward as in step t; call ``visit`` with each layer's call."""
    plan = call.plan
    with call.randomness(), torch.enable_grad():
        parameters = {
            name: value.detach().requires_grad_(name in call.parameter_names)
            for name, value in call.layer.named_parameters(remove_duplicate=False)
        }
        model = make_twin(call.layer, parameters)
        sites = tuple(replace(site, module=model.get_submodule(site.name)) for site in plan.sites)
        tape = _VisitedTape(replace(plan, sites=sites), visit)
        recorder = Recorder(model, replace(plan, sites=sites), layouts=layouts)
        recorder.tape = tape
        with call.autocast.again():
            outputs = call.checked(tensors_in(model(*call.args, **call.kwargs)))
        output = outputs[call.output_index]
        del outputs
        reached, outside, is_reentrant = graph_of(output)
        if tape.first_parameters and not is_reentrant:
            # The backward pass goes back to the first layers' parameters and skips the gradients of all others.
            torch.autograd.grad(output, tape.first_parameters, call.dout, allow_unused=True)
        else:
            torch.autograd.backward(output, call.dout)  # into the twin, which is thrown away
            reached |= {id(value) for value in parameters.values() if value.grad is not None}
        call.refuse_parameters_of_others(outside)
        used = {plan.aliases[name] for name, value in parameters.items() if id(value) in reached}
        refuse_unseen_uses(used - tape.accounted - plan.used_elsewhere)
        for black_box in tape.black_boxes:
            visit(black_box)
        recorder.remove()


class _VisitedTape(Tape):
    """Shows each call to a visitor instead of keeping it; black boxes wait until the pass is over."""

    first_parameters: list[Tensor]

    def __init__(self, plan: Plan, visit: Callable[[Recorded], None]) -> None:
        super().__init__(plan, "sum", expect_one_pass=True)
        self.first_parameters = []
        self.black_boxes: list[Recorded] = []  # need a backward pass of their own, which cannot run inside another
        self._visit = visit

    @property
    def fuses(self) -> bool:
        """False: the pass does not form the gradients of parameters."""
        return False

    def form(self, call: LayerCall, fused: bool) -> Kept:
        return call

    def write(self, call: Kept) -> None:
        assert isinstance(call, Recorded)
        self.accounted.update(call.parameter_names.values())
        if call.needs_backward:
            self.black_boxes.append(call)
        else:
            self._visit(call)


# ---------------------------------------------------------------- activation checkpointing


class SegmentFinder:
    """Notes the modules of a model that are called during backward passes, until its hooks are removed."""

    def __init__(self, model: nn.Module) -> None:
        self._first_lengths: dict[str, int | None] = {}  # of noted modules; None if one cannot be a segment
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Note(self, name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        self.remove = weakref.finalize(self, remove_all, self.handles)

    def note(self, name: str, inputs: Any) -> None:
        tensors = tensors_in(inputs)
        given_parameters = any(isinstance(tensor, nn.Parameter) for tensor in tensors)
        self._first_lengths[name] = None if given_parameters else num_examples_of(inputs)

    def segments(self, tape: Tape) -> list[str]:
        """Return the outermost noted modules, if examples are on the first axis in and around them.

        Args:
            tape: The tape of the step that noted them, recorded layer by layer.
        """
        sizes = set(tape.batch_sizes().values())
        plain = {
            call.name: not isinstance(call, Recorded) or (call.batch_axis == 0 and call.example_of_row is None)
            for call in tape.calls
        }
        outermost = [n for n in self._first_lengths if not any(_is_below(n, other) for other in self._first_lengths)]
        return sorted(
            name
            for name in outermost
            if self._first_lengths[name] in sizes
            and all(is_plain for layer, is_plain in plain.items() if layer == name or _is_below(layer, name))
        )


class _Note(Hook[SegmentFinder]):
    def __init__(self, owner: SegmentFinder, name: str) -> None:
        super().__init__(owner)
        self.name = name

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner = self.owner()
        if owner is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            owner.note(self.name, (args, kwargs))


def with_segments(
    model: nn.Module, plan: Plan, segments: Iterable[str], layers: LayerFilter | None, batchnorm_affine: bool
) -> Plan:
    """Add a site for each segment to the plan. While it runs, its layers are not recorded; used elsewhere, they are."""
    wanted = as_predicate(model, layers)
    added: list[Site] = []
    for name in segments:
        if any(_is_below(name, site.name) or site.name == name for site in plan.sites):
            continue  # a layer, which cannot keep less, or inside a module that runs again as a whole anyway
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        try:
            inner = make_plan(
                module,
                lambda local, part, prefix=prefix: wanted(f"{prefix}{local}".rstrip("."), part),
                batchnorm_affine,
            )
        except UsageError:  # nothing in it is recorded
            continue
        site = whole_site(module, inner)
        of_model = {local: plan.aliases[prefix + local] for local in site.parameter_names}
        added.append(replace(site, name=name, parameter_names=of_model))
    names = [site.name for site in added]
    layers_left = (replace(site, in_segment=any(_is_below(site.name, name) for name in names)) for site in plan.sites)
    return replace(plan, sites=(*added, *layers_left))


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
