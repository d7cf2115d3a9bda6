"""Follow parameters that no layer call accounts for to the operation where they meet the data.

A module with layers below it may use learned positions, class tokens or scales. Code may use a layer's weight without
calling the layer. A lookup of positions that all examples share has no batch axis. So a tracer watches every torch
function during the model's forward pass. A result of parameters and constants alone is *derived*; the tracer remembers
its recipe. ``operation.py`` records the first operation that mixes a derived tensor with data: its output has a row for
each example again. Hooks record layers called with data; the tracer does not watch operations inside them. After the
first step the watch is removed, unless it found something.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.black_box import random_state
from inloop.alignment.call import SHARED, Layouts, original_type
from inloop.alignment.inputs import hold_one_example, num_examples_of
from inloop.alignment.kept import leaves_of, tensors_in
from inloop.alignment.operation import HANDED_OVER, Recipe, Use, Value, is_in_place, is_random_factory
from inloop.alignment.plan import Plan
from inloop.hooks import Hook, remove_all
from inloop.uncompiled import not_compiled

Record = Callable[[Use], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Where the examples of a pass are.

    Attributes:
        num_examples: How many there are; None if no input counts them.
        layouts: Of all outputs that do not simply have examples on the first axis; None with too few examples to tell.
    """

    num_examples: int | None
    layouts: Layouts | None


FindExamples = Callable[[nn.Module, str, Any, int | None], Found]


class Constant:
    """Marks a tensor that is neither data nor computed from trainable parameters: buffers, ranges, results of them."""


_CONSTANT = Constant()


class Tracer(TorchFunctionMode):
    """Watches one forward pass of a model.

    Args:
        name_of: Returns the canonical name of a parameter that counts, "" if it does not count, None for other tensors.
        record: Called with every use of parameters outside of layer calls.
        is_shared: Returns whether the result of an operation, given by names of parameters and its place in words, belongs to no example.
        constants: Constants that an earlier pass has kept.
    """

    def __init__(
        self,
        model: nn.Module,
        name_of: Callable[[Tensor], str | None],
        num_examples: int | None,
        record: Record,
        is_shared: Callable[[list[str], str], bool],
        constants: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self._record, self._name_of, self._num_examples, self._is_shared = record, name_of, num_examples, is_shared
        self._known: dict[int, tuple[Tensor, Recipe | Value | Constant]] = {}
        self._counts_all = all(bool(name_of(p)) for p in model.parameters() if p.requires_grad)
        self._inside = 0  # how many layers that are recorded as a whole are running
        for parameter in model.parameters():
            self._known[id(parameter)] = parameter, self._kind_of_parameter(parameter) or _CONSTANT
        for constant in (*model.buffers(), *constants):
            self._known[id(constant)] = constant, _CONSTANT

    def constants(self) -> list[Tensor]:
        """The constants so far; those that outlive the pass may be used again in the next one."""
        return [tensor for tensor, kind in self._known.values() if kind is _CONSTANT]

    def has_data(self, tree: Any) -> bool:
        """Whether the arguments hold a tensor that may belong to examples."""
        return any(self._kind(tensor) is None for tensor in tensors_in(tree))

    def has_derived(self, tree: Any) -> bool:
        return any(isinstance(self._kind(tensor), Recipe | Value) for tensor in tensors_in(tree))

    def has_row_for_each_example(self, tree: Any) -> bool:
        """Whether a constant got its batch axis by expanding, as in ``positions.expand(N, T)``."""
        first = next(iter(tensors_in(tree)), None)
        return first is not None and first.dim() > 1 and len(first) == self._num_examples and first.stride(0) == 0

    def enter_layer(self) -> None:
        self._inside += 1

    def leave_layer(self) -> None:
        self._inside -= 1

    def hand_over(self, tensor: Tensor, layer: str) -> Tensor:
        """Copy a derived tensor that enters a recorded layer with data; the copy's gradient accounts for the use."""
        kind = self._kind(tensor)
        if not isinstance(kind, Recipe | Value):
            return tensor
        recipe = kind if isinstance(kind, Recipe) else Recipe(torch.clone, (kind,), {})
        recipe, data, names = _open(recipe)
        self.enter_layer()
        copy = tensor.clone()
        self.leave_layer()
        self._record(Use(recipe, data, names, copy, f"{HANDED_OVER} '{layer}'"))
        return copy

    def _kind(self, tensor: Tensor) -> Recipe | Value | Constant | None:
        """Return the kind of a tensor; None for data."""
        entry = self._known.get(id(tensor))
        if entry is None:
            kind = self._kind_of_parameter(tensor) if isinstance(tensor, nn.Parameter) else None
            if kind is None:
                return None
            entry = self._known[id(tensor)] = tensor, kind
        written = entry[1] is _CONSTANT and tensor.grad_fn is not None and self._counts_all  # through a view
        return None if written else entry[1]

    def _kind_of_parameter(self, parameter: Tensor) -> Value | Constant | None:
        # With gradients off this is no use: sharding puts parameters together, before they become the model's.
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
                    self._known.pop(id(given[0]), None)  # it now holds data
            elif None not in kinds and not is_random_factory(function):
                self._remember(result, None)
            return result
        in_place = is_in_place(function)
        # An operation in place destroys its argument. Keep a copy to repeat the operation with.
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
        parts = function, args, kwargs, in_place, before, state if drew else None
        recipe, data, names = self._recipe(*parts)
        where = f"in the operation '{recipe.name}'"
        if data and self._is_shared(names, where):
            self._known.update({id(tensor): (tensor, _CONSTANT) for tensor in given if self._kind(tensor) is None})
            recipe, data, names = self._recipe(*parts)
        if not data:
            self._remember(written, recipe)
            return result
        if in_place:
            self._known.pop(id(written), None)
        if isinstance(written, Tensor):
            self._record(Use(recipe, data, names, written, where))
            return result
        return self._apart(recipe, data, names, written)

    def _apart(self, recipe: Recipe, data: list[Tensor], names: list[str], results: Any) -> Any:
        """Record a copy of each output. Outputs may depend on each other; a copy has only its users' gradient."""
        new = []
        for index, out in enumerate(results):
            if isinstance(out, Tensor) and out.requires_grad:
                out = out.clone()
                self._record(Use(replace(recipe, index=index), data, names, out, f"in the operation '{recipe.name}'"))
            new.append(out)
        return type(results)(new)

    def _remember(self, result: Any, recipe: Recipe | None) -> None:
        """Remember the outputs of an operation without data."""
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
        """Return the recipe of an operation, its data, and the names of its parameters.

        Until it meets data it has its constants inside, and the recipes of its arguments as they are, not copied.
        """
        is_data = False

        def part(tensor: Tensor, position: int) -> Value | Recipe | Tensor:
            nonlocal is_data
            kind = self._kind(tensor)
            if isinstance(kind, Value | Recipe):
                return kind
            is_data |= kind is None
            if position == 0 and before is not None:
                return before
            # Copy a parameter: the optimizer will write into it.
            return tensor.detach().clone() if isinstance(tensor, nn.Parameter) else tensor.detach()

        counter = itertools.count()
        new_args, new_kwargs = tree_map_only(Tensor, lambda tensor: part(tensor, next(counter)), (args, kwargs))
        recipe = Recipe(function, new_args, new_kwargs, in_place=in_place, random_state=state)
        return _open(recipe) if is_data else (recipe, [], [])


def _is_attribute(function: Callable[..., Any]) -> bool:
    """Whether the function reads an attribute, as x.shape or x.T. Such a call draws no random numbers."""
    return getattr(function, "__name__", "") == "__get__"


def _open(recipe: Recipe) -> tuple[Recipe, list[Tensor], list[str]]:
    """Return the recipe with its tensors as arguments, these tensors, and the names of its parameters."""
    slots: list[Tensor] = []
    names: dict[str, None] = {}

    def change(part: Any) -> Any:
        if isinstance(part, Tensor):
            slots.append(part)
            return Value(len(slots) - 1)
        names[str(part.source)] = None
        return part

    return recipe.map(change), slots, list(names)


class Watch:
    """Watches the forward passes of a model by hooks, each pass with a :class:`Tracer`.

    A pass is a call of the model or, if a method of the model calls its parts, of the outermost part with layers below it.

    Args:
        is_active: Returns whether to watch passes now.
        record: Called with each use of parameters outside of layer calls, the parameters by name, and a key for it that
            is the same in every pass.
        announced: Returns how many examples the next pass should have, if that is known.
        find_examples: Takes the model, the name of the part that is called, its inputs, and how many examples they should
            have. Not needed if it is known where they are.

    Attributes:
        is_needed: Whether every pass must be watched: one showed a parameter outside of layer calls, or examples that
            are not on the first axis.
        knows_layouts: Whether ``layouts`` was found out.
        layouts: Where the examples are in the layers' outputs, if not on the first axis.
        num_examples: The number of examples of the pass, from its first input.
        num_passes: How many passes it has watched.
        is_asleep: Whether it waits for a pass with several examples.
        part: The name of the part of the model that was called; "" for the model itself, whose first input has the examples.
        has_one_example: Whether that has one example, whose all rows then are.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        is_active: Callable[[], bool],
        record: Callable[[Use, dict[str, Tensor], tuple[str, int]], None],
        announced: Callable[[], int | None] = lambda: None,
        find_examples: FindExamples | None = None,
    ) -> None:
        self.is_needed = bool(plan.bare)
        self.knows_layouts = find_examples is None
        self.layouts: Layouts = {}
        self.num_examples: int | None = None
        self.part, self.has_one_example, self.num_passes = "", False, 0
        self._plan, self._is_active, self._record = plan, is_active, record
        self._announced, self._find_examples = announced, find_examples
        self._tracer: Tracer | None = None
        self._depth = 0
        self._num_uses: Counter[object] = Counter()
        self._layers: list[bool] = []  # for each running layer, whether it is recorded as a whole
        self._names: dict[int, str] = {}  # of parameters, by id
        self._constants: list[weakref.ref[Tensor]] = []  # of the last pass; most are gone by now
        self._names_are_new = False
        self._parameters: dict[str, Tensor] = {}
        self._layers_left_out = list(_not_recorded(model, plan))  # their parameters may be recorded elsewhere
        self.is_asleep = False
        self._of_model: list[RemovableHandle] = []
        self._of_layers: list[RemovableHandle] = []
        for handles in (self._of_model, self._of_layers):
            weakref.finalize(self, remove_all, handles)
        self._hook_layers()
        for module in model.modules():
            if original_type(module) is not type(module):  # sharded: after the hook that gathers its parameters
                self._of_model.append(module.register_forward_pre_hook(_Tell(self, Watch.parameters_changed)))
        inside = {id(module) for site in plan.sites for module in site.module.modules()}
        for name, module in model.named_modules():
            if not name or (module._modules and id(module) not in inside):
                self._of_model += self._hook(module, partial(_enter_model, model, name), Watch.leave_model)

    def _hook_layers(self) -> None:
        for site in self._plan.sites:
            self._of_layers += self._hook(site.module, partial(_enter_layer, site.name, True), Watch.leave_layer)
        for name, module in self._layers_left_out:
            self._of_layers += self._hook(module, partial(_enter_layer, name, False), Watch.leave_layer)

    def _hook(self, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(_Tell(self, enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(_Tell(self, leave), always_call=True),
        ]

    def remove(self) -> None:
        """Watch no more passes."""
        remove_all(self._of_model)
        self.sleep()

    def sleep(self) -> None:
        """Watch no more passes that have one example, until one has several: then it can be found out where they are."""
        self.is_asleep = True
        remove_all(self._of_layers)
        self._of_layers.clear()

    @property
    def is_running(self) -> bool:
        """Whether a pass is being watched."""
        return self._tracer is not None

    @property
    def is_whole(self) -> bool:
        return not self.part

    @property
    def follows_operations(self) -> bool:
        """Whether the running layer was called without data, so that its operations are recorded in its place."""
        return bool(self._layers) and not self._layers[-1]

    def enter_model(self, model: nn.Module, part: str, inputs: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return
        if self._tracer is not None:
            self._depth += 1
        if self._tracer is not None or not self._is_active():
            return
        if part and torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs it again
        self.num_examples, self.part, announced = num_examples_of(inputs), part, self._announced()
        self.has_one_example = self.is_whole and hold_one_example(inputs, announced)
        if self.has_one_example:
            self.num_examples = 1
            if self.is_asleep:
                return
        if self.is_asleep:
            self.is_asleep = False
            self._hook_layers()
        if not self.has_one_example and self._find_examples is not None:
            found = self._find_examples(model, part, inputs, announced)
            self.num_examples = found.num_examples
            self._note_layouts(found.layouts, part)
        self._names.clear()
        self.parameters_changed()
        self._num_uses.clear()
        constants = [tensor for ref in self._constants if (tensor := ref()) is not None]
        self._tracer = Tracer(
            model, partial(self._name_of, model), self.num_examples, self._use, self._is_shared, constants
        )
        self._tracer.__enter__()  # type: ignore[no-untyped-call]
        self.num_passes += 1

    def _note_layouts(self, layouts: Layouts | None, part: str) -> None:
        if layouts is None:
            return
        self.layouts = {**self.layouts, **layouts} if part else layouts
        self.knows_layouts = True
        self.is_needed |= bool(layouts)  # reading them takes the number of examples of each pass

    def parameters_changed(self, *_: Any) -> None:
        """Look up names again: other tensors may have taken the place of parameters."""
        self._names_are_new = False

    def _name_of(self, model: nn.Module, tensor: Tensor) -> str | None:
        """Return a parameter's name; look up all again if it is unknown, since sharding exchanges tensors in a pass."""
        if id(tensor) not in self._names and not self._names_are_new:
            self._names_are_new = True
            counted = self._plan.counted()
            for name, parameter in model.named_parameters(remove_duplicate=False):
                canonical = self._plan.aliases[name]
                self._names[id(parameter)] = canonical if canonical in counted else ""
                self._parameters[canonical] = parameter
        return self._names.get(id(tensor))

    def leave_model(self, *_: Any, entirely: bool = False) -> None:
        if not entirely and not torch.is_grad_enabled():
            return  # as it was entered: a reentrant checkpoint
        if self._depth and not entirely:
            self._depth -= 1
            return
        self._depth = 0
        if self._tracer is not None:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._constants = [weakref.ref(tensor) for tensor in self._tracer.constants()]
        self._tracer = None
        self._layers.clear()

    def enter_layer(self, name: str, counted: bool, inputs: Any) -> Any:
        """Note that a layer runs. Return its new inputs, or None to leave them."""
        tracer = self._tracer
        if tracer is None:
            return None
        is_shared = self.layouts.get((name, 0)) is SHARED
        # Modules among the inputs have parameters of their own, so the layer is not a function of its own parameters alone.
        is_closed = not is_shared and not any(isinstance(leaf, nn.Module) for leaf in leaves_of(inputs))
        whole = not counted or (is_closed and (tracer.has_data(inputs) or tracer.has_row_for_each_example(inputs)))
        self._layers.append(whole)
        if not whole:
            self.is_needed = True
            return None
        if tracer.has_derived(inputs):
            inputs = tree_map_only(Tensor, lambda tensor: tracer.hand_over(tensor, name), inputs)
        tracer.enter_layer()
        return inputs

    def leave_layer(self, *_: Any) -> None:
        if self._tracer is not None and self._layers and self._layers.pop():
            self._tracer.leave_layer()

    def _use(self, use: Use) -> None:
        self.is_needed = True
        key = self._next_key(use.names, use.where)
        self._record(use, {name: self._parameters[name] for name in use.names}, key)

    def _is_shared(self, names: list[str], where: str) -> bool:
        """Whether the next use of these parameters there belongs to no example, and is therefore none."""
        which = (*names, where)
        if self.layouts.get((str(which), self._num_uses[which])) is not SHARED:
            return False
        self._next_key(names, where)
        return True

    def _next_key(self, names: list[str], where: str) -> tuple[str, int]:
        which = (*names, where)
        self._num_uses[which] += 1
        return str(which), self._num_uses[which] - 1


def _enter_model(model: nn.Module, part: str, watch: Watch, module: nn.Module, *inputs: Any) -> None:
    watch.enter_model(model, part, inputs)


def _enter_layer(name: str, counted: bool, watch: Watch, module: nn.Module, *inputs: Any) -> Any:
    return watch.enter_layer(name, counted, inputs)


def _not_recorded(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Return the modules whose own parameters are not recorded: left out with layers=, or BatchNorm's."""
    recorded = {id(module) for site in plan.sites for module in site.module.modules()}
    return [
        (path, module)
        for path, module in model.named_modules()
        if id(module) not in recorded
        and any(
            parameter is not None and plan.aliases[f"{path}.{local}" if path else local] not in plan.bare
            for local, parameter in module._parameters.items()
        )
    ]


class _Tell(Hook[Watch]):
    """Calls a method of the watch."""

    def __init__(self, watch: Watch, method: Callable[..., Any]) -> None:
        super().__init__(watch)
        self._method = method

    @not_compiled
    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        watch = self.owner()
        return None if watch is None else self._method(watch, module, *rest)
