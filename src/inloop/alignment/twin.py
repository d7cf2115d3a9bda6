"""A stateless twin of a layer: the same computation, with other parameters and no side effects.

``torch.func.functional_call`` on the user's own layer is not enough here: it fires the user's hooks, moves
BatchNorm's running statistics, and with sharded layers silently computes with the real weights. A twin is a
shallow copy with its own parameter table, cloned buffers and no hooks but those that are part of the computation
(weight_norm, pruning), so nothing reaches the original.
"""

from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

MODULE_TABLES = frozenset(nn.Module().__dict__)
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class, or the one that it had before ``fully_shard``, which puts a class of its own before it."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


def make_twin(module: nn.Module, parameters: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """Copy ``module`` and its children, without their storage, and give the copy ``parameters``.

    Args:
        parameters: One tensor for each parameter below ``module``, by its name relative to it. Aliases of a tied
            parameter have an entry each.
        prefix: Where ``module`` stands in those names.
    """
    twin: nn.Module = object.__new__(original_type(module))
    # Written through __dict__, since nn.Module.__setattr__ would insist on nn.Parameter.
    state = twin.__dict__
    state.update(module.__dict__)
    state.pop("_compiled_call_impl", None)  # would run the original
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, twin)
        elif type(value) in (dict, list, set) and name not in MODULE_TABLES:
            state[name] = value.copy()  # what its forward keeps there is not for the original
    for table in _HOOK_TABLES:
        state[table] = OrderedDict()
    state["_forward_pre_hooks"] = reparametrizing_hooks(module)
    state["_parameters"] = {
        name: None if value is None else parameters[prefix + name] for name, value in module._parameters.items()
    }
    state["_buffers"] = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    state["_modules"] = {
        name: None if child is None else make_twin(child, parameters, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    if isinstance(twin, nn.RNNBase):  # reads its weights from a list beside the parameter table
        state["_flat_weights"] = [getattr(twin, name, None) for name in twin._flat_weights_names]
    return twin


def reparametrizing_hooks(module: nn.Module) -> "OrderedDict[int, object]":
    """The hooks that are part of the computation: pruning and the older weight_norm and spectral_norm set ``weight`` in one."""
    return OrderedDict(
        (key, hook)
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod))
    )


def remove_hooks(module: nn.Module) -> None:
    """Take all hooks off a copy of a module but those that are part of the computation."""
    for part in module.modules():
        kept = reparametrizing_hooks(part)
        for table in _HOOK_TABLES:
            part.__dict__[table] = OrderedDict()
        part.__dict__["_forward_pre_hooks"] = kept
        part.__dict__.pop("_compiled_call_impl", None)
