"""Keeping hardly anything: the step is done again when it is to be aligned.

The model as a whole is one recorded call: its input, the gradient of its output, a copy of its parameters. When a direction is
known, the model runs forward and backward once more as in step t, a quarter of the examples at a time if they do not depend on
each other, and each layer's call is aligned at the moment when its gradient arrives, so that none is kept. Gradients of weights
are not computed, but for the first layers, to which the backward pass must reach.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from inloop.alignment.batch_size import batch_sizes
from inloop.alignment.black_box import checked, randomness_of
from inloop.alignment.call import LayerCall, tensors_in
from inloop.alignment.layout import Layouts
from inloop.alignment.plan import Plan, Site
from inloop.alignment.probe import layouts_of
from inloop.alignment.recorder import Recorder
from inloop.alignment.reduced import AnyCall
from inloop.alignment.rules import Rule
from inloop.alignment.tape import Tape
from inloop.alignment.twin import make_twin
from inloop.alignment.verification import refuse_unseen_uses
from inloop.errors import UnsupportedLayerError

_NUM_PARTS = 4  # that a batch is replayed in


def replayed_site(model: nn.Module, plan: Plan) -> Site:
    """A model, or a part of one, as one thing to record, aligned layer by layer as its ``plan`` says."""
    described = _Described(plan, weakref.ref(model))
    rule = Rule(
        partial(align_by_replay, described),
        parameters=frozenset(),
        example_dims=lambda module: 0,
        when=lambda module: True,
        keeps_parameters=True,
        replays=True,
        visit_layers=partial(visit_layers, described),
    )
    recorded = plan.counted()
    return Site("", model, rule, {name: canonical for name, canonical in plan.aliases.items() if canonical in recorded})


@dataclass(frozen=True, slots=True)
class _Described:
    """The layers of a model, and where the examples are in their outputs.

    Attributes:
        model: The model itself, to find that out.
    """

    plan: Plan
    model: "weakref.ref[nn.Module]"
    layouts: Layouts = field(default_factory=dict)

    def of(self, call: LayerCall) -> "_Described":
        """Described for this call, with all its examples."""
        model = self.model()
        known = {} if model is None else layouts_of(model, self.plan, (call.args, call.kwargs))
        return replace(self, layouts=known)


def align_by_replay(described: _Described, call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """The sum of the contributions of all layers' calls."""
    along = {described.plan.aliases[name]: value for name, value in direction.items()}
    described = described.of(call)
    parts = _parts(call, [slice(0, 1)])
    if len(parts) > 1:
        try:
            return torch.cat([_align_part(described, part, along) for part in parts])
        except (RuntimeError, ValueError, IndexError, UnsupportedLayerError):
            pass  # one example alone could be run, and some of them cannot
    return _align_part(described, call, along)


def _align_part(described: _Described, call: LayerCall, along: Mapping[str, Tensor]) -> Tensor:
    contributions_N = torch.zeros(call.num_examples, dtype=call.dtype, device=call.device)
    shapes = [call.without_values()]

    def add(layer_call: LayerCall) -> None:
        shapes.append(layer_call.without_values())
        batch_sizes([shapes[0], shapes[-1]])
        contributions_N.add_(
            layer_call.align({local: along[name] for local, name in layer_call.parameter_names.items()})
        )

    _replay(described, call, add)
    batch_sizes(shapes)
    return contributions_N


def visit_layers(described: _Described, call: LayerCall, visit: Callable[[LayerCall], None]) -> None:
    """Do step t again and call ``visit`` with each layer's call, of a part of the examples, when its gradient arrives."""
    described = described.of(call)

    def visit_as_of_the_model(layer_call: LayerCall) -> None:
        names = {local: call.parameter_names[name] for local, name in layer_call.parameter_names.items()}
        visit(replace(layer_call, parameter_names=names))

    for part in _parts(call, _slices(call)):  # all are tried: what was visited cannot be taken back
        _replay(described, part, visit_as_of_the_model)


def _slices(call: LayerCall) -> list[slice]:
    rows = max(1, -(-call.num_examples // _NUM_PARTS))
    return [slice(start, start + rows) for start in range(0, call.num_examples, rows)]


def _parts(call: LayerCall, tried: Sequence[slice]) -> list[LayerCall]:
    """The call divided into calls of fewer examples, which take less memory, if that gives the same output.

    Args:
        tried: The examples to see that by, some at a time.
    """
    coupled = any(isinstance(module, _BatchNorm) and module.training for module in call.layer.modules())
    plain = call.batch_axis == 0 and call.example_of_row is None
    slices = _slices(call)
    if coupled or call.random_state or not plain or len(slices) < 2:
        return [call]
    if not all(_can_be_divided(call, some) for some in tried):
        return [call]
    return [_examples(call, some) for some in slices]


def _can_be_divided(call: LayerCall, tried: slice) -> bool:
    """Whether some examples alone have the output that they had among all. What has as many rows may be no examples (a mask)."""
    one = _examples(call, tried)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint says that nothing is differentiated here
            checked(one, tensors_in(one.run(dict(call.layer.named_parameters(remove_duplicate=False)))))
    except (RuntimeError, ValueError, IndexError, UnsupportedLayerError):
        return False
    return True


def _examples(call: LayerCall, rows: slice) -> LayerCall:
    def some(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == call.num_examples else tensor

    args, kwargs = tree_map_only(Tensor, some, (call.args, call.kwargs))
    fingerprints = tuple(some(kept.T).T for kept in call.fingerprints)
    return replace(call, args=args, kwargs=kwargs, dout=call.dout[rows], fingerprints=fingerprints)


def _replay(described: _Described, call: LayerCall, visit: Callable[[LayerCall], None]) -> None:
    """Forward and backward as in step t."""
    plan = described.plan
    with randomness_of(call), torch.enable_grad():
        parameters = {
            name: value.detach().requires_grad_(name in call.parameter_names)
            for name, value in call.layer.named_parameters(remove_duplicate=False)
        }
        model = make_twin(call.layer, parameters)
        sites = tuple(replace(site, module=model.get_submodule(site.name)) for site in plan.sites)
        tape = _VisitedTape(replace(plan, sites=sites), visit)
        recorder = Recorder(model, replace(plan, sites=sites), layouts=described.layouts)
        recorder.tape = tape
        with call.autocast.again():
            outputs = checked(call, tensors_in(model(*call.args, **call.kwargs)))
        output = outputs[call.output_index]
        del outputs
        reached, outside, is_reentrant = _graph_of(output)
        if tape.first_parameters and not is_reentrant:
            # The backward pass goes as far as the first layers' parameters, and leaves out the gradients of all others.
            torch.autograd.grad(output, tape.first_parameters, call.dout, allow_unused=True)
        else:
            torch.autograd.backward(output, call.dout)  # into the twin, which is forgotten
            reached |= {id(value) for value in parameters.values() if value.grad is not None}
        if outside:
            raise UnsupportedLayerError(
                f"'{call.name}' ({type(call.layer).__name__}) uses parameters, the first of shape {tuple(outside[0].shape)}, that are not its own: "
                "a function or module held outside of it. It cannot be run again. Fix: make that a submodule, or leave it out with layers=."
            )
        used = {plan.aliases[name] for name, value in parameters.items() if id(value) in reached}
        refuse_unseen_uses(used - tape.accounted - plan.used_elsewhere)
        for black_box in tape.black_boxes:
            visit(black_box)
        recorder.remove()


def _graph_of(output: Tensor) -> tuple[set[int], list[Tensor], bool]:
    """The leaves that a gradient of ``output`` goes to, those of them that belong to no copy, and whether it takes a whole backward pass.

    Leaves are told by identity. A reentrant checkpoint takes one: its own graph is not a part of this one.
    """
    leaves, outside, is_reentrant = set(), list[Tensor](), False
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_reentrant |= node.name() == "CheckpointFunctionBackward"
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
            if isinstance(leaf, nn.Parameter):
                outside.append(leaf)
        waiting.extend(function for function, _ in node.next_functions)
    return leaves, outside, is_reentrant


class _VisitedTape(Tape):
    """Shows each call to a visitor when it would be written, and keeps none."""

    @property
    def fuses(self) -> bool:
        """The gradients of parameters are not formed at all."""
        return False

    def __init__(self, plan: Plan, visit: Callable[[LayerCall], None]) -> None:
        super().__init__(plan, "sum", expect_one_pass=True)
        self.first_parameters: list[Tensor] = []
        self.black_boxes: list[LayerCall] = []  # need backward passes of their own, which have no place within another
        self._visit = visit

    def note_first(self, parameters: Iterable[Tensor]) -> None:
        self.first_parameters.extend(p for p in parameters if p.requires_grad)

    def write(self, call: AnyCall) -> None:
        assert isinstance(call, LayerCall)
        self.accounted.update(call.parameter_names.values())
        if call.rule.replays:
            self.black_boxes.append(call)
        else:
            self._visit(call)
