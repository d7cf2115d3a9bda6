"""Which modules of a model are recorded, and how each is aligned.

A module that owns parameters and has a rule is recorded by itself. One that owns parameters and has no rule is a black
box: it is recorded as one function, with everything below it (so parameters that it uses without calling their module,
as MultiheadAttention does with its out_proj, are covered). Every trainable parameter of the model ends up at exactly
the modules that own it, or is named in an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from inloop.alignment.black_box import BLACK_BOX
from inloop.alignment.rules import Rule, rule_for
from inloop.errors import UnsupportedLayerError, UsageError

LayerFilter = Iterable[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True)
class Site:
    """A module to be recorded: its place, its rule, and its parameters (name in the module -> name in the model)."""

    name: str
    module: nn.Module
    rule: Rule
    parameter_names: Mapping[str, str]

    def trainable(self) -> dict[str, str]:
        """Those of its parameters that are not frozen at the moment."""
        parameters = _parameters_of(self.module, self.rule)
        return {local: name for local, name in self.parameter_names.items() if parameters[local].requires_grad}


@dataclass(frozen=True, slots=True)
class Plan:
    """What recording a model needs to know about it.

    Attributes:
        aliases: Every name of every parameter -> its canonical name.
        shapes: Canonical name -> shape.
        partly_covered: Tied parameters of which a part of the uses is not recorded.
    """

    sites: tuple[Site, ...]
    aliases: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    partly_covered: frozenset[str]

    def trainable(self) -> set[str]:
        """Canonical names of all recorded parameters that are not frozen at the moment."""
        return {name for site in self.sites for name in site.trainable().values()}


def _parameters_of(module: nn.Module, rule: Rule) -> dict[str, nn.Parameter]:
    """What is replayed answers for everything below it, a layer with a rule for its own parameters."""
    if rule.replays:
        return dict(module.named_parameters(remove_duplicate=False))
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter, which stands for all its ties."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def make_plan(model: nn.Module, layers: LayerFilter | None = None, batchnorm_affine: bool = False) -> Plan:
    """Choose the modules to record.

    Args:
        layers: Names of the modules to include, each with all below it, or a predicate on (name, module); None for all.
        batchnorm_affine: Whether BatchNorm's own weight and bias count.

    Raises:
        UnsupportedLayerError: If a trainable parameter belongs to a module that cannot be aligned exactly.
        UsageError: If ``layers`` names a module that does not exist or that is a part of a black box.
    """
    names = canonical_names(model)
    wanted = _as_predicate(model, layers)
    sites = []
    for name, module, rule in _owners(model):
        if not wanted(name, module) or (isinstance(module, _BatchNorm) and not batchnorm_affine):
            continue
        prefix = f"{name}." if name else ""
        sites.append(Site(name, module, rule, {local: names[prefix + local] for local in _parameters_of(module, rule)}))
    problems = [f"'{site.name}' ({type(site.module).__name__}): {why}" for site in sites if (why := _refusal(site))]
    if problems:
        raise UnsupportedLayerError(
            "These layers cannot be aligned exactly: " + "; ".join(problems) + ". "
            "Fix: change the layer as said, freeze its parameters, or leave it out with layers=."
        )
    if not sites:
        raise UsageError(
            "No layer with parameters is recorded. Fix: choose at least one with layers=, or leave that out."
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return Plan(tuple(sites), names, shapes, _partly_covered(model, sites, names))


def _partly_covered(model: nn.Module, sites: list[Site], names: Mapping[str, str]) -> frozenset[str]:
    recorded = {id(module) for site in sites for module in site.module.modules()}
    return frozenset(
        names[f"{path}.{local}" if path else local]
        for path, module in model.named_modules(remove_duplicate=False)
        for local, parameter in module._parameters.items()
        if parameter is not None and id(module) not in recorded
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rule]]:
    """Walk the model from the top; below a black box there is nothing more to find."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if rule := rule_for(module) if _owns_parameters(module) else None:
            yield name, module, rule
        elif _owns_parameters(module):
            yield name, module, BLACK_BOX
        else:
            waiting.extend(
                (f"{name}.{child_name}" if name else child_name, child)
                for child_name, child in reversed(list(module.named_children()))
            )


def _owns_parameters(module: nn.Module) -> bool:
    """Whether the module itself uses parameters: its own, those of its parametrizations, or of a mere container."""
    return (
        _has_own_parameters(module)
        or is_parametrized(module)
        or any(_has_own_parameters(part) for part in _parts_that_are_never_called(module))
    )


def _has_own_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _parts_that_are_never_called(module: nn.Module) -> Iterator[nn.Module]:
    """Children without a forward, such as ParameterList: what they hold directly, their parent uses."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield child
            yield from _parts_that_are_never_called(child)


def _refusal(site: Site) -> str | None:
    """Why this module cannot be aligned exactly, or None."""
    module = site.module
    if any(is_lazy(parameter) for parameter in module.parameters()):
        return "its parameters do not exist yet; run one forward pass before recording"
    if not site.trainable():
        return None
    if any(parameter.is_complex() for parameter in module.parameters()):
        return "its parameters are complex"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, so the computation cannot be repeated with other weights"
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
        return "its examples are not on the first axis; build it with batch_first=True"
    if isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
        return "scale_grad_by_freq=True is not supported in bags"
    return None


def _as_predicate(model: nn.Module, layers: LayerFilter | None) -> Callable[[str, nn.Module], bool]:
    if layers is None:
        return lambda name, module: True
    if callable(layers):
        return layers
    chosen = [layers] if isinstance(layers, str) else list(layers)
    known = dict(model.named_modules())
    owners = [name for name, _, _ in _owners(model)]
    for choice in chosen:
        if choice not in known:
            close = get_close_matches(choice, known, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise UsageError(
                f"layers= names '{choice}', which is no module of the model.{hint} See model.named_modules()."
            )
        box = next(
            (owner for owner in owners if choice != owner and choice.startswith(f"{owner}." if owner else "")), None
        )
        if box is not None:
            whole = f"'{box}'" if box else "the model itself"
            raise UsageError(
                f"layers= names '{choice}', which is a part of {whole} ({type(known[box]).__name__}). That module owns parameters "
                "directly and has no rule, so it is aligned as a whole. Fix: move those parameters into a small module of their "
                f"own, register a rule, or name {whole}{'' if box else ' with an empty name'}."
            )
    return lambda name, module: any(choice in ("", name) or name.startswith(f"{choice}.") for choice in chosen)
