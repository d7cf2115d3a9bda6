"""Following parameters that no layer's call accounts for, to the operation where they meet the data.

Learned positions, class tokens and scales are used by a module that has other layers below it; the weight of a layer may be used
without calling it; and a lookup of positions that all examples share has no batch axis. During the model's forward pass every torch
function is watched: what is computed from such parameters and constants alone is *derived*, and remembered with its recipe. The first
operation that mixes something derived with data has a row for each example again, and is recorded (``operation.py``).

Layers called with data are recorded by their own hooks; what happens inside of them is not watched.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from inloop.alignment.black_box import random_state
from inloop.alignment.call import tensors_in
from inloop.alignment.operation import Recipe, Value, is_in_place, is_random_factory

Record = Callable[["Use"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Where parameters meet the data.

    Attributes:
        recipe: How the output follows from parameters and data.
        data: The tensors of the recipe that are no parameters.
        names: The parameters in it.
        where: In words.
    """

    recipe: Recipe
    data: list[Tensor]
    names: list[str]
    out: Tensor
    where: str


class Constant:
    """Neither data nor computed from trainable parameters: buffers, ranges, what is made of them."""


_CONSTANT = Constant()


class Tracer(TorchFunctionMode):
    """Watches one forward pass of a model.

    Args:
        name_of: The canonical name of a parameter of the model that counts, "" of one that does not, None of any other tensor.
        record: Called with every use of parameters outside of layers' calls.
    """

    def __init__(
        self, model: nn.Module, name_of: Callable[[Tensor], str | None], num_examples: int | None, record: Record
    ) -> None:
        super().__init__()
        self._record, self._name_of, self._num_examples = record, name_of, num_examples
        self._known: dict[int, tuple[Tensor, Recipe | Value | Constant]] = {}
        self._counts_all = all(bool(name_of(p)) for p in model.parameters() if p.requires_grad)
        self._inside = 0  # layers that are recorded as a whole
        for parameter in model.parameters():
            self._known[id(parameter)] = parameter, self._kind_of_parameter(parameter) or _CONSTANT
        for buffer in model.buffers():
            self._known[id(buffer)] = buffer, _CONSTANT

    def has_data(self, tree: Any) -> bool:
        """Whether arguments have a tensor that may belong to examples."""
        return any(self._kind(tensor) is None for tensor in tensors_in(tree))

    def has_derived(self, tree: Any) -> bool:
        return any(isinstance(self._kind(tensor), Recipe | Value) for tensor in tensors_in(tree))

    def has_row_for_each_example(self, tree: Any) -> bool:
        """Whether a constant was given a batch axis by expanding it, as in ``positions.expand(N, T)``."""
        first = next(iter(tensors_in(tree)), None)
        return first is not None and first.dim() > 1 and len(first) == self._num_examples and first.stride(0) == 0

    def enter_layer(self) -> None:
        self._inside += 1

    def leave_layer(self) -> None:
        self._inside -= 1

    def hand_over(self, tensor: Tensor, layer: str) -> Tensor:
        """A copy of a derived tensor that goes into a recorded layer together with data; its own gradient accounts for the use."""
        kind = self._kind(tensor)
        if not isinstance(kind, Recipe | Value):
            return tensor
        recipe = kind if isinstance(kind, Recipe) else Recipe(torch.clone, (kind,), {})
        data: list[Tensor] = []
        names: dict[str, None] = {}

        def slot(constant: Tensor) -> Value:
            data.append(constant)
            return Value(len(data) - 1)

        recipe = _with_slots(recipe, slot, names)
        self.enter_layer()
        copy = tensor.clone()
        self.leave_layer()
        self._record(Use(recipe, data, list(names), copy, f"as an input of '{layer}'"))
        return copy

    def _kind(self, tensor: Tensor) -> Recipe | Value | Constant | None:
        """None for data."""
        entry = self._known.get(id(tensor))
        if entry is None:
            kind = self._kind_of_parameter(tensor) if isinstance(tensor, nn.Parameter) else None
            if kind is None:
                return None
            entry = self._known[id(tensor)] = tensor, kind
        written = entry[1] is _CONSTANT and tensor.grad_fn is not None and self._counts_all  # through a view
        return None if written else entry[1]

    def _kind_of_parameter(self, parameter: Tensor) -> Value | Constant | None:
        # Without gradients it is nobody's use: it is sharding that puts parameters together, before they are the model's.
        name = self._name_of(parameter) if torch.is_grad_enabled() else None
        if name is None:
            return None
        return Value(name) if name and parameter.requires_grad else _CONSTANT

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return function(*args, **kwargs)
        given = tensors_in((args, kwargs))
        kinds = [self._kind(tensor) for tensor in given]
        derived = torch.is_grad_enabled() and any(isinstance(kind, Recipe | Value) for kind in kinds)
        if not derived:
            result = function(*args, **kwargs)
            if is_in_place(function):
                if None in kinds:
                    self._known.pop(id(given[0]), None)  # data was written into it
            elif None not in kinds and not is_random_factory(function):
                self._remember(result, None)
            return result
        in_place = is_in_place(function)
        # What is written into cannot be read again afterwards; a copy is what the operation will be repeated with.
        before = given[0].detach().clone() if in_place else None
        state = {} if _is_attribute(function) else random_state(given[0].device)
        result = function(*args, **kwargs)
        written = args[0] if in_place else result
        if not any(out.requires_grad for out in tensors_in(written)):
            if None not in kinds:
                self._remember(written, None)
            return result
        now = random_state(given[0].device) if state else {}
        drew = any(not torch.equal(state[name], now[name]) for name in state)
        recipe, data, names = self._recipe(function, args, kwargs, in_place, before, state if drew else None)
        if not data:
            self._remember(written, recipe)
            return result
        if in_place:
            self._known.pop(id(written), None)
        if isinstance(written, Tensor):
            self._record(Use(recipe, data, names, written, f"in the operation '{recipe.name}'"))
            return result
        return self._apart(recipe, data, names, written)

    def _apart(self, recipe: Recipe, data: list[Tensor], names: list[str], results: Any) -> Any:
        """Records each of several outputs. They may depend on each other; behind a copy each has only the gradient of its users."""
        new = []
        for index, out in enumerate(results):
            if isinstance(out, Tensor) and out.requires_grad:
                out = out.clone()
                self._record(Use(replace(recipe, index=index), data, names, out, f"in the operation '{recipe.name}'"))
            new.append(out)
        return type(results)(new)

    def _remember(self, result: Any, recipe: Recipe | None) -> None:
        """Outputs of an operation without data."""
        several = not isinstance(result, Tensor)
        for index, out in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if isinstance(out, Tensor):
                kind: Recipe | Constant = _CONSTANT
                if recipe is not None and out.requires_grad:
                    kind = replace(recipe, index=index) if several else recipe
                self._known[id(out)] = out, kind

    def _recipe(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_place: bool,
        before: Tensor | None,
        state: dict[str, Tensor] | None,
    ) -> tuple[Recipe, list[Tensor], list[str]]:
        """The recipe of an operation, its data, and the parameters in it."""
        slots: list[Tensor] = []
        is_data = False
        names: dict[str, None] = {}

        def slot(tensor: Tensor) -> Value:
            slots.append(tensor)
            return Value(len(slots) - 1)

        def part(tensor: Tensor, position: int) -> Value | Recipe:
            nonlocal is_data
            kind = self._kind(tensor)
            if isinstance(kind, Value):
                names[str(kind.source)] = None
                return kind
            if isinstance(kind, Recipe):
                return _with_slots(kind, slot, names)
            is_data |= kind is None
            if position == 0 and before is not None:
                return slot(before)
            # The optimizer will write into a parameter that is used as it is.
            return slot(tensor.detach().clone() if isinstance(tensor, nn.Parameter) else tensor.detach())

        counter = itertools.count()
        new_args, new_kwargs = tree_map_only(Tensor, lambda tensor: part(tensor, next(counter)), (args, kwargs))
        recipe = Recipe(function, new_args, new_kwargs, in_place=in_place, random_state=state)
        return (recipe, slots, list(names)) if is_data else (self._closed(recipe, slots), [], list(names))

    @staticmethod
    def _closed(recipe: Recipe, slots: list[Tensor]) -> Recipe:
        """With its constants in it, until it meets data."""
        return recipe.map(lambda value: slots[value.source] if isinstance(value.source, int) else value)


def _is_attribute(function: Callable[..., Any]) -> bool:
    """Reading x.shape or x.T is a call, too; it draws no random numbers."""
    return getattr(function, "__name__", "") == "__get__"


def _with_slots(recipe: Recipe, slot: Callable[[Tensor], Value], names: dict[str, None]) -> Recipe:
    """A derived tensor's recipe as a part of another: its constants become arguments, its parameters are noted."""

    def change(part: Any) -> Any:
        if isinstance(part, Tensor):
            return slot(part)
        names[str(part.source)] = None
        return part

    return recipe.map(change)


def first_length(inputs: Any) -> int | None:
    """The number of rows of the first tensor among a model's inputs."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), None)
