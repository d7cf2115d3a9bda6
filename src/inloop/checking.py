"""Is the alignment of this model exact? Every parameter against brute force, and what each costs.

Brute force is one backward pass for each of a few examples. Where the model allows it, both are done in float64, on a copy.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from inloop.alignment import Tape, capture
from inloop.alignment.batch_size import AnyCall
from inloop.alignment.call import LayerCall, leaves_of
from inloop.alignment.operation import Operation
from inloop.alignment.plan import LayerFilter
from inloop.alignment.reduced import ReducedCall
from inloop.errors import InloopError, UsageError

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_SMALL = 1e-3  # a parameter's contributions below this share of the largest are compared on that scale

_HOW_THEY_DIFFER = (
    "{} of {} parameters differ from brute force, the worst is '{}' ({}) by {:.1e} of its largest contribution. All examples together "
    "are right, so what one contributes is counted for another: examples interact (a contrastive loss, mixup, statistics over the "
    "batch), or a rule of your own is wrong, or the rows of that layer are not the examples in their order. Fix: give each "
    "example a loss of its own, keep examples on the first axis, or leave the layer out with layers=."
)
_HOW_THEY_COST = (
    "{:.0%} of the rewards' time goes to modules without a rule of their own ({}), which are run again. It is exact; if it is too "
    "slow, register a rule (inloop.alignment_rule) or leave them out with layers=."
)

Losses = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Row:
    """What is known of one parameter.

    Attributes:
        rule: How it is aligned.
        relative_error: Largest difference to brute force, as a share of the parameter's largest contribution; None if not counted.
        bytes_per_example: What is kept of each example until the next step.
        cost: Share of the time that the rewards take.
        note: Why it is approximate, or not counted, or what it needs; empty if there is nothing to say.
    """

    parameter: str
    shape: tuple[int, ...]
    rule: str
    exact: bool
    relative_error: float | None
    bytes_per_example: float
    cost: float
    note: str = ""


@dataclass(frozen=True)
class Check:
    """The result of :func:`check`.

    Attributes:
        dtype: In which precision the two were compared.
        problems: What is wrong, each with what to do; empty if all is well.
        warnings: What one should know.
    """

    rows: list[Row] = field(default_factory=list)
    num_examples: int = 0
    dtype: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def max_relative_error(self) -> float:
        """Over all parameters; nan if nothing could be compared."""
        errors = [row.relative_error for row in self.rows if row.relative_error is not None]
        return max(errors, default=float("nan"))

    @property
    def ok(self) -> bool:
        """Whether every counted parameter is exact. BatchNorm's decomposition is a warning, not an error."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        error = None if math.isnan(self.max_relative_error) else self.max_relative_error
        return {"ok": self.ok, "max_relative_error": error} | asdict(self)


def check(
    model: nn.Module,
    batch: Any,
    losses: Losses,
    *,
    num_examples: int = 4,
    layers: LayerFilter | None = None,
    batchnorm_affine: bool = False,
) -> Check:
    """Compare the rewards of a few examples with brute force, parameter by parameter. The model is left as it is.

    Args:
        batch: Whatever ``losses`` takes; tensors in it, in tuples, lists or dicts, have the examples on their first axis.
        losses: ``losses(model, batch)`` gives one loss for each example, [N].
        num_examples: How many examples of the batch to use, at least 2: whether they interact cannot be seen in one.
        layers, batchnorm_affine: As in :func:`inloop.capture`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> report = check(model, torch.randn(8, 3), lambda model, x: model(x).squeeze(1) ** 2)
        >>> report.ok, report.max_relative_error < 1e-9
        (True, True)
    """
    if num_examples < 2:
        raise UsageError(f"num_examples={num_examples}: at least 2 are needed.")
    warnings: list[str] = []
    replica, few = copy.deepcopy(model), _first(model, batch, losses, num_examples)
    norms = [name for name, module in replica.named_modules() if isinstance(module, _BatchNorm) and module.training]
    for name in norms:
        replica.get_submodule(name).eval()
    if norms:
        warnings.append(
            f"BatchNorm in training mode ('{norms[0]}'{f' and {len(norms) - 1} more' if norms[1:] else ''}) mixes the examples of a batch. Rewards are then a "
            "decomposition of the batch's gradient that adds up to it, not derivatives of single losses. Compared here with it "
            "in eval mode."
        )
    options: dict[str, Any] = {"layers": layers, "batchnorm_affine": batchnorm_affine}
    problems: list[str] = []
    for dtype in (torch.float64, None):
        try:
            with torch.random.fork_rng(devices=[]):
                rows, seen = _compare(*_in_precision(copy.deepcopy(replica), few, dtype), losses, options)
        except InloopError as error:
            return Check([], num_examples, _name(dtype), [str(error)], warnings)
        except (RuntimeError, TypeError) as error:
            if dtype is None:
                raise
            warnings.append(
                f"Could not be run in float64 ({str(error).splitlines()[0]}); compared in its own precision."
            )
            continue
        break
    problems.extend(_problems(rows))
    warnings.extend(_warnings(rows))
    return Check(rows, num_examples, _name(seen), problems, warnings)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _first(model: nn.Module, batch: Any, losses: Losses, num_examples: int) -> Any:
    """The first examples of the batch."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        values = losses(copy.deepcopy(model), batch)
    if not isinstance(values, Tensor) or values.dim() != 1:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(
            f"losses(model, batch) gave {got}; one loss for each example, a tensor of shape [N], is needed: reduction='none', and a mean "
            "or sum over whatever an example has besides (tokens)."
        )
    count = len(values)
    if count < 2:
        raise UsageError("The batch has one example; at least 2 are needed.")
    return tree_map_only(Tensor, lambda t: t[:num_examples] if t.dim() and len(t) == count else t, batch)


def _in_precision(model: nn.Module, batch: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    if dtype is None:
        return model, batch
    return model.to(dtype), tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def _compare(model: nn.Module, batch: Any, losses: Losses, options: dict[str, Any]) -> tuple[list[Row], torch.dtype]:
    """Every parameter's contributions, by the engine and by brute force."""
    model.zero_grad()
    with capture(model, "sum", verify=True, **options) as tape:
        losses_N = losses(model, batch)
        losses_N.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for name, p in named.items()
    }
    brute = _brute_force(losses_N, named, direction)
    counted = {name for call in tape.calls for name in call.parameter_names.values()}
    scale = max((float(values.abs().max()) for name, values in brute.items() if name in counted), default=0.0)
    costs = _costs(tape, direction)
    rows = []
    for name, parameter in model.named_parameters():
        rule, size, cost = costs.get(name, ("", 0.0, 0.0))
        error = None
        if name in counted:
            none = dict.fromkeys(named)
            aligned = tape.align(none | {name: direction[name]}).double()
            largest = max(float(brute[name].abs().max()), _SMALL * scale)
            error = float((aligned - brute[name]).abs().max()) / largest if largest else 0.0
        tolerance = _TOLERANCE.get(losses_N.dtype, 5e-2)
        exact = error is not None and error <= tolerance
        note = _note(model, name, parameter, rule, brute.get(name))
        rows.append(Row(name, tuple(parameter.shape), rule, exact, error, size, cost, note))
    return rows, losses_N.dtype


def _brute_force(losses_N: Tensor, named: dict[str, nn.Parameter], direction: dict[str, Tensor]) -> dict[str, Tensor]:
    """``<∂l_i/∂θ, direction_θ>`` for every parameter θ, [N], by one backward pass for each example."""
    rows: dict[str, list[float]] = {name: [] for name in named}
    for loss in losses_N:
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for (name, values), gradient in zip(rows.items(), gradients, strict=True):
            dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            values.append(0.0 if dense is None else float((dense * direction[name]).sum()))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}


def _costs(tape: Tape, direction: dict[str, Tensor]) -> dict[str, tuple[str, float, float]]:
    """By parameter: how it is aligned, bytes kept of an example, and its share of the time.

    What a call keeps and takes is divided among its parameters by their size.
    """
    rules: dict[str, set[str]] = {}
    sizes: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for call in tape.calls:
        local = {name: direction[canonical] for name, canonical in call.parameter_names.items()}
        start = time.perf_counter()
        call.align(local)
        took = time.perf_counter() - start
        total = sum(direction[canonical].numel() for canonical in call.parameter_names.values())
        for canonical in call.parameter_names.values():
            share = direction[canonical].numel() / max(total, 1)
            rules.setdefault(canonical, set()).add(_describe(call))
            sizes[canonical] = sizes.get(canonical, 0.0) + share * sum(_sizes(call)) / max(call.num_examples, 1)
            seconds[canonical] = seconds.get(canonical, 0.0) + share * took
    whole = sum(seconds.values()) or 1.0
    return {name: (" + ".join(sorted(rules[name])), sizes[name], seconds[name] / whole) for name in rules}


def _sizes(call: AnyCall) -> Iterator[int]:
    kept: Any = dict(call.gradients) if isinstance(call, ReducedCall) else (call.args, call.kwargs, call.dout)
    yield from (leaf.nbytes for leaf in leaves_of(kept) if isinstance(leaf, Tensor))
    if isinstance(call, LayerCall) and call.rule.keeps_parameters:
        yield from (parameter.nbytes for parameter in call.layer.parameters())


def _describe(call: AnyCall) -> str:
    layer = call.call.layer if isinstance(call, ReducedCall) else call.layer
    if isinstance(layer, Operation):
        return f"operation {layer.recipe.name}"
    kind = type(layer).__name__
    if call.rule.replays:
        return f"{kind}, run again"
    return f"{kind}, gradients kept" if isinstance(call, ReducedCall) else kind


def _note(model: nn.Module, name: str, parameter: nn.Parameter, rule: str, brute: Tensor | None) -> str:
    if not parameter.requires_grad:
        return "frozen"
    owner = model.get_submodule(name.rpartition(".")[0])
    if not rule and isinstance(owner, _BatchNorm):
        return "not counted; pass batchnorm_affine=True to count it"
    if not rule:
        used = brute is not None and bool(brute.any())
        return "not counted (layers=)" if used else "has no part in the loss"
    return "costs a forward and two backward passes" if "run again" in rule or "operation" in rule else ""


def _problems(rows: list[Row]) -> list[str]:
    wrong = [row for row in rows if row.relative_error is not None and not row.exact]
    if not wrong:
        return []
    worst = max(wrong, key=lambda row: row.relative_error or 0.0)
    return [_HOW_THEY_DIFFER.format(len(wrong), len(rows), worst.parameter, worst.rule, worst.relative_error)]


def _warnings(rows: list[Row]) -> list[str]:
    costly = [row for row in rows if "run again" in row.rule]
    share = sum(row.cost for row in costly)
    if share < 0.25:
        return []
    kinds = ", ".join(sorted({row.rule.partition(",")[0] for row in costly}))
    return [_HOW_THEY_COST.format(share, kinds)]
