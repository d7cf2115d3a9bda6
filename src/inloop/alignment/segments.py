"""Activation checkpointing: modules that are run again in the backward pass are kept as one call each, and run again to be aligned.

A checkpointed segment has no activations between its forward and its backward pass. Recording its layers would keep them after all, so
only the segment's input, the gradient of its output, its parameters and the random state are kept; when a direction is known it is run
forward and backward once more (``replay.py``). Which modules these are shows in the first step: they are called during its backward pass.
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from inloop.alignment.batch_size import batch_sizes
from inloop.alignment.call import tensors_in
from inloop.alignment.hook import Hook, not_compiled, remove_all
from inloop.alignment.plan import LayerFilter, Plan, Site, as_predicate, make_plan
from inloop.alignment.reduced import ReducedCall
from inloop.alignment.replay import replayed_site
from inloop.alignment.tape import Tape
from inloop.alignment.trace import first_length
from inloop.errors import UsageError


class RunAgain:
    """Notes the modules of a model that are called during backward passes, until its hooks are removed."""

    def __init__(self, model: nn.Module) -> None:
        self._first_lengths: dict[str, int | None] = {}  # of those that were called so; None if they cannot be segments
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Note(self, name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        self.remove = weakref.finalize(self, remove_all, self.handles)

    def note(self, name: str, inputs: Any) -> None:
        tensors = tensors_in(inputs)
        given_parameters = any(isinstance(tensor, nn.Parameter) for tensor in tensors)
        self._first_lengths[name] = None if given_parameters else first_length(inputs)

    def segments(self, tape: Tape) -> list[str]:
        """The outermost of them, but for those that the examples are not on the first axis of, in or around them.

        Args:
            tape: Of the step in which they were noted, layer by layer.
        """
        sizes = set(batch_sizes(tape.calls).values())
        plain = {
            call.name: call.batch_axis == 0 and call.example_of_row is None
            for call in (call.call if isinstance(call, ReducedCall) else call for call in tape.calls)
        }
        outermost = [n for n in self._first_lengths if not any(_is_below(n, other) for other in self._first_lengths)]
        return sorted(
            name
            for name in outermost
            if self._first_lengths[name] in sizes
            and all(is_plain for layer, is_plain in plain.items() if layer == name or _is_below(layer, name))
        )


class _Note(Hook[RunAgain]):
    def __init__(self, owner: RunAgain, name: str) -> None:
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
    """The plan with one more site for each segment, to be replayed. While it runs, its layers are not recorded; called from elsewhere they are."""
    wanted = as_predicate(model, layers)
    added: list[Site] = []
    for name in segments:
        if any(_is_below(name, site.name) or site.name == name for site in plan.sites):
            continue  # a layer, of which nothing less can be kept, or within a module that is replayed as a whole anyway
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
        site = replayed_site(module, inner)
        of_model = {local: plan.aliases[prefix + local] for local in site.parameter_names}
        added.append(replace(site, name=name, parameter_names=of_model))
    names = [site.name for site in added]
    layers_left = (replace(site, in_segment=any(_is_below(site.name, name) for name in names)) for site in plan.sites)
    return replace(plan, sites=(*added, *layers_left))


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
