"""How the update of an optimizer depends on the gradient, by the optimizer's class."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from inloop.errors import UsageError

State = Mapping[str, Any]
Group = Mapping[str, Any]

# (direction, state of the parameter after the step, settings of its group in the step) -> Pᵀ direction; None for zero
Derivative = Callable[[Tensor, State, Group], Tensor | None]

# (directions, states, settings of their group, number of steps if it is the same for all) -> Pᵀ direction for several parameters, with few
# kernels; None if these must be done one by one
ManyDerivatives = Callable[[Sequence[Tensor], Sequence[State], Group, "Count | None"], Sequence[Tensor] | None]
Count = float | Tensor

_REGISTERED: dict[type[Optimizer], Derivative] = {}
_MANY: dict[Derivative, ManyDerivatives] = {}


def register_derivative(optimizer: type[Optimizer]) -> Callable[[Derivative], Derivative]:
    """Register how the update of an optimizer depends on the gradient, for ``InLoop(optimizer=)``.

    The function receives a direction (a gradient of the reference loss by one parameter), the optimizer's state for
    that parameter after its step, and the settings of its group in that step. It returns ``Pᵀ direction``, in the
    direction's shape. It may leave out a factor that is the same for all parameters.

    Example:
        >>> import torch
        >>> class SignDescent(torch.optim.SGD):
        ...     def step(self, closure=None): ...
        >>> @register_derivative(SignDescent)
        ... def sign_descent(direction, state, group):
        ...     return torch.zeros_like(direction)  # the sign of a number does not change with it
    """

    def register(derivative: Derivative) -> Derivative:
        _REGISTERED[optimizer] = derivative
        return derivative

    return register


def register_many(derivative: Derivative, many: ManyDerivatives) -> None:
    """Register how to compute a derivative for many parameters at once."""
    _MANY[derivative] = many


def many_of(derivative: Derivative) -> ManyDerivatives | None:
    """Return how to compute a derivative for many parameters at once; None if that is not known."""
    return _MANY.get(derivative)


def derivative_of(optimizer: Optimizer) -> Derivative:
    """Return the derivative of the class that defines ``step``: a subclass with its own step is another optimizer."""
    step = inspect.unwrap(type(optimizer).step)
    for known, derivative in _REGISTERED.items():
        if isinstance(optimizer, known) and inspect.unwrap(known.step) is step:
            return derivative
    names = ", ".join(sorted(known.__name__ for known in _REGISTERED))
    raise UsageError(
        f"How a step of {type(optimizer).__name__} depends on the gradient is not known; it is of {names}. Fix: say it with "
        "inloop.optimizers.register_derivative, or pass optimizer=False: examples are then judged as if the optimizer were SGD."
    )
