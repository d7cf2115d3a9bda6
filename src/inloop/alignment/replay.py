"""Keeping hardly anything: the step is done again when it is to be aligned.

The model as a whole is one recorded call: its input, the gradient of its output, a copy of its parameters. When a direction is
known, the model runs forward and backward once more as in step t, and each layer's call is aligned at the moment when its
gradient arrives, so that none is kept. Gradients of weights are not computed, but for the first layers, to which the backward
pass must reach.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from inloop.alignment.batch_size import batch_sizes
from inloop.alignment.black_box import checked, randomness_of
from inloop.alignment.call import LayerCall, tensors_in
from inloop.alignment.plan import Plan, Site
from inloop.alignment.recorder import Recorder
from inloop.alignment.rules import Rule
from inloop.alignment.tape import Tape
from inloop.alignment.twin import make_twin


def whole_model(model: nn.Module, plan: Plan) -> Site:
    """The model as the one thing to record, aligned layer by layer as ``plan`` says."""
    rule = Rule(
        partial(align_by_replay, plan),
        parameters=frozenset(),
        example_dims=lambda module: 0,
        when=lambda module: True,
        keeps_parameters=True,
        replays=True,
        visit_layers=partial(visit_layers, plan),
    )
    recorded = {name for site in plan.sites for name in site.parameter_names.values()}
    return Site("", model, rule, {name: canonical for name, canonical in plan.aliases.items() if canonical in recorded})


def align_by_replay(plan: Plan, call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """The sum of the contributions of all layers' calls."""
    along = {plan.aliases[name]: value for name, value in direction.items()}
    contributions_N = torch.zeros(call.num_examples, dtype=call.dtype, device=call.device)
    shapes = []

    def add(layer_call: LayerCall) -> None:
        nonlocal contributions_N
        shapes.append(layer_call.without_values())
        batch_sizes([call.without_values(), shapes[-1]])
        contributions_N = contributions_N + layer_call.align(
            {local: along[name] for local, name in layer_call.parameter_names.items()}
        )

    visit_layers(plan, call, add)
    batch_sizes(shapes)
    return contributions_N


def visit_layers(plan: Plan, call: LayerCall, visit: Callable[[LayerCall], None]) -> None:
    """Do step t again, forward and backward, and call ``visit`` with each layer's call when the gradient of its output arrives."""
    with randomness_of(call), torch.enable_grad():
        parameters = {
            name: value.detach().requires_grad_(name in call.parameter_names)
            for name, value in call.layer.named_parameters(remove_duplicate=False)
        }
        model = make_twin(call.layer, parameters)
        sites = tuple(replace(site, module=model.get_submodule(site.name)) for site in plan.sites)
        tape = _VisitedTape(replace(plan, sites=sites), visit)
        recorder = Recorder(model, replace(plan, sites=sites))
        recorder.tape = tape
        with call.autocast.again():
            outputs = checked(call, tensors_in(model(*call.args, **call.kwargs)))
        output = outputs[call.output_index]
        del outputs
        # The backward pass goes as far as the first layers' parameters, and leaves out the gradients of all others.
        torch.autograd.grad(output, tape.first_parameters, call.dout, allow_unused=True)
        for black_box in tape.black_boxes:
            visit(black_box)
        recorder.remove()


class _VisitedTape(Tape):
    """Shows each call to a visitor when it would be written, and keeps none."""

    def __init__(self, plan: Plan, visit: Callable[[LayerCall], None]) -> None:
        super().__init__(plan, "sum", expect_one_pass=True)
        self.first_parameters: list[Tensor] = []
        self.black_boxes: list[LayerCall] = []  # need backward passes of their own, which have no place within another
        self._visit = visit

    def is_first(self, layer: nn.Module) -> None:
        self.first_parameters.extend(p for p in layer.parameters() if p.requires_grad)

    def write(self, call: LayerCall) -> None:
        if call.rule.replays:
            self.black_boxes.append(call)
        else:
            self._visit(call)
