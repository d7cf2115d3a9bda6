"""Watching a model's forward passes for parameters that no layer's call accounts for, and recording where they are used."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.black_box import BLACK_BOX, fingerprint
from inloop.alignment.call import Autocast, LayerCall, versions_of
from inloop.alignment.hook import Hook, not_compiled
from inloop.alignment.layout import Layouts, layouts_of
from inloop.alignment.operation import Operation, Recipe, local_names
from inloop.alignment.output_hook import hook_gradient
from inloop.alignment.plan import Plan, Site
from inloop.alignment.tape import Tape
from inloop.alignment.trace import Tracer, first_length


class Watch:
    """What is known during one forward pass of the model, between its hooks.

    Args:
        tape: Gives the tape that is being recorded, if any.
        layouts: If they are known already.

    Attributes:
        found: Whether any parameter was seen outside of a layer's call with data.
        layouts: Where the examples are in the layers' outputs, if not on the first axis.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, tape: Callable[[], Tape | None], layouts: Layouts | None = None
    ) -> None:
        self.found = bool(plan.bare)
        self._plan, self._tape = plan, tape
        self._tracer: Tracer | None = None
        self.layouts: Layouts = layouts or {}
        self._must_try = layouts is None
        self._layers: list[bool] = []  # those that are running: whether they are recorded as a whole
        self._parameters: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        for site in plan.sites:
            pre, post = _EnterLayer(self, site), _LeaveLayer(self)
            self.handles.append(site.module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
            self.handles.append(site.module.register_forward_hook(post, always_call=True))
        for module in _not_recorded(
            model, plan
        ):  # though a parameter of theirs may be counted where it is used elsewhere
            self.handles.append(
                module.register_forward_pre_hook(_EnterLayer(self, None), prepend=True, with_kwargs=True)
            )
            self.handles.append(module.register_forward_hook(_LeaveLayer(self), always_call=True))
        self.handles.append(model.register_forward_pre_hook(_EnterModel(self), prepend=True, with_kwargs=True))
        self.handles.append(model.register_forward_hook(_LeaveModel(self), always_call=True))

    @property
    def follows_operations(self) -> bool:
        """Whether the layer that is running is not recorded as a whole, since it was called without data."""
        return bool(self._layers) and not self._layers[-1]

    def enter_model(self, model: nn.Module, inputs: Any) -> None:
        if self._tracer is not None or self._tape() is None:
            return
        if self._must_try:
            self.layouts = layouts_of(model, self._plan, inputs)
        counted = self._plan.counted()
        self._parameters = {
            self._plan.aliases[name]: parameter
            for name, parameter in model.named_parameters()
            if self._plan.aliases[name] in counted
        }
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._tracer = Tracer(model, names, first_length(inputs), self._record)
        self._tracer.__enter__()  # type: ignore[no-untyped-call]

    def leave_model(self) -> None:
        if self._tracer is not None:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._tracer = None
        self._layers.clear()

    def enter_layer(self, site: Site | None, inputs: Any) -> Any:
        """Returns what takes the place of the layer's inputs, if anything. No site: its parameters are left out."""
        tracer = self._tracer
        if tracer is None:
            return None
        if site is None:
            self._layers.append(True)
            tracer.enter_layer()
            return None
        whole = tracer.has_data(inputs) or tracer.has_row_for_each_example(inputs)
        self._layers.append(whole)
        if not whole:
            self.found = True
            return None
        if tracer.has_derived(inputs):
            inputs = tree_map_only(Tensor, lambda tensor: tracer.hand_over(tensor, site.name), inputs)
        tracer.enter_layer()
        return inputs

    def leave_layer(self) -> None:
        if self._tracer is not None and self._layers and self._layers.pop():
            self._tracer.leave_layer()

    def _record(self, recipe: Recipe, data: list[Tensor], names: list[str], out: Tensor) -> None:
        tape = self._tape()
        if tape is None or not out.requires_grad:
            return
        self.found = True
        used = {name: self._parameters[name] for name in names}
        tape.is_first(used.values())
        with torch.no_grad():
            layer = Operation(recipe, {name: value.detach().clone() for name, value in used.items()})
        args = tuple(tensor.detach() for tensor in data)
        call = LayerCall(
            name=f"{names[0]} in {recipe.name}",
            layer=layer,
            rule=BLACK_BOX,
            parameter_names=local_names(names),
            args=args,
            kwargs={},
            autocast=Autocast.current(out.device.type),
            batch=tape.batch,
            versions=versions_of(args),
            fingerprints=(fingerprint(out),),
        )
        hook_gradient(out, tape.wait_for_gradient(call))


def _not_recorded(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Modules whose own parameters are left out with layers=."""
    recorded = {id(module) for site in plan.sites for module in site.module.modules()}
    return [
        module
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


class _LeaveModel(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (watch := self.owner()) is not None:
            watch.leave_model()


class _EnterLayer(Hook[Watch]):
    def __init__(self, watch: Watch, site: Site | None) -> None:
        super().__init__(watch)
        self.site = site

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.owner()
        return None if watch is None else watch.enter_layer(self.site, (args, kwargs))


class _LeaveLayer(Hook[Watch]):
    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (watch := self.owner()) is not None:
            watch.leave_layer()
