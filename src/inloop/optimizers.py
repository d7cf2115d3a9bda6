"""How an optimizer's step depends on the gradient: the derivative of the update, by optimizer.

More weight on an example changes g_t. This changes the update, which changes the reference loss:

    r_i = <∇l_i(θ_t), Pᵀ g_ref>          P = -∂(θ_{t+1} - θ_t) / ∂g_t

For SGD, P is the learning rate times the momentum's factor. For optimizers with a second moment v it is diagonal,

    u = N / D,      P = lr (N' / D - N D' / D²)          N: numerator, D = √v̂ + ε, both functions of g_t

The second term is the second moment's own dependence on g_t, small after some steps (v̂ averages over 1 / (1 - β2)).
"fixed", the default, leaves it out and needs no memory; "moving" includes it and keeps a copy of the step's gradients.
Weight decay does not depend on g_t. Clipping by a global norm is a factor that all examples share, if held fixed.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer, RAdam, RMSprop
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.sgd import SGD
from torch.utils.hooks import RemovableHandle

from inloop.errors import UsageError
from inloop.hooks import Hook, remove_all

SecondMoment = Literal["fixed", "moving"]
State = Mapping[str, Any]
Group = Mapping[str, Any]

# (direction, state of the parameter after the step, settings of its group in the step) -> Pᵀ direction; None for zero
Derivative = Callable[[Tensor, State, Group], Tensor | None]

_REGISTERED: dict[type[Optimizer], Derivative] = {}


def register_derivative(optimizer: type[Optimizer]) -> Callable[[Derivative], Derivative]:
    """Register how the update of an optimizer depends on the gradient, for ``InLoop(optimizer=)``.

    The function receives a direction (a gradient of the reference loss by one parameter), the optimizer's state for
    that parameter after its step, and the settings of its group in that step. It returns ``Pᵀ direction``, in the
    direction's shape. It may leave out a factor that is the same for all parameters.

    Example:
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


class StepDerivative:
    """Computes ``Pᵀ g`` for the last step of one or several optimizers, by the names of a model's parameters.

    Args:
        optimizers: Together they hold every trainable parameter of the model.
        second_moment: "fixed" or "moving"; see the module.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: object,
        second_moment: SecondMoment = "fixed",
    ) -> None:
        if second_moment not in ("fixed", "moving"):
            raise UsageError(f"second_moment={second_moment!r}: allowed are 'fixed' and 'moving'.")
        several = optimizers if isinstance(optimizers, Sequence) else [optimizers]
        self.optimizers = [_unwrapped(optimizer) for optimizer in several]
        self._derivatives = [_derivative_of(optimizer) for optimizer in self.optimizers]
        self._moving = second_moment == "moving"
        self._parameters = dict(model.named_parameters())
        _refuse_other_parameters(self._parameters, self.optimizers)
        self._groups: dict[int, tuple[int, int]] = {}  # by the id of a parameter: the numbers of optimizer and group
        self._steps = [0] * len(self.optimizers)
        self.mark()
        # By the id of a parameter: the settings of its group in the last step, and its gradient as the optimizer saw it.
        self._settings: dict[int, dict[str, Any]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._is_new: set[int] = set()  # parameters whose last step was their first
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove_all, self._handles)

    @property
    def names(self) -> str:
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def attach(self) -> None:
        """Follow the optimizers' steps from here on."""
        if self._handles:
            raise UsageError("This StepDerivative belongs to another learner already. Fix: make one for each learner.")
        for number, optimizer in enumerate(self.optimizers):
            self._handles.append(optimizer.register_step_pre_hook(_Tell(self, number, StepDerivative._before)))
            self._handles.append(optimizer.register_step_post_hook(_Tell(self, number, StepDerivative._after)))

    def detach(self) -> None:
        """Take the hooks off the optimizers."""
        remove_all(self._handles)
        self._handles.clear()
        self._gradients.clear()

    def mark(self) -> None:
        """Make :meth:`of_last_step` count the steps from here on."""
        self._marked = list(self._steps)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last mark."""
        return self._steps != self._marked

    def of_last_step(self, name: str, direction: Tensor) -> Tensor | None:
        """Return ``Pᵀ direction`` for a parameter and the step since the last mark; None if there was no step."""
        parameter = self._parameters[name]
        number, group = self._group_of(name, parameter)
        if self._steps[number] == self._marked[number]:
            return None
        seen = {"gradient": self._gradients.get(id(parameter)), "is_new": id(parameter) in self._is_new}
        state = {**self.optimizers[number].state.get(parameter, {}), **seen}
        return self._derivatives[number](direction, state, self._settings.get(id(parameter), group))

    def of_next_step(self, name: str, direction: Tensor) -> Tensor | None:
        """Return ``Pᵀ direction`` with the optimizer's present state, an estimate for its next step.

        Before any step it is the direction itself.
        """
        parameter = self._parameters[name]
        number, group = self._group_of(name, parameter)
        if not self.optimizers[number].state and not self._steps[number]:
            return direction
        state = {**self.optimizers[number].state.get(parameter, {}), "gradient": None, "is_new": False}
        return self._derivatives[number](direction, state, group)

    def _group_of(self, name: str, parameter: Tensor) -> tuple[int, dict[str, Any]]:
        """The number of the optimizer that holds a parameter, and its group."""
        if id(parameter) not in self._groups:
            self._groups = {
                id(held): (number, index)
                for number, optimizer in enumerate(self.optimizers)
                for index, group in enumerate(optimizer.param_groups)
                for held in group["params"]
            }
        if id(parameter) not in self._groups:
            raise UsageError(
                f"Parameter '{name}' has a gradient, but no optimizer of the learner holds it. Fix: add it to the optimizer "
                "(add_param_group), or freeze it with requires_grad_(False)."
            )
        number, index = self._groups[id(parameter)]
        return number, self.optimizers[number].param_groups[index]

    def _before(self, number: int) -> None:
        """Keep the values that the step will change and the derivative needs."""
        optimizer = self.optimizers[number]
        for group in optimizer.param_groups:
            if group.get("dampening"):
                fresh = {id(p) for p in group["params"] if optimizer.state.get(p, {}).get("momentum_buffer") is None}
                self._is_new = (self._is_new - {id(p) for p in group["params"]}) | fresh
            if self._moving:
                self._gradients.update({id(p): g for p in group["params"] if (g := _as_seen(p, group)) is not None})

    def _after(self, number: int) -> None:
        """Keep the settings of the step: schedulers change them afterwards."""
        self._steps[number] += 1
        for group in self.optimizers[number].param_groups:
            settings = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            self._settings.update({id(parameter): settings for parameter in group["params"]})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self._steps)}

    def refuse_other_state(self, state: dict[str, Any]) -> None:
        """Raise if the state is of another number of optimizers."""
        if len(state["steps"]) != len(self.optimizers):
            raise UsageError(
                f"The state is of a learner with {len(state['steps'])} optimizer(s); this one has {len(self.optimizers)}."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = list(state["steps"])
        self.mark()


def as_derivative(model: nn.Module, optimizer: object) -> StepDerivative | None:
    """Return the derivative for ``InLoop(optimizer=)``; None without an optimizer."""
    if optimizer is None or optimizer is False:
        return None
    return optimizer if isinstance(optimizer, StepDerivative) else StepDerivative(model, optimizer)


class _Tell(Hook[StepDerivative]):
    def __init__(self, owner: StepDerivative, number: int, call: Callable[[StepDerivative, int], None]) -> None:
        super().__init__(owner)
        self._number, self._call = number, call

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owner = self.owner()
        if owner is not None:
            self._call(owner, self._number)


def _as_seen(parameter: Tensor, group: Group) -> Tensor | None:
    """Return the gradient as the update uses it: with its sign, and with weight decay where the update adds it."""
    if parameter.grad is None:
        return None
    gradient = parameter.grad.detach().clone()
    gradient = -gradient if group.get("maximize") else gradient
    if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        gradient = gradient.add(parameter.detach(), alpha=group["weight_decay"])
    return gradient


def _unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer in a wrapper or a scheduler, which have it as ``.optimizer``."""
    inner = optimizer
    while (deeper := getattr(inner, "optimizer", None)) is not None and deeper is not inner:
        inner = deeper
    if not isinstance(inner, Optimizer):
        raise UsageError(
            f"optimizer={optimizer if isinstance(optimizer, type) else type(optimizer)}: allowed are a torch.optim.Optimizer, a wrapper that has one as .optimizer, and a list of them."
        )
    return inner


def _derivative_of(optimizer: Optimizer) -> Derivative:
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


def _refuse_other_parameters(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in held]
    trainable = sum(parameter.requires_grad for parameter in parameters.values())
    if missing and len(missing) == trainable:
        raise UsageError(
            "The optimizer holds no parameter of the model. Fix: give the learner the optimizer that was made with model.parameters()."
        )
    if missing:
        raise UsageError(
            f"The optimizer does not hold '{missing[0]}' and {len(missing) - 1} more trainable parameter(s) of the model. Fix: give all optimizers, "
            "as a list, or freeze what is not trained with requires_grad_(False)."
        )


# ---------------------------------------------------------------- the optimizers of torch


def _diagonal(
    *optimizers: type[Optimizer],
) -> Callable[[Callable[[State, Group], Tensor | float | None]], Callable[[State, Group], Tensor | float | None]]:
    """Register a function that returns the diagonal of P for ``maximize=False`` (None: the parameter never stepped)."""

    def register(
        diagonal: Callable[[State, Group], Tensor | float | None],
    ) -> Callable[[State, Group], Tensor | float | None]:
        def derivative(direction: Tensor, state: State, group: Group) -> Tensor | None:
            factor = diagonal(state, group)
            if factor is None:
                return None
            return direction * (-factor if group.get("maximize") else factor)

        for optimizer in optimizers:
            _REGISTERED[optimizer] = derivative
        return diagonal

    return register


def _count(state: State) -> Any:
    """Return the number of steps; a tensor if reading it would make a device wait."""
    step = state["step"]
    return step if isinstance(step, Tensor) and step.device.type != "cpu" else float(step)


def _slope_of_root(gradient: Tensor, root: Tensor, factor: Any) -> Tensor:
    """Return the derivative of √(c + factor g²) by g; zero where the root is zero."""
    slope: Tensor = factor * gradient / root.clamp_min(torch.finfo(root.dtype).tiny)
    return slope


@_diagonal(SGD)
def _sgd(state: State, group: Group) -> Tensor | float:
    momentum = group["momentum"]
    if not momentum:
        return cast(float, group["lr"])
    if group["nesterov"]:
        return cast(float, group["lr"] * (1 + momentum))
    return cast(float, group["lr"] * (1 if state["is_new"] else 1 - group["dampening"]))


@_diagonal(Adam, AdamW)
def _adam(state: State, group: Group) -> Tensor | None:
    if "exp_avg_sq" not in state:
        return None
    (beta1, beta2), t, g = group["betas"], _count(state), state["gradient"]
    first, second = 1 - beta1**t, 1 - beta2**t
    moment = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (moment / second).sqrt()
    denominator = root + group["eps"]
    factor = (1 - beta1) / first / denominator
    if g is not None:
        slope = _slope_of_root(g, root, (1 - beta2) / second)
        if group["amsgrad"]:
            slope = torch.where(moment == state["exp_avg_sq"], slope, 0.0)
        factor = factor - state["exp_avg"] / first * slope / denominator.square()
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
