"""One recorded call of a layer, ``out = f(x; θ_t)``, with the gradient of ``out``.

The call can run the layer again later, with any parameters, exactly as in step t. It runs a *twin*: a copy that cannot
change the original. ``torch.func.functional_call`` on the user's own layer is not enough: it fires the user's hooks,
moves BatchNorm's running statistics, and with sharded layers silently computes with the real weights.
Axes: N examples; ``...`` any further axes of the output.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map_only

from inloop.alignment.kept import Half, Kept, full, leaves_of, tensors_in, versions_of
from inloop.alignment.sums import Dot, Sums
from inloop.errors import OverwrittenTensorError

if TYPE_CHECKING:
    from inloop.alignment.rules import Rule

_PART_BYTES = 1 << 22
_NOTHING = torch.empty(0, device="cpu")


@dataclass(frozen=True, slots=True)
class Layout:
    """The axis of an output that counts examples.

    Attributes:
        folded: Whether each example has several rows on that axis.
        positions_first: For a folded axis, whether rows are ordered by position first, then by example.
        groups: For a folded axis, how many groups of all examples follow each other, as where every expert sees all.
        shared: Whether the output belongs to no example: all share it, as a table of positions.
    """

    axis: int = 0
    folded: bool = False
    positions_first: bool = False
    groups: int = 1
    shared: bool = False

    def example_of_row(self, output: Tensor, num_examples: int | None) -> Tensor | None:
        """Return the example of each row; None if every row is an example."""
        if not self.folded or not num_examples or output.shape[self.axis] // num_examples <= 1:
            return None
        rows = torch.arange(output.shape[self.axis], device=output.device)
        if self.positions_first:
            return rows % num_examples
        in_group = rows % (len(rows) // self.groups)
        return in_group // max(1, len(rows) // self.groups // num_examples)


PLAIN = Layout()
SHARED = Layout(shared=True)
ALL_ROWS_OF_ONE = Layout(folded=True)  # of a batch of one example

# The key is the module's name and the output's index, or the key of an operation.
Layouts = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, slots=True)
class Autocast:
    """The mixed-precision state of one moment, to enter again later."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device: str) -> "Autocast":
        return _state_of_autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> AbstractContextManager[Any]:
        if not self.enabled and not torch.is_autocast_enabled(self.device):
            return _AS_IT_IS
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


_AS_IT_IS = nullcontext()
Call = TypeVar("Call", bound="Recorded")


@cache
def _state_of_autocast(device: str, enabled: bool, dtype: torch.dtype) -> Autocast:
    return Autocast(device, enabled, dtype)


@dataclass(eq=False, kw_only=True)
class Recorded(Kept):
    """A call with its inputs and, after the backward pass, the gradient of one of its outputs. Changes are made to copies.

    Attributes:
        layer: A twin of the layer in step t: flags, buffers and, if aligning reads them, parameters.
        args, kwargs, dout: The layer's inputs and the gradient of its output; a tensor may be packed.
        batch_axis: The axis of ``dout`` that counts examples.
        example_of_row: The example of each row, if examples have several rows (packed or folded sequences); else None.
        taken_from: The number of examples in the call, if only some are kept; else None.
        absolute: Add up magnitudes instead of values.
    """

    name: str
    layer: nn.Module
    parameter_names: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    batch: int = 0
    output_index: int = 0
    batch_axis: int = 0
    example_of_row: Tensor | None = None
    dout: Tensor = _NOTHING
    versions: tuple[int, ...] = ()
    taken_from: int | None = None
    absolute: bool = False

    def but(self: Call, **changes: object) -> Call:
        """Return a copy with other values. It takes a tenth of the time of ``dataclasses.replace``, for each layer call."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__dict__.update(changes)
        return other

    def with_gradient(self, dout: Tensor) -> Any:
        """Return the complete call, with the gradient that its output received."""
        return self.but(dout=dout, versions=(*self.versions, dout._version))

    @property
    def has_one_input(self) -> bool:
        """Whether its only input is a tensor, which is not packed, and so is the gradient: as for nearly all layers."""
        args = self.args
        return len(args) == 1 and type(args[0]) is Tensor and type(self.dout) is Tensor and not self.kwargs

    @property
    def nbytes(self) -> int:
        if self.has_one_input:
            return int(self.args[0].nbytes + self.dout.nbytes)
        return super().nbytes

    def placed(self, output_index: int, batch_axis: int, example_of_row: Tensor | None) -> Any:
        """Return the call of one output, with the place of the examples in it."""
        return self.but(output_index=output_index, batch_axis=batch_axis, example_of_row=example_of_row)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return type(self.layer).__name__

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        if self.example_of_row is not None:
            return int(self.example_of_row.max()) + 1
        return len(self.dout) if self.batch_axis == 0 else int(self.dout.shape[self.batch_axis])

    @property
    def num_recorded(self) -> int:  # type: ignore[override]
        return self.num_examples if self.taken_from is None else self.taken_from

    @property
    def num_positions(self) -> int:  # type: ignore[override]
        return self.dout.shape[1 - self.batch_axis] if len(self.dout.shape) > 2 else 0

    @property
    def coarsest(self) -> torch.dtype:  # type: ignore[override]
        return torch.float16 if isinstance(self.dout, Half) else self.dout.dtype.to_real()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.promote_types(self.dout.dtype.to_real(), torch.float32)  # half precision cannot hold sums

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.dout.device

    def tensors(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs, self.dout))

    def shapes(self) -> "Recorded":
        """Return the call without its values: only shapes, and the integers among its args."""
        args = tree_map_only(Tensor, lambda t: t.to("meta") if t.is_floating_point() else t, self.args)
        return self.but(args=args, kwargs={}, dout=self.dout.to("meta"))

    def weighted(self, weights_N: Tensor) -> Tensor:
        """Return ``dout`` with the rows of each example multiplied by its weight."""
        weights = weights_N if self.example_of_row is None else weights_N[self.example_of_row]
        return (self.dout.movedim(self.batch_axis, -1) * weights).movedim(-1, self.batch_axis).to(self.dout.dtype)

    def run(self, parameters: Mapping[str, Tensor], **attributes: object) -> Any:
        """Call the layer as in step t, but with ``parameters``; ``attributes`` override the layer's own."""
        twin = make_twin(self.layer, parameters)
        twin.__dict__.update(attributes)
        with self.autocast.again():
            for hook in twin._forward_pre_hooks.values():  # a twin has only hooks that are part of the computation
                hook(twin, self.args)
            return twin.forward(*self.args, **self.kwargs)

    def refuse_overwritten(self) -> None:
        """Raise if a tensor of the call has changed in place since."""
        if self.has_one_input:
            versions: tuple[int, ...] = (self.args[0]._version, self.dout._version)
        else:
            versions = versions_of((self.args, self.kwargs, self.dout))
        if versions != self.versions:
            raise OverwrittenTensorError(
                f"A tensor recorded at layer '{self.name}' ({type(self.layer).__name__}) was changed in place before it was used. "
                "Recorded tensors must keep their values until the next step has rewarded their examples. Fix: do not write into a "
                "batch that was already trained on, or record copies: record=inloop.Recording(copy_inputs=True)."
            )


@dataclass(eq=False, kw_only=True)
class LayerCall(Recorded):
    """A call of a layer with a rule, kept as x and dout. Rules receive it."""

    rule: "Rule"

    def run(self, parameters: Mapping[str, Tensor], **attributes: object) -> Any:
        layer, state = self.layer, self.layer.__dict__
        needs_twin = layer._buffers or layer._modules or layer._forward_pre_hooks or not _is_of_torch(type(layer))  # type: ignore[arg-type]
        if attributes or needs_twin:
            return super().run(parameters, **attributes)
        # Put the parameters into the twin itself for the moment: another twin takes longer than a small layer.
        own = state["_parameters"]
        state["_parameters"] = {name: None if value is None else parameters[name] for name, value in own.items()}
        try:
            with self.autocast.again():
                return layer.forward(*self.args, **self.kwargs)
        finally:
            state["_parameters"] = own

    @property
    def consecutive_ids(self) -> int:
        """The number of ids if an embedding looks up consecutive rows, [L] and not [N, L], as for positions; else 0."""
        if not self.args:
            return 0
        ids = self.args[0]
        return len(ids) if ids.dim() == 1 and len(ids) > 1 and bool((ids.diff() == 1).all()) else 0

    def map(self, pack: Callable[[Tensor], Any]) -> "LayerCall":
        return self._with(tree_map_only(Tensor, pack, (self.args, self.kwargs, self.dout)))

    def _with(self, tensors: tuple[Any, Any, Any]) -> "LayerCall":
        args, kwargs, dout = tensors
        return self.but(args=args, kwargs=kwargs, dout=dout, versions=versions_of(tensors))

    def only(self, rows: Tensor, num_rows: int) -> "LayerCall":
        """Return the call of the examples ``rows``, before its gradient arrives; itself if rows cannot be taken out."""
        if not self.rule.separable or self.example_of_row is not None or self.taken_from is not None:
            return self

        def take(tensor: Tensor) -> Tensor:
            return tensor[rows] if tensor.dim() and len(tensor) == num_rows else tensor

        args, kwargs = tree_map_only(Tensor, take, (self.args, self.kwargs))
        return self.but(args=args, kwargs=kwargs, versions=versions_of((args, kwargs)), taken_from=num_rows)

    def align(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor:
        with torch.no_grad():
            return _rows_of(self._contributions(direction, magnitudes))

    def add_to(self, sums: Sums, direction: Mapping[str, Tensor | None]) -> None:
        sums.add(self._contributions(direction))

    def _contributions(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor | Dot:
        self.refuse_overwritten()
        call: LayerCall = self.but(absolute=True) if magnitudes else self
        complete: dict[str, Tensor] = {}
        for name, parameter in self.layer._parameters.items():
            if parameter is not None:
                along = direction.get(name)
                if along is None:
                    complete[name] = torch.zeros_like(parameter, device=self.dout.device)
                else:
                    complete[name] = along if along.dtype is parameter.dtype else along.to(parameter.dtype)
        if self.autocast.enabled and self.autocast.dtype == torch.float16:
            contributions: Tensor | Dot = call._align_scaled(complete)
        else:
            contributions = call._align_rows(complete)
        if self.example_of_row is None:
            return contributions
        rows = _rows_of(contributions)
        return rows.new_zeros(self.num_examples).index_add_(0, self.example_of_row, rows)

    def _align_rows(self, direction: Mapping[str, Tensor]) -> Tensor | Dot:
        """Align by the rule, a few examples at a time if the call is large and separable.

        On a CPU this is faster (a 3 x 3 convolution of 64 channels on 64 images of 32 x 32: by a third) and needs less
        memory. A small result overwrites the last one in the processor's cache; a large one needs fresh memory.
        """
        if self.has_one_input and max(self.args[0].nbytes, self.dout.nbytes) <= _PART_BYTES:
            return self.rule.align(self, direction)
        tensors = (self.args, self.kwargs, self.dout)
        leaves = [leaf for leaf in leaves_of(tensors) if isinstance(leaf, Tensor | Half)]
        size = max([leaf.nbytes for leaf in leaves])
        if size > 2 * _PART_BYTES and self.rule.separable and not self.batch_axis and self.dout.device.type == "cpu":
            some = max(1, len(self.dout) * _PART_BYTES // size)
            starts = range(0, len(self.dout), some)
            return torch.cat([_rows_of(self.rule.align(self._rows(slice(n, n + some)), direction)) for n in starts])
        if all([isinstance(leaf, Tensor) for leaf in leaves]):
            return self.rule.align(self, direction)
        return self.rule.align(self._with(tree_map_only(Half, Half.full, tensors)), direction)

    def _rows(self, rows: slice) -> "LayerCall":
        """Return the call of a few examples, unpacked."""
        tensors = (self.args, self.kwargs, self.dout)
        return self._with(tree_map_only((Tensor, Half), lambda tensor: full(tensor[rows]), tensors))

    def _align_scaled(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Align with a direction of any size: float16 would lose small values and overflow on large ones."""
        largest = torch.stack([value.abs().max() for value in direction.values() if value.numel()]).max()
        scale = torch.where(largest > 0, largest, 1.0)
        return scale * _rows_of(self._align_rows({name: value / scale for name, value in direction.items()}))

    def dot(self, out: Tensor) -> Dot:
        """Return ``<dout_i, out_i>`` for every example; half precision accumulates in float32."""
        return Dot(self.dout, out, self.batch_axis, self.absolute)


@cache
def _is_of_torch(kind: type[nn.Module]) -> bool:
    """Whether the class is torch's own, whose forward pass keeps nothing, or changes only how a parameter is made."""
    return kind.__module__.startswith("torch.nn.modules") and not issubclass(kind, nn.RNNBase)


def _rows_of(contributions: Tensor | Dot) -> Tensor:
    return contributions if isinstance(contributions, Tensor) else contributions.rows()


def detached(tree: Any, copy: bool) -> Any:
    """Return the same nest of arguments with every tensor detached, and cloned if ``copy``."""
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:
        return (tree[0].detach().clone() if copy else tree[0].detach(),)
    return tree_map_only(Tensor, lambda t: t.detach().clone() if copy else t.detach(), tree)


# ---------------------------------------------------------------- twins

MODULE_TABLES = frozenset(nn.Module().__dict__)
HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def original_type(module: nn.Module) -> type[nn.Module]:
    """Return the module's class before ``fully_shard``, which puts a class of its own in front."""
    kind = type(module)
    if not kind.__name__.startswith("FSDP"):
        return kind
    names = [base.__name__ for base in kind.__mro__]
    return kind.__mro__[names.index("FSDPModule") + 1] if "FSDPModule" in names else kind


def make_twin(module: nn.Module, parameters: Mapping[str, Tensor], copy_tensors: bool = False) -> nn.Module:
    """Copy ``module`` and its children, without their storage, and give the copy ``parameters``.

    The twin has its own parameter table, cloned buffers, and only hooks that are part of the computation (weight_norm,
    pruning, hidden states that transformers captures). Attributes that refer to parts of the module (a list of children, a bound method) refer to twins instead.

    Args:
        parameters: A tensor for each parameter below ``module`` by its relative name, also for aliases of a tied one.
        copy_tensors: Also copy tensors that are plain attributes: a forward may write into them.
    """
    twins: dict[int, Any] = {}
    twin = _copy_module(module, parameters, "", twins)
    if module._modules or not type(module).__module__.startswith("torch.nn.modules"):
        for part in twin.modules():
            for name, value in part.__dict__.items():
                if name not in MODULE_TABLES:
                    copied = copy_tensors and isinstance(value, Tensor)
                    part.__dict__[name] = value.detach().clone() if copied else _refer_to(twins, value)
    return twin


class _Uncompiled(nn.Module):
    """Replaces a module from ``torch.compile``, with the parameters under the same names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)  # type: ignore[operator]


def _copy_module(
    module: nn.Module, parameters: Mapping[str, Tensor], prefix: str, twins: dict[int, Any], collects: bool = False
) -> nn.Module:
    """Copy a module and its children; ``collects``: whether one above, which is copied, too, collects hidden states."""
    if isinstance(module, torch.jit.ScriptModule):  # its state cannot be exchanged
        return module
    twin: nn.Module = object.__new__(_Uncompiled if "_orig_mod" in module._modules else original_type(module))
    twins[id(module)] = twin
    # Write through __dict__: nn.Module.__setattr__ insists on nn.Parameter.
    state = twin.__dict__
    state.update(module.__dict__)
    state.pop("_compiled_call_impl", None)  # it would run the original
    if type(twin) is _Uncompiled:
        state.pop("forward", None)
        state["training"] = module.training
    for table in HOOK_TABLES:
        state[table] = OrderedDict()
    if module._forward_pre_hooks:
        state["_forward_pre_hooks"] = reparametrizing_hooks(module)
    collects = collects or bool(state.get("_output_capturing_hooks_installed"))
    if module._forward_hooks and collects:
        state["_forward_hooks"] = _capturing_hooks(module)
    state["_parameters"] = own = {}
    for name, value in module._parameters.items():
        own[name] = None if value is None else parameters[prefix + name]
        twins[id(value)] = own[name]
    if module._buffers:
        state["_buffers"] = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    if module._modules:
        state["_modules"] = {
            name: None if child is None else _copy_module(child, parameters, f"{prefix}{name}.", twins, collects)
            for name, child in module._modules.items()
        }
    if isinstance(twin, nn.RNNBase):  # it reads its weights from a list beside the parameter table
        state["_flat_weights"] = [getattr(twin, name, None) for name in twin._flat_weights_names]
    return twin


def _refer_to(twins: Mapping[int, Any], value: Any) -> Any:
    """Replace modules and parameters in ``value`` by their twins. Copy containers: a forward may write into them."""
    if value is not None and id(value) in twins:
        return twins[id(value)]
    if type(value) in (list, tuple, set):
        return type(value)(_refer_to(twins, part) for part in value)
    if type(value) is dict:
        return {key: _refer_to(twins, part) for key, part in value.items()}
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _refer_to(twins, value.__self__))
    if type(value) is partial:
        return partial(
            _refer_to(twins, value.func), *_refer_to(twins, value.args), **_refer_to(twins, dict(value.keywords))
        )
    return value


def reparametrizing_hooks(module: nn.Module) -> "OrderedDict[int, Any]":
    """Return the hooks that compute ``weight``: pruning, the older weight_norm and spectral_norm."""
    return OrderedDict(
        (key, hook)
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod))
    )


def _capturing_hooks(module: nn.Module) -> "OrderedDict[int, Any]":
    """Return the hooks by which a model of transformers collects its hidden states, which backbones go on with.

    They refer to no module. The model installs them once, in its first pass, so a twin would have none and no hidden states.
    Below a model that is no twin they would tell it of the twin's states, so a part alone does not keep them.
    """
    return OrderedDict(
        (key, hook)
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
    )
