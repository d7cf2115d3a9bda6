"""The one formula of the engine, and the table of layers for which it is exact.

Through one call ``out = f(x; θ)``, example i contributes ``<dout_i, J_θ f(x; θ)[g]_i>`` to a direction g.

* f linear in its parameters: ``J[g] = f(x; g)``. Run the layer with the direction as its weights and dot the result
  with the output gradient. The paper's Lemma 2 (Linear) and Lemma 3 (convolution) are this one fact.
* f affine in its parameters: ``J[g] = f(x; g) - f(x; 0)``.

The engine unfolds no input, and forms per-example gradients only if they are smaller than x and dout
(:class:`PerExample`). ``layers.py`` says which torch layers are which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from inloop.alignment import sizes
from inloop.alignment.call import LayerCall, original_type
from inloop.alignment.kept import ExampleGradients
from inloop.alignment.sums import Dot

AlignFunction = Callable[[LayerCall, Mapping[str, Tensor]], Tensor | Dot]


def linear_in_parameters(call: LayerCall, direction: Mapping[str, Tensor]) -> Dot:
    """Return ``<dout_i, f(x; g)_i>``."""
    return call.dot(call.run(direction))


def affine_in_parameters(call: LayerCall, direction: Mapping[str, Tensor]) -> Dot:
    """Return ``<dout_i, f(x; g)_i - f(x; 0)_i>``."""
    zero = {name: torch.zeros_like(value) for name, value in direction.items()}
    return call.dot(call.run(direction) - call.run(zero))


MOST = 0.75  # form gradients if they need at most this many times the memory of x and dout
PRECISE = (torch.float32, torch.float64)
Wanted = tuple[bool, bool, bool]  # whether to form the gradients of x, weight and bias
Backward = Callable[[nn.Module, Tensor, Tensor, Tensor, Wanted], tuple[Tensor | None, Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True)
class PerExample:
    """How to form the gradients ``∂l_i/∂weight`` and ``∂l_i/∂bias``, [N, *shape], from x and dout.

    They are smaller than x and dout for layers with few parameters on many positions (the first convolutions of a
    network, normalisation layers). The tape then forms them at once, releases x and dout, and aligns by a dot product
    with the direction. The result is the same.

    Attributes:
        weight: Returns the gradients of the weight.
        positions: Returns dout with the positions that share the bias on one axis, [N, positions, *shape of the bias].
        when: Whether this holds for a call.
        shares_dout: Whether another call likely holds the same dout, so that releasing it frees nothing.
        backward: ``(layer, x, weight, dout, wanted)``, the layer's own backward pass. With it the layer's graph node
            can form these gradients and add them up to the batch gradient (``hooks.py``). None if that is not worth it.
        most_if_fused: Like ``MOST``, for gradients that cost no time, since the backward pass forms them anyway.
        multiplies: Whether the weight's gradient is a product of matrices. That of bfloat16 tensors is kept in bfloat16, since
            it is summed in float32 and rounded once. Other gradients are summed, and kept, in float32.
    """

    weight: Callable[[LayerCall], Tensor]
    positions: Callable[[LayerCall], Tensor]
    when: Callable[[LayerCall], bool] = lambda call: True
    shares_dout: Callable[[LayerCall], bool] = lambda call: False
    backward: Backward | None = None
    most_if_fused: float = 0.75
    multiplies: bool = False

    def is_worthwhile(self, call: LayerCall, fused: bool) -> bool:
        """Whether per-example gradients can be formed from this call, and take little enough memory.

        Args:
            call: A call with its dout, or with its output in place of dout.
            fused: Whether forming them takes no extra time.
        """
        if call.args and call.args[0].nbytes + call.dout.nbytes < sizes.SMALL_CALL:
            return False
        plain = not (call.batch_axis or call.kwargs) and call.example_of_row is None
        if not plain or len(call.args) != 1 or call.dout.numel() == 0 or not _is_summable(call, fused):
            return False
        size = sum(
            [p.numel() for name, p in call.layer._parameters.items() if name in call.parameter_names and p is not None]
        )
        freed = call.args[0].nbytes + (0 if self.shares_dout(call) else call.dout.nbytes)
        most = self.most_if_fused if fused else MOST
        return len(call.dout) * size * self._precision(call).itemsize <= most * freed and self.when(call)

    def _precision(self, call: LayerCall) -> torch.dtype:
        """Return the precision of the weight's gradients."""
        return call.dout.dtype if self.multiplies else torch.promote_types(call.dout.dtype, torch.float32)

    @torch.no_grad()
    def form(self, call: LayerCall, magnitudes: bool) -> ExampleGradients:
        """Return the per-example gradients, in place of the call.

        Args:
            magnitudes: Also add up magnitudes where a gradient may cancel within an example, for the guard.
        """
        gradients, sizes = {}, {}
        summed, precision = torch.promote_types(call.dout.dtype, torch.float32), self._precision(call)
        for name in call.parameter_names:
            if name == "bias":
                positions = self.positions(call)
                gradients[name] = positions.sum(dim=1, dtype=summed)
                if magnitudes:  # an estimate is enough for the scale of a rounding error
                    every = 16 if positions.shape[1] >= 256 else 1
                    sizes[name] = every * positions[:, ::every].abs().sum(dim=1, dtype=summed)
            else:
                cast = call.but(args=(call.args[0].to(precision),), dout=call.dout.to(precision))
                with replace(call.autocast, enabled=False).again():
                    gradients[name] = self.weight(cast)
        return ExampleGradients(
            name=call.name,
            kind=f"{call.kind}, gradients kept",
            parameter_names=call.parameter_names,
            batch=call.batch,
            num_recorded=call.num_recorded,
            num_examples=len(call.dout),
            num_positions=call.num_positions,
            gradients=gradients,
            sizes=sizes,
            coarsest=call.dout.dtype,
        )


def _is_summable(call: LayerCall, fused: bool) -> bool:
    """Whether the precisions of the call can hold sums over positions, and over the batch if the layer's node is exchanged."""
    if call.dout.dtype in PRECISE and not call.autocast.enabled:
        return True
    in_float16 = torch.float16 in (call.dout.dtype, call.args[0].dtype, call.autocast.enabled and call.autocast.dtype)
    return not (fused or in_float16)  # float16 would lose small gradients


@dataclass(frozen=True, slots=True)
class Rule:
    """How to align the calls of a type of layer.

    Attributes:
        align: ``(call, direction) -> contributions_N``, or the product that ``call.dot`` returns.
        parameters: All parameters that the layer may own; with others the rule does not apply.
        example_dims: How many axes of the input belong to one example; an input without one more is not batched.
        when: A further condition on the layer.
        keeps_parameters: Whether ``call.layer`` has the parameters of step t; else it has shapes without values.
        per_example: How to form per-example gradients, where they are smaller than x and dout; None for never.
        separable: Whether row i of the output depends on row i of the one input alone: then a call can run in parts.
        casts_input: Whether autocast runs it in its lower precision, so that the input can be kept in that.
    """

    align: AlignFunction
    parameters: frozenset[str]
    example_dims: Callable[[nn.Module], int]
    when: Callable[[nn.Module], bool]
    keeps_parameters: bool = False
    per_example: PerExample | None = None
    separable: bool = False
    casts_input: bool = False


_RULES: dict[type[nn.Module], Rule] = {}


def alignment_rule(
    *layer_types: type[nn.Module],
    parameters: tuple[str, ...] = ("weight", "bias"),
    example_dims: Callable[[nn.Module], int] | int = 1,
    when: Callable[[nn.Module], bool] = lambda layer: True,
    keeps_parameters: bool = False,
    per_example: PerExample | None = None,
    separable: bool = False,
    casts_input: bool = False,
) -> Callable[[AlignFunction], AlignFunction]:
    """Register how to align layers of these types. Use it as a decorator or on a ready-made function.

    Args:
        parameters: The names of all parameters that the layer owns directly.
        example_dims: How many axes of the first input belong to one example, or a function of the layer.
        when: A further condition on the layer; if it is false, the exact but slower fallback is used.
        keeps_parameters: Keep a copy of the layer's parameters of step t, for a rule that reads them from
            ``call.layer``. By the time a direction is known, the optimizer has changed the layer's own.
        per_example: How to form per-example gradients, for calls where they are smaller than x and dout.
        separable: Whether row i of the output depends on row i of the one input alone (not so for BatchNorm).
        casts_input: Whether autocast runs the layer in its lower precision, so that the input can be kept in that.

    Example:
        A layer that is linear in its parameters needs no code of its own:

        >>> class Scale(nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(features))
        ...     def forward(self, x):
        ...         return x * self.scale
        >>> _ = alignment_rule(Scale, parameters=("scale",))(linear_in_parameters)
    """

    def register(function: AlignFunction) -> AlignFunction:
        dims = example_dims if callable(example_dims) else lambda layer: example_dims
        for layer_type in layer_types:
            _RULES[layer_type] = Rule(
                function, frozenset(parameters), dims, when, keeps_parameters, per_example, separable, casts_input
            )
        return function

    return register


_RULES_BY_NAME: list[tuple[str, str, Rule]] = []


def alignment_rule_by_name(
    package: str,
    suffix: str,
    parameters: tuple[str, ...],
    align: AlignFunction,
    when: Callable[[nn.Module], bool] = lambda layer: True,
) -> None:
    """Register how to align layers whose class name ends in ``suffix``, without importing their package."""
    _RULES_BY_NAME.append((package, suffix, Rule(align, frozenset(parameters), lambda layer: 1, when)))


def _named_rule(layer: nn.Module) -> Rule | None:
    kind = original_type(layer)
    for package, suffix, rule in _RULES_BY_NAME:
        if kind.__module__.startswith(f"{package}.") and kind.__name__.endswith(suffix):
            owned = {name for name, value in layer._parameters.items() if value is not None}
            known = bool(owned) and owned <= rule.parameters and not _has_children_with_parameters(layer)
            return rule if known and rule.when(layer) else None
    return None


def rule_for(layer: nn.Module) -> Rule | None:
    """Return the rule of the layer's type if the layer really behaves like its type; else None.

    The layer must override nothing of its type's behaviour. It must own no parameter that the rule does not know, not
    even in a child: a parametrization such as weight_norm keeps Linear's forward and moves the weight there.
    """
    kind = original_type(layer)
    layer_type = next((known for known in kind.__mro__ if known in _RULES), None)
    if layer_type is None:
        return _named_rule(layer)
    if not _keeps_behaviour(kind, layer_type):
        return None
    rule = _RULES[layer_type]
    # The direction would not replace a weight that is a buffer or a plain attribute.
    replaceable = all(name in layer._parameters or not hasattr(layer, name) for name in rule.parameters)
    known = {name for name, value in layer._parameters.items() if value is not None} <= rule.parameters
    return rule if replaceable and known and not _has_children_with_parameters(layer) and rule.when(layer) else None


def _has_children_with_parameters(layer: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in layer.children())


_HARMLESS_OVERRIDES = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters", "__doc__", "__module__"})


def _keeps_behaviour(layer_type: type[nn.Module], rule_type: type[nn.Module]) -> bool:
    """Whether no class between the layer's type and the rule's overrides anything that the rule's type has."""
    subclasses = layer_type.__mro__[: layer_type.__mro__.index(rule_type)]
    overridden = {
        name
        for subclass in subclasses
        for name, value in vars(subclass).items()
        if callable(value) or isinstance(value, property)
    }
    return not (overridden & set(dir(rule_type))) - _HARMLESS_OVERRIDES
