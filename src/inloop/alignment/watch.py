"""Watching a model's forward passes for parameters that no layer's call accounts for, and recording where they are used."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.hook import Hook, not_compiled
from inloop.alignment.layout import Layouts
from inloop.alignment.plan import Plan
from inloop.alignment.trace import Tracer, Use, first_length
from inloop.alignment.twin import original_type


class Watch:
    """What is known during one forward pass of the model, between its hooks.

    Args:
        is_active: Whether passes are watched at the moment.
        record: Called with each use of parameters outside of layers' calls, the parameters by name, and a key for it that is the
            same in every pass.
        find_layouts: Says of a model and its inputs where the examples are in its outputs; None if that is known already.

    Attributes:
        is_needed: Whether a pass has shown what must be watched in every one: a parameter outside of layers' calls, or examples that are not
            on the first axis.
        layouts: Where the examples are in the layers' outputs, if not on the first axis.
        num_examples: Of the pass, as its first input says.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        is_active: Callable[[], bool],
        record: Callable[[Use, dict[str, Tensor], tuple[str, int]], None],
        find_layouts: Callable[[nn.Module, Any], Layouts] | None = None,
    ) -> None:
        self.is_needed = bool(plan.bare)
        self.layouts: Layouts = {}
        self.num_examples: int | None = None
        self._plan, self._is_active, self._record, self._find_layouts = plan, is_active, record, find_layouts
        self._tracer: Tracer | None = None
        self._depth = 0
        self._num_uses: Counter[object] = Counter()
        self._layers: list[bool] = []  # those that are running: whether they are recorded as a whole
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._names_are_new = False
        self._parameters: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        for site in plan.sites:
            pre, post = _EnterLayer(self, site.name), _LeaveLayer(self)
            self.handles.append(site.module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            self.handles.append(site.module.register_forward_hook(post, always_call=True))
        for name, module in _not_recorded(model, plan):
            pre = _EnterLayer(self, name, counted=False)  # though a parameter of it may be, where it is used elsewhere
            self.handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(_LeaveLayer(self), always_call=True))
        for module in model.modules():
            if original_type(module) is not type(module):  # sharded: behind the hook that makes its parameters whole
                self.handles.append(module.register_forward_pre_hook(_ParametersChanged(self)))
        self.handles.append(model.register_forward_pre_hook(_EnterModel(self), prepend=True, with_kwargs=True))
        self.handles.append(model.register_forward_hook(_LeaveModel(self), always_call=True))

    @property
    def follows_operations(self) -> bool:
        """Whether the layer that is running is not recorded as a whole, since it was called without data."""
        return bool(self._layers) and not self._layers[-1]

    def enter_model(self, model: nn.Module, inputs: Any) -> None:
        if self._tracer is not None:
            self._depth += 1  # the model calls itself
        if self._tracer is not None or not self._is_active():
            return
        if self._find_layouts is not None:
            self.layouts = self._find_layouts(model, inputs)
            self.is_needed |= bool(self.layouts)  # they are read with the number of examples of each pass
        self._names.clear()
        self.parameters_changed()
        self.num_examples = first_length(inputs)
        self._num_uses.clear()
        self._tracer = Tracer(model, partial(self._name_of, model), self.num_examples, self._use)
        self._tracer.__enter__()  # type: ignore[no-untyped-call]

    def parameters_changed(self) -> None:
        """Other tensors may have taken their place."""
        self._names_are_new = False

    def _name_of(self, model: nn.Module, tensor: Tensor) -> str | None:
        """Looked up anew when one is not known, as sharded parameters are exchanged for whole ones while their module runs."""
        if id(tensor) not in self._names and not self._names_are_new:
            self._names_are_new = True
            counted = self._plan.counted()
            for name, parameter in model.named_parameters(remove_duplicate=False):
                canonical = self._plan.aliases[name]
                self._names[id(parameter)] = canonical if canonical in counted else ""
                self._parameters[canonical] = parameter
        return self._names.get(id(tensor))

    def leave_model(self, entirely: bool = False) -> None:
        if self._depth and not entirely:
            self._depth -= 1
            return
        self._depth = 0
        if self._tracer is not None:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._tracer = None
        self._layers.clear()

    def enter_layer(self, name: str, counted: bool, inputs: Any) -> Any:
        """Returns what takes the place of the layer's inputs, if anything."""
        tracer = self._tracer
        if tracer is None:
            return None
        whole = not counted or tracer.has_data(inputs) or tracer.has_row_for_each_example(inputs)
        self._layers.append(whole)
        if not whole:
            self.is_needed = True
            return None
        if tracer.has_derived(inputs):
            inputs = tree_map_only(Tensor, lambda tensor: tracer.hand_over(tensor, name), inputs)
        tracer.enter_layer()
        return inputs

    def leave_layer(self) -> None:
        if self._tracer is not None and self._layers and self._layers.pop():
            self._tracer.leave_layer()

    def _use(self, use: Use) -> None:
        self.is_needed = True
        which = (*use.names, use.where)
        self._record(use, {name: self._parameters[name] for name in use.names}, (str(which), self._num_uses[which]))
        self._num_uses[which] += 1


def _not_recorded(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Modules whose own parameters are left out with layers=."""
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


class _EnterModel(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (watch := self.owner()) is not None and torch.is_grad_enabled():
            watch.enter_model(module, (args, kwargs))


class _ParametersChanged(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (watch := self.owner()) is not None:
            watch.parameters_changed()


class _LeaveModel(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (watch := self.owner()) is not None:
            watch.leave_model()


class _EnterLayer(Hook[Watch]):
    def __init__(self, watch: Watch, name: str, counted: bool = True) -> None:
        super().__init__(watch)
        self.name, self.counted = name, counted

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.owner()
        return None if watch is None else watch.enter_layer(self.name, self.counted, (args, kwargs))


class _LeaveLayer(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (watch := self.owner()) is not None:
            watch.leave_layer()
