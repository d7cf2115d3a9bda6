"""The derivatives of torch's optimizers, each the diagonal of P."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import NAdam, Optimizer, RAdam, RMSprop
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.sgd import SGD

from inloop.many import together
from inloop.optimizers.registry import Count, Group, ManyDerivatives, State, register_derivative, register_many


def _diagonal(
    *optimizers: type[Optimizer],
    many: ManyDerivatives | None = None,
) -> Callable[[Callable[[State, Group], Tensor | float | None]], Callable[[State, Group], Tensor | float | None]]:
    """Register a function that returns the diagonal of P for ``maximize=False`` (None: the parameter never stepped).

    Args:
        many: Computes Pᵀ g for many parameters at once.
    """

    def register(
        diagonal: Callable[[State, Group], Tensor | float | None],
    ) -> Callable[[State, Group], Tensor | float | None]:
        def derivative(direction: Tensor, state: State, group: Group) -> Tensor | None:
            factor = diagonal(state, group)
            if factor is None:
                return None
            return direction * (-factor if group.get("maximize") else factor)

        for optimizer in optimizers:
            register_derivative(optimizer)(derivative)
        if many is not None:
            register_many(derivative, many)
        return diagonal

    return register


def _count(state: State) -> Any:
    """Return the number of steps; a tensor if reading it would make a device wait, in float64: fused optimizers count in float32."""
    step = state["step"]
    return step.double() if isinstance(step, Tensor) and step.device.type != "cpu" else float(step)


def _slope_of_root(gradient: Tensor, root: Tensor, factor: Any) -> Tensor:
    """Return the derivative of √(c + factor g²) by g; zero where the root is zero."""
    slope: Tensor = factor * gradient / root.clamp_min(torch.finfo(root.dtype).tiny)
    return slope


def _many_of_sgd(
    directions: Sequence[Tensor], states: Sequence[State], group: Group, count: Count | None
) -> Sequence[Tensor] | None:
    if group["dampening"]:
        return None
    factor = _factor_of_sgd({}, group)
    return torch._foreach_mul(list(directions), -factor if group.get("maximize") else factor)


def _factor_of_sgd(state: State, group: Group) -> float:
    momentum = group["momentum"]
    if not momentum:
        return cast(float, group["lr"])
    if group["nesterov"]:
        return cast(float, group["lr"] * (1 + momentum))
    return cast(float, group["lr"] * (1 if not group["dampening"] or state["is_new"] else 1 - group["dampening"]))


_diagonal(SGD, many=_many_of_sgd)(_factor_of_sgd)


def _many_of_adam(
    directions: Sequence[Tensor], states: Sequence[State], group: Group, count: Count | None
) -> Sequence[Tensor] | None:
    """With v fixed, for parameters that have done equally many steps: four operations on all of them."""
    if count is None:
        return None
    (beta1, beta2), moment = group["betas"], "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    first, second = 1 - beta1**count, 1 - beta2**count
    factor = group["lr"] * (1 - beta1) * second**0.5 / first
    factor, least = -factor if group.get("maximize") else factor, group["eps"] * second**0.5

    def compute(directions: list[Tensor], moments: list[Tensor]) -> Sequence[Tensor]:
        denominators = torch._foreach_sqrt(moments)
        if isinstance(least, Tensor):  # _foreach_add_ would read it on the host
            torch.ops.aten._foreach_add_.Tensor(denominators, least)
        else:
            torch._foreach_add_(denominators, least)
        products = torch._foreach_div(directions, denominators)
        torch._foreach_mul_(products, factor)
        return products

    return together(compute, list(directions), [state[moment] for state in states])


@_diagonal(Adam, AdamW, many=_many_of_adam)
def _adam(state: State, group: Group) -> Tensor | None:
    """``c / (√v + ε √second)``, c = lr (1 - β1) √second / first: with v fixed, four operations on a parameter."""
    if "exp_avg_sq" not in state:
        return None
    (beta1, beta2), t, g = group["betas"], _count(state), state["gradient"]
    first, second = 1 - beta1**t, 1 - beta2**t
    moment = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    if g is None:
        denominator = moment.sqrt().add_(group["eps"] * second**0.5)
        return cast(Tensor, denominator.reciprocal_().mul_(group["lr"] * (1 - beta1) * second**0.5 / first))
    root = (moment / second).sqrt()
    denominator = root + group["eps"]
    slope = _slope_of_root(g, root, (1 - beta2) / second)
    if group["amsgrad"]:
        slope = torch.where(moment == state["exp_avg_sq"], slope, 0.0)
    factor = (1 - beta1) / first / denominator - state["exp_avg"] / first * slope / denominator.square()
    return cast(Tensor, group["lr"] * factor)


@_diagonal(NAdam)
def _nadam(state: State, group: Group) -> Tensor | None:
    if "exp_avg_sq" not in state:
        return None
    (beta1, beta2), t, g = group["betas"], _count(state), state["gradient"]
    second = 1 - beta2**t
    product = state["mu_product"]
    now, after = (beta1 * (1 - 0.5 * 0.96 ** (s * group["momentum_decay"])) for s in (t, t + 1))
    of_gradient, of_moment = (1 - now) / (1 - product), after / (1 - product * after)
    root = (state["exp_avg_sq"] / second).sqrt()
    denominator = root + group["eps"]
    factor = (of_gradient + of_moment * (1 - beta1)) / denominator
    if g is not None:
        numerator = of_gradient * g + of_moment * state["exp_avg"]
        factor = factor - numerator * _slope_of_root(g, root, (1 - beta2) / second) / denominator.square()
    return cast(Tensor, group["lr"] * factor)


@_diagonal(RAdam)
def _radam(state: State, group: Group) -> Tensor | float | None:
    if "exp_avg_sq" not in state:
        return None
    (beta1, beta2), t, g = group["betas"], float(state["step"]), state["gradient"]
    first, second = 1 - beta1**t, 1 - beta2**t
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * t * beta2**t / second
    if rho <= 5:
        return cast(float, group["lr"] * (1 - beta1) / first)
    rectified = math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho) * second) / first
    root = state["exp_avg_sq"].sqrt()
    denominator = root + group["eps"]
    factor = (1 - beta1) / denominator
    if g is not None:
        factor = factor - state["exp_avg"] * _slope_of_root(g, root, 1 - beta2) / denominator.square()
    return cast(Tensor, group["lr"] * rectified * factor)


@_diagonal(Adamax)
def _adamax(state: State, group: Group) -> Tensor | None:
    if "exp_inf" not in state:
        return None
    (beta1, _), g, largest = group["betas"], state["gradient"], state["exp_inf"]
    factor = (1 - beta1) / largest
    if g is not None:
        slope = torch.where(g.abs() + group["eps"] >= largest, g.sign(), 0.0)  # g is the largest so far
        factor = factor - state["exp_avg"] * slope / largest.square()
    return cast(Tensor, group["lr"] / (1 - beta1 ** _count(state)) * factor)


@_diagonal(RMSprop)
def _rmsprop(state: State, group: Group) -> Tensor | None:
    if "square_avg" not in state:
        return None
    alpha, g, moment = group["alpha"], state["gradient"], state["square_avg"]
    mean = state["grad_avg"] if group["centered"] else None
    root = (moment if mean is None else moment - mean.square()).sqrt()
    denominator = root + group["eps"]
    factor = 1 / denominator
    if g is not None:
        slope = _slope_of_root(g if mean is None else g - mean, root, 1 - alpha)
        factor = factor - g * slope / denominator.square()
    return cast(Tensor, group["lr"] * factor)


@_diagonal(Adagrad)
def _adagrad(state: State, group: Group) -> Tensor | None:
    if "sum" not in state:
        return None
    g, root = state["gradient"], state["sum"].sqrt()
    denominator = root + group["eps"]
    factor = 1 / denominator
    if g is not None:
        factor = factor - g * _slope_of_root(g, root, 1.0) / denominator.square()
    return cast(Tensor, group["lr"] / (1 + (_count(state) - 1) * group["lr_decay"]) * factor)
