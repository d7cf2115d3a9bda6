"""Activation checkpointing: modules that are run again in the backward pass are kept as one call each, and run again to be aligned.

A checkpointed segment has no activations between its forward and its backward pass. Recording its layers would keep them after all, so
only the segment's input, the gradient of its output, its parameters and the random state are kept; when a direction is known it is run
forward and backward once more (``replay.py``). Which modules these are shows in the first step: they are called during its backward pass.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from inloop.alignment.hook import Hook, not_compiled
from inloop.alignment.plan import LayerFilter, Plan, as_predicate, make_plan
from inloop.alignment.replay import replayed_site
from inloop.errors import UsageError


class RunAgain:
    """Notes the modules of a model that are called during backward passes, until its hooks are removed."""

    def __init__(self, model: nn.Module) -> None:
        self._names: set[str] = set()
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Note(self, name)) for name, module in model.named_modules()
        ]
        self.remove = weakref.finalize(self, _remove_all, self.handles)

    def note(self, name: str) -> None:
        self._names.add(name)

    @property
    def segments(self) -> list[str]:
        """The outermost of them."""
        return sorted(name for name in self._names if not any(_is_below(name, other) for other in self._names))


class _Note(Hook[RunAgain]):
    def __init__(self, owner: RunAgain, name: str) -> None:
        super().__init__(owner)
        self.name = name

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        owner = self.owner()
        if owner is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            owner.note(self.name)


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def with_segments(
    model: nn.Module, plan: Plan, segments: Iterable[str], layers: LayerFilter | None, batchnorm_affine: bool
) -> Plan:
    """The plan with one replayed site in place of all layers of each segment."""
    wanted = as_predicate(model, layers)
    sites, bare = list(plan.sites), dict(plan.bare)
    for name in segments:
        if any(_is_below(name, site.name) or site.name == name for site in sites):
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
        names: Mapping[str, str] = {local: plan.aliases[prefix + local] for local in site.parameter_names}
        sites = [other for other in sites if other.name != name and not _is_below(other.name, name)]
        sites.append(replace(site, name=name, parameter_names=names))
        inside = {plan.aliases[prefix + local] for local in inner.bare}
        bare = {canonical: value for canonical, value in bare.items() if canonical not in inside}
    return replace(plan, sites=tuple(sites), bare=bare)


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
