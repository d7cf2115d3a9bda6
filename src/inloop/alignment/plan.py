"""Choose which modules of a model to record, and how to align each.

A module that owns parameters and has a rule is recorded by itself. A module that owns parameters and has no rule is a
black box: it is recorded as one function, with everything below it. This covers parameters that it uses without calling
their module, as MultiheadAttention does with its out_proj. If the box would be most of the model, or mix examples,
``follow.py`` follows its own parameters to their operations, and the modules below it are recorded by themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from inloop.alignment.rules import Rule, rule_for
from inloop.errors import UnsupportedLayerError, UsageError
from inloop.warn import warn_once

_PRECISION = 4  # bytes of a number, in most models
LayerFilter = Iterable[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True)
class Site:
    """A module to record.

    Attributes:
        name: The module's place in the model.
        rule: How to align its calls; None to run them again, with everything below the module.
        parameter_names: The parameters that its calls account for: name in the module -> name in the model.
        sequence_first: Whether its input and output are [positions, examples, ...], as torch's own modules declare.
        inner: The plan for the layers of a whole model, or a checkpointed part, that runs again layer by layer.
        in_segment: Whether it is below a checkpointed module that is recorded as a whole.
    """

    name: str
    module: nn.Module
    rule: Rule | None
    parameter_names: Mapping[str, str]
    sequence_first: bool = False
    inner: "Plan | None" = None
    in_segment: bool = False

    def batch_axis(self, output_index: int, output: Tensor) -> int:
        """Return the axis of the examples in one of the outputs."""
        if isinstance(self.module, nn.RNNBase) and output_index > 0:
            return 1  # final states, [layers, N, features]
        if isinstance(self.module, nn.MultiheadAttention) and output_index > 0:
            return 0  # attention weights, [N, ...]
        return int(self.sequence_first and output.dim() > 2)

    def trainable(self) -> dict[str, str]:
        """Return its parameters that are not frozen now; raise if one no longer exists."""
        parameters = self.module._parameters if self.rule is not None else _parameters_of(self.module, None)
        trainable = {}
        for local, name in self.parameter_names.items():
            parameter = parameters.get(local)
            if parameter is None:
                raise UsageError(
                    f"The model has changed since recording began: '{self.name}' has no parameter '{local}' any more. Fix: make a new "
                    "InLoop, or recording, for the model as it is now."
                )
            if parameter.requires_grad:
                trainable[local] = name
        return trainable


@dataclass(frozen=True, slots=True)
class Plan:
    """The modules of a model to record, and the names and shapes of its parameters.

    Attributes:
        aliases: Every name of every parameter -> its canonical name.
        shapes: Canonical name -> shape.
        sizes: Canonical name -> about how many bytes it has.
        used_elsewhere: Parameters of modules that are left out. Recorded modules may share them.
        bare: Parameters that only the operations using them can account for, by canonical name.
    """

    sites: tuple[Site, ...]
    aliases: Mapping[str, str]
    shapes: Mapping[str, torch.Size]
    sizes: Mapping[str, int]
    used_elsewhere: frozenset[str]
    bare: Mapping[str, nn.Parameter]

    @property
    def nbytes(self) -> int:
        """About how many bytes its parameters have."""
        return sum(self.sizes.values())

    def trainable(self) -> set[str]:
        """Return the canonical names of all recorded parameters that are not frozen now."""
        in_layers = {name for site in self.sites for name in site.trainable().values()}
        return in_layers | {name for name, parameter in self.bare.items() if parameter.requires_grad}

    def layers(self) -> list[list[str]]:
        """Return the canonical names of the recorded parameters, grouped by layer."""
        groups: list[list[str]] = []
        seen: set[str] = set()
        for names in (*(site.parameter_names.values() for site in self.sites), *([name] for name in self.bare)):
            if fresh := [name for name in dict.fromkeys(names) if name not in seen]:
                groups.append(fresh)
                seen.update(fresh)
        return groups

    def counted(self) -> set[str]:
        """Return the canonical names of all recorded parameters."""
        return {name for site in self.sites for name in site.parameter_names.values()} | set(self.bare)


def _parameters_of(module: nn.Module, rule: Rule | None) -> Mapping[str, nn.Parameter | None]:
    """Return the parameters that a module accounts for: its own with a rule, else everything below it."""
    return dict(module.named_parameters(remove_duplicate=False)) if rule is None else module._parameters


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of every parameter to the first name of the same parameter, which stands for all its ties."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def make_plan(model: nn.Module, layers: LayerFilter | None = None, batchnorm_affine: bool = False) -> Plan:
    """Choose the modules to record.

    Args:
        layers: Names of the modules to include, each with all below it, or a predicate on (name, module); None for all.
        batchnorm_affine: Whether BatchNorm's own weight and bias count.

    Raises:
        UnsupportedLayerError: If a trainable parameter belongs to a module that cannot be aligned exactly.
        UsageError: If ``layers`` leaves nothing, or names a module that does not exist or that is part of a black box.
    """
    names = canonical_names(model)
    wanted = as_predicate(model, layers)
    sequence_first = {id(part) for module in model.modules() if _is_sequence_first(module) for part in module.modules()}
    sites, bare = [], {}
    left_out: set[str] = set()
    for name, module, rule, is_followed in _owners(model):
        own = dict(_bare_parameters(module)) if is_followed else _parameters_of(module, rule)
        prefix = f"{name}." if name else ""
        of_owner = {local: names[prefix + local] for local, value in own.items() if value is not None}
        if not wanted(name, module) or (isinstance(module, _BatchNorm) and not batchnorm_affine):
            left_out.update(of_owner.values())
        elif is_followed:
            bare.update({of_owner[local]: value for local, value in _bare_parameters(module)})
        else:
            sites.append(Site(name, module, rule, of_owner, id(module) in sequence_first))
    problems = [f"'{site.name}' ({type(site.module).__name__}): {why}" for site in sites if (why := _refusal(site))]
    problems += [f"parameter '{name}': it is complex" for name, p in bare.items() if p.requires_grad and p.is_complex()]
    if problems:
        raise UnsupportedLayerError(
            "These layers cannot be aligned exactly: " + "; ".join(problems) + ". "
            "Fix: change the layer as said, freeze its parameters, or leave it out with layers=."
        )
    if not sites and not bare:
        raise UsageError(
            "No layer with parameters is recorded. Fix: choose at least one with layers=, or leave that out."
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    sizes = {name: _PRECISION * shape.numel() for name, shape in shapes.items()}
    return Plan(tuple(sites), names, shapes, sizes, frozenset(left_out - set(bare)), bare)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rule | None, bool]]:
    """Yield name, module, rule and whether to follow its own parameters, from the top; stop at black boxes."""
    half = _num_elements(model.parameters()) / 2
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            if next(module.parameters(), None) is not None:
                yield name, module, None, False  # make_plan refuses it by name
            continue
        called = not name or not _is_never_called(
            module
        )  # else its parent accounts for its parameters; the model has none
        if rule := rule_for(module) if called and _owns_parameters(module) else None:
            yield name, module, rule, False
        elif called and _owns_parameters(module) and not _is_followed(module, half):
            yield name, module, None, False
        else:
            if called and _owns_parameters(module):
                yield name, module, None, True
            waiting.extend(
                (f"{name}.{child_name}" if name else child_name, child)
                for child_name, child in reversed(list(module.named_children()))
            )


def _is_followed(module: nn.Module, half: float) -> bool:
    """Whether to follow a module's own parameters: as one function it would be most of the model, or mix examples."""
    if is_parametrized(module) or isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return False
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        return True  # it is never called as one function
    bare = {id(parameter) for _, parameter in _bare_parameters(module)}
    rest = _num_elements(parameter for parameter in module.parameters() if id(parameter) not in bare)
    return rest > half or (rest > 0 and any(isinstance(child, _BatchNorm) for child in module.modules()))


def _is_never_called(module: nn.Module) -> bool:
    """Whether the module has no forward, like ParameterList."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__:
        return False
    return type(module).forward is nn.Module.forward


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _bare_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the module's parameters that belong to no layer below it."""
    yield from module.named_parameters(recurse=False)
    for child_name, child in module.named_children():
        if _is_never_called(child):
            yield from ((f"{child_name}.{name}", value) for name, value in _bare_parameters(child))


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
    """Yield the children without a forward, like ParameterList: their parent uses the parameters that they hold."""
    for child in module.children():
        if _is_never_called(child):
            yield child
            yield from _parts_that_are_never_called(child)


def _refusal(site: Site) -> str | None:
    """Return why this module cannot be aligned exactly, or None."""
    module = site.module
    if any(is_lazy(parameter) for parameter in module.parameters()):
        return "its parameters do not exist yet; run one forward pass before recording"
    if not site.trainable():
        return None
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return "it is compiled by TorchScript, and cannot be run with other parameters"
    if any(parameter.is_complex() for parameter in module.parameters()):
        return "its parameters are complex"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, so the computation cannot be repeated with other weights"
    if isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
        return "scale_grad_by_freq=True is not supported in bags"
    return None


def _is_sequence_first(module: nn.Module) -> bool:
    """Whether the module is one of torch's sequence modules, built without batch_first."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return not module.batch_first
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return _is_sequence_first(module.self_attn)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return len(module.layers) > 0 and _is_sequence_first(module.layers[0])
    return False


def as_predicate(model: nn.Module, layers: LayerFilter | None) -> Callable[[str, nn.Module], bool]:
    """Return a predicate that says whether a module of the model, by name, is chosen.

    Raises:
        UsageError: If ``layers`` names a module that does not exist or that is part of a black box.
    """
    if layers is None:
        return lambda name, module: True
    if callable(layers):
        return layers
    chosen = [layers] if isinstance(layers, str) else list(layers)
    known = dict(model.named_modules())
    owners = [name for name, _, _, is_followed in _owners(model) if not is_followed]
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


def warn_of_coupled_examples(model: nn.Module) -> None:
    """BatchNorm in training mode gives rewards another meaning, which is worth saying once."""
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        warn_once(
            "the model has BatchNorm in training mode, which mixes the examples of a batch: a reward is an example's part of the batch's "
            "gradient, close to the gradient of its own loss, not equal to it. Usually nothing needs to be done; GroupNorm or LayerNorm avoid it, and "
            "docs/when-not-to-use-it.md shows how large the difference is (shown once)"
        )
