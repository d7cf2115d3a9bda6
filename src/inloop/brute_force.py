"""Every parameter's contributions, by the engine and by brute force: one backward pass for each example."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from inloop.alignment import Tape, capture
from inloop.alignment.black_box import random_state, restore_random_state

Losses = Callable[[nn.Module, Any], Tensor]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_REPEATED = 1e-2  # far above rounding in any precision, below what a graph that cannot be repeated gives
LEFT_OUT = "not counted (layers=)"
_SMALL = 1e-3  # a parameter's contributions below this share of the largest are compared on that scale


@dataclass(frozen=True)
class Row:
    """The comparison of one parameter.

    Attributes:
        rule: How it is aligned.
        relative_error: Largest difference to brute force, as a share of the parameter's largest contribution; None if not counted.
        bytes_per_example: Memory of each example's record until the next step.
        cost: Share of the rewards' time.
        note: Why it is not counted, or a remark on its cost; may be empty.
    """

    parameter: str
    shape: tuple[int, ...]
    rule: str
    exact: bool
    relative_error: float | None
    bytes_per_example: float
    cost: float
    note: str = ""


def compare(model: nn.Module, batch: Any, losses: Losses, options: dict[str, Any]) -> tuple[list[Row], torch.dtype]:
    """Every parameter's contributions, by the engine and by brute force."""
    model.zero_grad()
    state = random_state(next(model.parameters()).device)
    with capture(model, reduction="sum", verify=True, **options) as tape:
        losses_N = losses(model, batch)
        losses_N.sum().backward(retain_graph=True)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu").to(p)
        for name, p in named.items()
    }
    brute = _brute_force(losses_N, named, direction)
    if not _adds_up(brute, named, direction):  # a graph whose backward pass cannot be repeated, as of reversible layers
        brute = _brute_force_anew(lambda: losses(model, batch), len(losses_N), state, named, direction)
    counted = {name for call in tape.calls for name in call.parameter_names.values()}
    scale = max((float(values.abs().max()) for name, values in brute.items() if name in counted), default=0.0)
    costs = _costs(tape, direction)
    rows = []
    for name, parameter in model.named_parameters():
        rule, size, cost = costs.get(name, ("", 0.0, 0.0))
        error = None
        if name in counted:
            none = dict.fromkeys(named)
            aligned = tape.align(none | {name: direction[name]}).double().cpu()
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
    return {name: torch.tensor(values, dtype=torch.float64, device="cpu") for name, values in rows.items()}


def _adds_up(brute: dict[str, Tensor], named: dict[str, nn.Parameter], direction: dict[str, Tensor]) -> bool:
    """Whether the examples of brute force add up to the gradients that the backward pass of their sum has left."""
    error = size = 0.0
    for name, parameter in named.items():
        whole = 0.0 if parameter.grad is None else float((parameter.grad.to_dense() * direction[name]).double().sum())
        error += abs(float(brute[name].sum()) - whole)
        size += float(brute[name].abs().sum())
    return error <= _REPEATED * size


def _brute_force_anew(
    forward: Callable[[], Tensor],
    num_examples: int,
    state: dict[str, Tensor],
    named: dict[str, nn.Parameter],
    direction: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The same with passes of its own for each example, with the same random numbers, and gradients read from ``.grad``."""
    rows: dict[str, list[float]] = {name: [] for name in named}
    for i in range(num_examples):
        for parameter in named.values():
            parameter.grad = None
        restore_random_state(state)
        forward()[i].backward()
        for name, parameter in named.items():
            gradient = parameter.grad
            rows[name].append(0.0 if gradient is None else float((gradient.to_dense() * direction[name]).sum()))
    return {name: torch.tensor(values, dtype=torch.float64, device="cpu") for name, values in rows.items()}


def _costs(tape: Tape, direction: dict[str, Tensor]) -> dict[str, tuple[str, float, float]]:
    """By parameter: how it is aligned, bytes kept of an example, and its share of the time.

    A call's memory and time are divided among its parameters by their size.
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
            rules.setdefault(canonical, set()).add(call.kind)
            sizes[canonical] = sizes.get(canonical, 0.0) + share * sum(t.nbytes for t in call.tensors()) / max(
                call.num_examples, 1
            )
            seconds[canonical] = seconds.get(canonical, 0.0) + share * took
    whole = sum(seconds.values()) or 1.0
    return {name: (" + ".join(sorted(rules[name])), sizes[name], seconds[name] / whole) for name in rules}


def _note(model: nn.Module, name: str, parameter: nn.Parameter, rule: str, brute: Tensor | None) -> str:
    if not parameter.requires_grad:
        return "frozen"
    owner = model.get_submodule(name.rpartition(".")[0])
    if not rule and isinstance(owner, _BatchNorm):
        return "not counted; pass batchnorm_affine=True to count it"
    if not rule:
        used = brute is not None and bool(brute.any())
        return LEFT_OUT if used else "does not enter the loss"
    return "costs a forward and two backward passes" if "run again" in rule or "operation" in rule else ""
