"""``Pᵀ g`` for the steps of a model's optimizers, by the names of its parameters."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from inloop.errors import UsageError
from inloop.hooks import Hook, remove_all
from inloop.optimizers.counts import StepCounts
from inloop.optimizers.registry import Group, derivative_of, many_of

_NOT_SEEN = {"gradient": None, "is_new": False}
_NO_STATE: dict[str, Any] = {}

Directions = Mapping[str, Tensor | None]
SecondMoment = Literal["fixed", "moving"]


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
        self._derivatives = [derivative_of(optimizer) for optimizer in self.optimizers]
        self._moving = second_moment == "moving"
        self._parameters = dict(model.named_parameters())
        _refuse_other_parameters(self._parameters, self.optimizers)
        self._groups: dict[int, tuple[int, int]] = {}  # by the id of a parameter: the numbers of optimizer and group
        self._steps = [0] * len(self.optimizers)
        self.mark()
        self._settings: dict[tuple[int, int], dict[str, Any]] = {}  # of a group in the last step
        self._gradients: dict[int, Tensor] = {}  # by the id of a parameter, as the optimizer saw them
        self._counts = StepCounts()
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

    def of_last_step(self, directions: Mapping[str, Tensor]) -> Directions:
        """Return ``Pᵀ direction`` for parameters, by name, and the step since the last mark; None if there was no step."""
        results: dict[str, Tensor | None] = dict.fromkeys(directions)
        groups: dict[tuple[int, int], list[str]] = {}
        for name in directions:
            parameter = self._parameters[name]
            number, index = self._place_of(name, parameter)
            if self._steps[number] != self._marked[number]:
                groups.setdefault((number, index), []).append(name)
        for (number, index), names in groups.items():
            group = self._settings.get((number, index), self.optimizers[number].param_groups[index])
            results.update(self._apply(number, names, directions, group, is_over=True))
        return results

    def of_next_step(self, directions: Mapping[str, Tensor]) -> Directions:
        """Return ``Pᵀ direction`` with the optimizer's present state, an estimate for its next step.

        Before any step it is the direction itself.
        """
        results: dict[str, Tensor | None] = dict(directions)
        groups: dict[tuple[int, int], list[str]] = {}
        for name in directions:
            number, index = self._place_of(name, self._parameters[name])
            if self.optimizers[number].state or self._steps[number]:
                groups.setdefault((number, index), []).append(name)
        for (number, index), names in groups.items():
            group = self.optimizers[number].param_groups[index]
            results.update(self._apply(number, names, directions, group, is_over=False))
        return results

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Raise if no optimizer holds a parameter."""
        for name in names:
            self._place_of(name, self._parameters[name])

    def _apply(
        self, number: int, names: Sequence[str], directions: Mapping[str, Tensor], group: Group, is_over: bool
    ) -> Directions:
        """``Pᵀ direction`` for parameters of one group: together if the optimizer's derivative allows it, else one by one.

        Args:
            is_over: Whether the step is, so that what was kept of it is known.
        """
        derivative, state = self._derivatives[number], self.optimizers[number].state
        many = many_of(derivative)
        if many is not None and not self._moving:
            states = [state.get(self._parameters[name], _NO_STATE) for name in names]
            count = self._counts.common([self._parameters[name] for name in names], states)
            together = many([directions[name] for name in names], states, group, count)
            if together is not None:
                return dict(zip(names, together, strict=True))
        return {name: derivative(directions[name], self._state(number, name, is_over), group) for name in names}

    def _state(self, number: int, name: str, is_over: bool) -> dict[str, Any]:
        """The optimizer's state for a parameter and, if its step is over, what was kept of that step."""
        parameter = self._parameters[name]
        key = id(parameter)
        seen = {"gradient": self._gradients.get(key), "is_new": key in self._is_new} if is_over else _NOT_SEEN
        return {**self.optimizers[number].state.get(parameter, {}), **seen}

    def _place_of(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """The numbers of the optimizer that holds a parameter, and of its group."""
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
        return self._groups[id(parameter)]

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
        self._counts.add_step(self.optimizers[number])
        for index, group in enumerate(self.optimizers[number].param_groups):
            self._settings[number, index] = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }

    def state_dict(self) -> dict[str, Any]:
        return {"kinds": [type(optimizer).__name__ for optimizer in self.optimizers], "steps": list(self._steps)}

    def refuse_other_state(self, state: dict[str, Any]) -> None:
        """Raise if the state is of another number of optimizers."""
        if len(state["steps"]) != len(self.optimizers):
            raise UsageError(
                f"The state is of a learner with {len(state['steps'])} optimizer(s); this one has {len(self.optimizers)}. Fix: make it alike."
            )
        if state["kinds"] != (kinds := self.state_dict()["kinds"]):
            raise UsageError(
                f"The state is of a learner with {', '.join(map(str, state['kinds']))}; this one has {', '.join(kinds)}, whose rewards are others. Fix: "
                "make it alike; or keep the shares alone, with policy.load_state_dict(state['policy'])."
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
