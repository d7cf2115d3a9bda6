"""One torch operation that mixes parameters with data, as a module: a black box where no module surrounds it.

``x + self.positions`` has no layer of its own, and the parameter may have passed through other operations first (an
expand, an exponential, a lookup). All of this, up to the output, is one function of the data, and can run again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from inloop.alignment.black_box import BlackBoxCall, fingerprint, restore_random_state
from inloop.alignment.call import Autocast, Layout
from inloop.alignment.hooks import hook_gradient
from inloop.alignment.kept import versions_of
from inloop.alignment.tape import Tape
from inloop.errors import UnsupportedLayerError

HANDED_OVER = "as an input of"  # where a derived tensor enters a layer that is recorded


@dataclass(frozen=True, slots=True)
class Value:
    """A value in a recipe: a data tensor by its position, or a parameter by its name."""

    source: int | str


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to compute a tensor: a torch function and its arguments, with values or recipes in place of tensors.

    Attributes:
        index: Which output to take, for a function with several.
        in_place: Whether the function writes into its first argument, which is the result.
        random_state: The generators' state before the function, if it drew from them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None
    in_place: bool = False
    random_state: dict[str, Tensor] | None = None

    def compute(self, values: Callable[[Value], Tensor]) -> Any:
        """Return the result."""
        found: dict[int, Any] = {}
        for recipe in self._parts_first():
            args, kwargs = tree_map_only(
                (Value, Recipe),
                lambda part: values(part) if isinstance(part, Value) else found[id(part)],
                (recipe.args, recipe.kwargs),
            )
            found[id(recipe)] = recipe._run(args, kwargs)
        return found[id(self)]

    def _parts_first(self) -> "list[Recipe]":
        """Return all recipes within this one, once each, those that others use first, this one last.

        A recipe that several others use, as that of x in x + f(x), must count once: else each residual doubles the work.
        """
        order: dict[int, Recipe] = {}
        waiting = [(self, False)]
        while waiting:
            recipe, is_complete = waiting.pop()
            if is_complete:
                order.setdefault(id(recipe), recipe)
            elif id(recipe) not in order:
                inside = [part for part in tree_leaves((recipe.args, recipe.kwargs)) if isinstance(part, Recipe)]
                waiting += [(recipe, True), *((part, False) for part in reversed(inside))]
        return list(order.values())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.random_state is not None:
            restore_random_state(self.random_state)
        if self.in_place:
            result = args[0].clone()
            self.function(result, *args[1:], **kwargs)
            return result
        result = self.function(*args, **kwargs)
        return result if self.index is None else result[self.index]

    def map(self, change: Callable[[Any], Any]) -> "Recipe":
        """Return the recipe with ``change`` applied to its values and tensors, also in nested recipes."""
        found: dict[int, Recipe] = {}
        for recipe in self._parts_first():
            args, kwargs = tree_map_only(
                (Value, Tensor, Recipe),
                lambda part: found[id(part)] if isinstance(part, Recipe) else change(part),
                (recipe.args, recipe.kwargs),
            )
            found[id(recipe)] = replace(recipe, args=args, kwargs=kwargs)
        return found[id(self)]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


class Operation(nn.Module):
    """A recipe as a module: its parameters are the module's own, its data are the arguments of the forward pass.

    Args:
        parameters: By their names in the recipe, which are their names in the model.
    """

    def __init__(self, recipe: Recipe, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.recipe = recipe
        self.names = tuple(parameters)
        # A name with dots is no attribute, so the parameters have the names p0, p1, ...
        self._parameters.update({f"p{i}": nn.Parameter(value.detach()) for i, value in enumerate(parameters.values())})

    def forward(self, *data: Tensor) -> Any:
        parameters = dict(zip(self.names, self._parameters.values(), strict=True))

        def value(which: Value) -> Tensor:
            found = data[which.source] if isinstance(which.source, int) else parameters[which.source]
            assert found is not None
            return found

        return self.recipe.compute(value)


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A place where parameters meet the data.

    Attributes:
        recipe: How the output follows from parameters and data.
        data: The tensors of the recipe that are no parameters.
        names: The parameters in the recipe.
        where: The place, in words.
    """

    recipe: Recipe
    data: list[Tensor]
    names: list[str]
    out: Tensor
    where: str


def record_use(tape: Tape, use: Use, parameters: dict[str, Tensor], layout: Layout, num_examples: int | None) -> None:
    """Write a call to the tape when the gradient of the operation's output arrives.

    Args:
        parameters: The operation's parameters, by name.
        layout: Where the examples are in its output.
    """
    _refuse_shared(use, layout, num_examples)
    if tape.first_parameters is not None:
        tape.first_parameters += parameters.values()
    out, args = use.out, tuple(tensor.detach() for tensor in use.data)
    call = BlackBoxCall(
        name=f"{use.names[0]} {use.where}",
        layer=Operation(use.recipe, {name: value.detach().clone() for name, value in parameters.items()}),
        parameter_names={f"p{i}": name for i, name in enumerate(use.names)},
        args=args,
        kwargs={},
        autocast=Autocast.current(out.device.type),
        batch=tape.batch,
        versions=versions_of(args),
        random_state={},
        fingerprints=(fingerprint(out),),
        batch_axis=layout.axis,
        example_of_row=layout.example_of_row(out, num_examples),
    )
    hook_gradient(out, tape.wait_for_gradient(call))


def _refuse_shared(use: Use, layout: Layout, num_examples: int | None) -> None:
    shape = tuple(use.out.shape)
    rows = shape[layout.axis] if shape else 0
    if shape and (num_examples is None or rows == num_examples or (layout.folded and rows % num_examples == 0)):
        return
    raise UnsupportedLayerError(
        f"Parameter '{use.names[0]}' meets the data {use.where}, in a tensor of shape {shape}, in which the {num_examples} examples "
        "cannot be found on the first axis. Fix: give it a row for each example, as in queries.expand(N, -1, -1), put the "
        "operation into a small module of its own, say how many examples there are if the first input has several rows for each "
        "(capture(num_examples=); a learner does so by itself), or leave the parameter out with layers=."
    )


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether the function works in place, by torch's naming: add_, __iadd__, __setitem__."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE) or _ends_in_place(name)


_NOT_IN_PLACE = ("__invert__", "__int__", "__index__")


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "retain_grad_")


def is_random_factory(function: Callable[..., Any]) -> bool:
    """Whether the function makes a tensor of random numbers from nothing: each row likely belongs to one example."""
    return function in _RANDOM


_RANDOM = frozenset({torch.rand, torch.randn, torch.randint, torch.normal, torch.randperm})
