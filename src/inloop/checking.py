"""Is the alignment of this model exact? Compares every parameter with brute force, and measures its cost.

Brute force is one backward pass for each of a few examples. Where the model allows it, both run in float64, on a copy.
"""

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from inloop.alignment.call import MODULE_TABLES
from inloop.alignment.inputs import exchanged, has_several_rows, neighbours, tensors_of
from inloop.alignment.plan import LayerFilter
from inloop.brute_force import LEFT_OUT, Losses, Row, compare
from inloop.errors import InloopError, UsageError
from inloop.randomness import untouched_generators

_HOW_THEY_DIFFER = (
    "{} of {} parameters differ from brute force, the worst is '{}' ({}) by {:.1e} of its largest contribution. The sum over examples "
    "is right, so one example's contribution counts for another: {} Fix: give each example a loss of its own, keep examples on the first "
    "axis, or leave the layer out with layers=."
)
_THEY_INTERACT = (
    "examples interact. If some of this batch are replaced, the losses of others change (a contrastive loss, mixup, statistics or routing "
    "over the batch), so no example has a gradient of its own to compare with. A learner trains such a model, and rewards each example for its "
    "part of the batch's gradient: the rows of each layer that are its own."
)
_THEY_DO_NOT = (
    "the rows of that layer are not the examples in their order, or a rule that you have registered is wrong."
)
_HOW_THEY_COST = (
    "{:.0%} of the rewards' time goes to modules without a rule of their own ({}): inloop runs them again. This is exact; if it is too "
    "slow, register a rule (inloop.alignment_rule) or leave them out with layers=."
)
_NOT_COUNTED = (
    "Parameter '{}' enters the loss, and no recorded layer or operation used it, so its part of the rewards is missing. What usually is the reason: it "
    "is used outside of the model's forward pass, in a custom autograd function, or in torch.func. Fix: use it in forward by plain torch functions and "
    "call the model itself, or leave its module out with layers=."
)
_NOTHING_COMPARED = (
    "No parameter of the model was compared: none that can be trained enters the losses through a recorded layer. Fix: let losses(model, batch) call the "
    "model that it is given, with gradients, and choose at least one of its layers with layers=."
)
_CHANGE = 1e-4  # of a loss, that is more than rounding


@dataclass(frozen=True)
class Check:
    """The result of :func:`check`.

    Attributes:
        dtype: The precision of the comparison.
        interact: Whether the rewards differ from brute force because the loss of an example depends on the others.
        problems: The errors, each with its fix; empty if the alignment is exact.
        warnings: Remarks that are no errors.
    """

    rows: list[Row] = field(default_factory=list)
    num_examples: int = 0
    dtype: str = ""
    interact: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def max_relative_error(self) -> float:
        """The largest error of all parameters; nan if none could be compared."""
        errors = [row.relative_error for row in self.rows if row.relative_error is not None]
        return max(errors, default=float("nan"))

    @property
    def ok(self) -> bool:
        """Whether every counted parameter is exact. BatchNorm's decomposition is a warning, not an error."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
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
    """Compare the rewards of a few examples with brute force, parameter by parameter. The model stays unchanged.

    Args:
        batch: Whatever ``losses`` takes; tensors in it, in tuples, lists or dicts, have the examples on their first axis.
        losses: ``losses(model, batch)`` gives one loss for each example, [N].
        num_examples: Examples of the batch to use, at least 2: one alone cannot show whether examples interact.
        layers, batchnorm_affine: As in :func:`inloop.capture`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> report = check(model, torch.randn(8, 3), lambda model, x: model(x).squeeze(1) ** 2)
        >>> report.ok, report.max_relative_error < 1e-9
        (True, True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; a torch.nn.Module is needed.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("The model has no parameter that can be trained. Fix: requires_grad_(True) on those that are.")
    if not callable(losses):
        raise UsageError(
            f"losses is a {type(losses).__name__}; a function losses(model, batch) is needed. The batch comes before it."
        )
    if num_examples < 2:
        raise UsageError(f"num_examples={num_examples}: at least 2 are needed.")
    warnings: list[str] = []
    replica, (few, num_examples) = copy.deepcopy(model), _first(model, batch, losses, num_examples)
    norms = [name for name, module in replica.named_modules() if isinstance(module, _BatchNorm) and module.training]
    for name in norms:
        replica.get_submodule(name).eval()
    if norms:
        warnings.append(
            f"BatchNorm in training mode ('{norms[0]}'{f' and {len(norms) - 1} more' if norms[1:] else ''}) mixes the examples of a batch. Rewards then "
            "decompose the batch's gradient and add up to it, but are no derivatives of single losses. This check puts BatchNorm "
            "in eval mode."
        )
    options: dict[str, Any] = {"layers": layers, "batchnorm_affine": batchnorm_affine, "num_examples": num_examples}
    try:
        in_float64 = _compared(*_in_float64(replica, few), losses, options)
        if in_float64.ok or not _leaves_float64(*_in_float64(replica, few), losses):
            return replace(in_float64, num_examples=num_examples, warnings=warnings + in_float64.warnings)
        warnings.append(
            "The model computes something in less than float64, whatever its inputs; compared in its own precision."
        )
    except (RuntimeError, TypeError) as error:
        warnings.append(f"The model does not run in float64 ({_first_line(error)}); compared in its own precision.")
    as_it_is = _compared(copy.deepcopy(replica), few, losses, options)
    return replace(as_it_is, num_examples=num_examples, warnings=warnings + as_it_is.warnings)


def _compared(model: nn.Module, batch: Any, losses: Losses, options: dict[str, Any]) -> Check:
    """Compare in the model's own precision."""
    try:
        with untouched_generators():
            rows, dtype = compare(model, batch, losses, options)
    except InloopError as error:
        return Check(problems=[str(error)])
    wrong = [row for row in rows if row.relative_error is not None and not row.exact]
    interact = bool(wrong) and _interact(model, batch, losses)
    problems = [_how_they_differ(wrong, len(rows), interact)] if wrong else []
    if options["layers"] is None:
        problems += [_NOT_COUNTED.format(row.parameter) for row in rows if row.note == LEFT_OUT][:1]
    if not problems and all(row.relative_error is None for row in rows):
        problems = [_NOTHING_COMPARED]
    return Check(rows, 0, str(dtype).removeprefix("torch."), interact, problems, [] if problems else _warnings(rows))


def _interact(model: nn.Module, batch: Any, losses: Losses) -> bool:
    """Whether losses of examples change when others are replaced."""

    def losses_with(batch: Any) -> Tensor:
        with untouched_generators():
            torch.manual_seed(0)
            return losses(copy.deepcopy(model), batch).detach().double()

    before_N = losses_with(batch)
    is_replaced_N = torch.arange(len(before_N), device="cpu") < len(before_N) // 2
    for replaced_N in (is_replaced_N, ~is_replaced_N):
        ((others,), _) = exchanged(((batch,), {}), neighbours(replaced_N), folded="together")
        change_N = (losses_with(others) - before_N).abs()
        if bool((change_N > _CHANGE * (before_N.abs() + before_N.abs().mean()))[~replaced_N].any()):
            return True
    return False


def _first(model: nn.Module, batch: Any, losses: Losses, num_examples: int) -> tuple[Any, int]:
    """The first examples of the batch, and their number."""
    with untouched_generators():  # with gradients: a loss may need them itself
        values = losses(copy.deepcopy(model), batch)
    if not isinstance(values, Tensor) or values.dim() != 1:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(
            f"losses(model, batch) gave {got}; one loss for each example, a tensor of shape [N], is needed. Fix: reduction='none', and a "
            "mean or sum over an example's other axes (tokens)."
        )
    if not values.requires_grad:
        raise UsageError(
            f"losses(model, batch) gave losses of type {values.dtype} without a gradient. Fix: do not detach them or switch gradients off, and let them call the model."
        )
    count = len(values)
    if count < 2:
        raise UsageError(f"The batch has {'one example' if count else 'no example'}; at least 2 are needed.")
    if any(has_several_rows(tensor, count) for tensor in tensors_of(batch)):
        return batch, count  # which rows are those of the first examples is not known yet
    if count <= num_examples:
        return batch, count
    few = tree_map_only(Tensor, lambda t: t[:num_examples] if t.dim() and len(t) == count else t, batch)
    try:
        with untouched_generators():
            num_losses = len(losses(copy.deepcopy(model), few))
        problem = "" if num_losses == num_examples else f"there were {num_losses} losses"
    except Exception as error:  # anything, as the loss is the user's
        problem = f"{type(error).__name__}: {_first_line(error)}"
    if problem:
        raise UsageError(
            f"losses(model, batch) works with {count} examples, and not with the first {num_examples} ({problem}), since the batch cannot be cut by its tensors' "
            f"first axes. Fix: num_examples={count}, or a smaller batch."
        )
    return few, num_examples


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _in_float64(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Copies of model and batch in float64."""

    def precise(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, tree)

    replica = copy.deepcopy(model).double()
    for module in replica.modules():
        for name, value in vars(module).items():  # tensors that are no buffers
            if name not in MODULE_TABLES and isinstance(value, Tensor | list | tuple | dict):
                vars(module)[name] = precise(value)
    return replica, precise(batch)


class _LowPrecision(TorchDispatchMode):
    """Notices results in less than float64."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.seen |= any(leaf.is_floating_point() and leaf.dtype != torch.float64 for leaf in leaves)
        return result


def _leaves_float64(model: nn.Module, batch: Any, losses: Losses) -> bool:
    """Whether a model in float64 computes something in less: norms and scans of some models are always in float32."""
    watch = _LowPrecision()  # type: ignore[no-untyped-call]
    with untouched_generators(), watch:
        losses(copy.deepcopy(model), batch)
    return bool(watch.seen)


def _how_they_differ(wrong: list[Row], num_rows: int, interact: bool) -> str:
    worst = max(wrong, key=lambda row: row.relative_error or 0.0)
    reason = _THEY_INTERACT if interact else _THEY_DO_NOT
    return _HOW_THEY_DIFFER.format(len(wrong), num_rows, worst.parameter, worst.rule, worst.relative_error, reason)


def _warnings(rows: list[Row]) -> list[str]:
    costly = [row for row in rows if "run again" in row.rule]
    share = sum(row.cost for row in costly)
    if share < 0.25:
        return []
    kinds = ", ".join(sorted({row.rule.partition(",")[0] for row in costly}))
    return [_HOW_THEY_COST.format(share, kinds)]
