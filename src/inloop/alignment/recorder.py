"""Recording: forward hooks that put a hook on each layer's output, which writes to a tape when the gradient arrives.

The closure of that output hook owns the layer's input until then. So a forward pass under ``no_grad``, in evaluation, or
one that is never differentiated leaves nothing, and an in-place activation after the layer does no harm.
Nothing is written on the user's modules; hooks in a copy of the model do nothing.
"""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.black_box import BLACK_BOX, BlackBoxState, fingerprint, random_state
from inloop.alignment.call import Autocast, LayerCall, detached, tensors_in, versions_of
from inloop.alignment.early import EarlyAlignment
from inloop.alignment.fused import can_fuse, fuse
from inloop.alignment.hook import Hook, not_compiled
from inloop.alignment.layout import Layout, Layouts
from inloop.alignment.operation import Operation, local_names
from inloop.alignment.output_hook import hook_gradient
from inloop.alignment.plan import Plan, Site
from inloop.alignment.probe import layouts_of
from inloop.alignment.spare import Spare
from inloop.alignment.tape import Reduction, Retention, Tape
from inloop.alignment.trace import Use
from inloop.alignment.twin import make_twin, reparametrizing_hooks
from inloop.alignment.watch import Watch
from inloop.errors import UnsupportedLayerError


class Recorder:
    """The hooks on one model, and the tape that they write to at the moment (None: they do nothing).

    Attributes:
        early: An older tape's alignment with the gradients that are being formed; None if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        copy_inputs: bool = False,
        retain: Retention = "exact",
        layouts: Layouts | None = None,
    ) -> None:
        self.copy_inputs = copy_inputs
        self.retain: Retention = retain
        self.tape: Tape | None = None
        self.early: EarlyAlignment | None = None
        self.plan = plan
        self._spare = Spare()
        self._watch: Watch | None = None
        self._layouts: Layouts = layouts or {}
        handles: list[RemovableHandle] = []
        # A recorder that is simply forgotten takes its hooks along: they know it only weakly.
        self.remove_hooks = weakref.finalize(self, _remove_all, handles)
        for site in self.plan.sites:
            before, after = _BeforeForward(self, site), _AfterForward(self, site)
            if site.rule.replays:
                # Before a hook that is part of the computation, after the user's others, which may draw random numbers.
                first = bool(reparametrizing_hooks(site.module))
                handles.append(site.module.register_forward_pre_hook(before, prepend=first, with_kwargs=True))
            # First in line, to see the layer's own output and not what the user's hooks make of it; after an exception, too,
            # to forget what was kept for a black box.
            always = site.rule.replays
            handles.append(site.module.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=always))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(_AfterGradient(self, name))  # type: ignore[no-untyped-call]
                handles.append(handle)

        if not any(site.rule.visit_layers for site in plan.sites):
            # Until a step has shown that there is no need for it.
            operations = _Operations(self)
            find = None if layouts is not None else lambda model, inputs: layouts_of(model, plan, inputs)
            self._watch = Watch(model, plan, operations.are_recorded, operations.record, find)
            self._watch.layouts = self._layouts
            handles.extend(self._watch.handles)

    def layout(self, site: Site, index: int, output: Tensor) -> Layout:
        """Where the examples are in an output: as was found by trying, or as the module says of itself."""
        return self.layouts.get((site.name, index)) or Layout(site.batch_axis(index, output))

    @property
    def layouts(self) -> Layouts:
        return self._layouts if self._watch is None else self._watch.layouts

    @property
    def num_examples(self) -> int | None:
        """Of the pass that is running, as far as it is watched."""
        return None if self._watch is None else self._watch.num_examples

    @property
    def follows_operations(self) -> bool:
        """Whether operations are recorded at the moment, in place of the layer that is running."""
        return self._watch is not None and self._watch.follows_operations

    def start(self, reduction: Reduction, expect_one_pass: bool = False) -> Tape:
        """Let a new tape record from here on."""
        self.stop()
        self.tape = Tape(self.plan, reduction, self.retain, expect_one_pass, self._spare)
        return self.tape

    def stop(self) -> None:
        """Record nothing more on the current tape, also of backward passes still to come."""
        if self.tape is not None:
            self.tape.close()
            if self._watch is not None and self.tape.calls and not self._watch.found:
                self._layouts = self._watch.layouts
                _remove_all(self._watch.handles)
                self._watch = None
        self.tape = None
        if self._watch is not None:
            self._watch.leave_model(entirely=True)  # after an interrupt, to which hooks do not answer
        self._spare.clear()

    def remove(self) -> None:
        self.stop()
        self.early = None
        self.remove_hooks()


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _AfterGradient:
    """Tells what is recorded, and what is aligned early, that a backward pass is done with a parameter."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = weakref.ref(recorder)
        self.name = name

    @not_compiled
    def __call__(self, parameter: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            return
        if recorder.early is not None and parameter.grad is not None:
            recorder.early.gradient_arrived(self.name, parameter.grad)
        if recorder.tape is not None:
            recorder.tape.passes[self.name] += 1
            recorder.tape.settle()


class _LayerHook(Hook[Recorder]):
    def __init__(self, recorder: Recorder, site: Site) -> None:
        super().__init__(recorder)
        self.site = site

    def tape(self) -> Tape | None:
        recorder = self.owner()
        if recorder is None or not torch.is_grad_enabled() or recorder.follows_operations:
            return None
        return recorder.tape


class _BeforeForward(_LayerHook):
    """Keeps, for a black box, what its forward pass may change or consume: parameters, buffers, random state."""

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape, name = self.tape(), self.site.name
        if tape is None or not self.site.trainable():
            return
        if name in tape.black_box_state:
            raise UnsupportedLayerError(
                f"'{name}' ({type(module).__name__}) calls itself in its own forward pass, which cannot be replayed. "
                "Fix: split the recursion into separate modules, or leave it out with layers=."
            )
        if tape.black_box_state:  # a part of another black box, which answers for it
            return
        coupled = [n for n, child in module.named_modules() if n and isinstance(child, _BatchNorm) and child.training]
        if coupled and self.site.rule is BLACK_BOX:
            raise UnsupportedLayerError(
                f"'{name}' ({type(module).__name__}) owns parameters directly, so it is aligned as a whole, but it "
                f"contains BatchNorm in training mode ('{coupled[0]}'), which mixes its examples. Fix: move the parameters "
                "into a small module of their own, put BatchNorm in eval mode, or leave the module out with layers=."
            )
        # Those of a whole model are copied when the step is over, and the copies for the step before are not needed any more.
        later = self.site.rule.visit_layers is not None
        parameters = _parameters_in_use(module) if later else _parameters_to_keep(module, values=True)
        device = next(iter(parameters.values())).device
        tape.black_box_state[name] = BlackBoxState(
            make_twin(module, parameters), random_state(device), versions_of((args, kwargs))
        )


class _AfterForward(_LayerHook):
    """Waits on the layer's output for its gradient."""

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """``rest`` is (kwargs, output), or the output alone from code that was compiled before there were hooks."""
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)
        tape, site = self.tape(), self.site
        if tape is None:
            return None
        state = tape.black_box_state.pop(site.name, None)
        if tape.black_box_state or (site.rule.replays and state is None) or output is None:
            return None  # inside another black box, frozen, or left by an exception
        trainable = site.trainable()
        outputs = tensors_in(output)
        if any(value is not None and value.grad_fn is not None for value in module._parameters.values()):
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) was called with other tensors in place of its parameters (functional_call), so "
                "what it contributes to their gradients cannot be told. Fix: call the operation with these tensors "
                "(torch.nn.functional), or leave the layer out with layers=."
            )
        if trainable and not outputs:
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) returned a {type(output).__name__}, in which no tensor can be seen. "
                "Fix: return tensors in tuples, lists or dicts, or leave it out with layers=."
            )
        if not trainable or not any(out.requires_grad for out in outputs):
            return None
        self._refuse_unbatched(module, (args, kwargs))
        if state is None:
            return self._wait(tape, module, (args, kwargs), outputs, trainable, None)
        if versions_of((args, kwargs)) != state.versions:
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) changes its input in place, so it cannot be run again. Fix: work on a "
                "copy of the input, or leave the module out with layers=."
            )
        # Its outputs may depend on each other, or be one tensor twice: behind copies each has only the gradient of its user.
        output = tree_map_only(Tensor, lambda out: out.clone() if out.requires_grad else out, output)
        self._wait(tape, module, (args, kwargs), tensors_in(output), trainable, state)
        return output

    def _wait(
        self,
        tape: Tape,
        module: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: list[Tensor],
        trainable: dict[str, str],
        state: BlackBoxState | None,
    ) -> Tensor | None:
        """Record the call when gradients arrive; returns what takes the place of the output, if anything."""
        recorder = self.owner()
        assert recorder is not None
        args, kwargs = detached(inputs, recorder.copy_inputs)
        rule = self.site.rule
        if not any(tensor.grad_fn is not None for tensor in tensors_in(inputs)):
            tape.is_first(module.parameters())
        call = LayerCall(
            name=self.site.name,
            layer=state.layer if state else make_twin(module, _parameters_to_keep(module, rule.keeps_parameters)),
            rule=rule,
            parameter_names=trainable,
            args=args,
            kwargs=kwargs,
            autocast=Autocast.current(outputs[0].device.type),
            batch=tape.batch,
            random_state=state.random_state if state and state.was_random() else {},
            versions=versions_of((args, kwargs)),
            fingerprints=tuple(fingerprint(out) for out in outputs) if state else (),
        )
        packed = _example_of_row(inputs[0])
        layouts = [recorder.layout(self.site, index, out) for index, out in enumerate(outputs)]
        if tape.fuses and layouts == [Layout()] and can_fuse(call, module, inputs[0], outputs):
            return fuse(call, module, inputs[0][0], outputs[0], tape.wait_for_gradient(call, form_gradients=True))
        for index, (out, layout) in enumerate(zip(outputs, layouts, strict=True)):
            if out.requires_grad:
                whose = layout.example_of_row(layout.fold(out, recorder.num_examples), out) if out.dim() else None
                whose = packed if index == 0 and packed is not None else whose
                placed = call if whose is None else replace(call, example_of_row=whose)
                hook_gradient(out, tape.wait_for_gradient(placed, index, layout.axis))
        return None

    def _refuse_unbatched(self, module: nn.Module, inputs: Any) -> None:
        tensors = tensors_in(inputs)
        if not tensors:
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called without a tensor, so its output is shared by all examples. "
                "Fix: pass it the batch and return a row for each example (expand), or leave it out with layers=."
            )
        dims = self.site.rule.example_dims(module) + (
            2 if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) else 0
        )
        packed = any(isinstance(value, PackedSequence) for value in inputs[0])
        if isinstance(module, nn.RNNBase) and packed:
            return
        if packed or (tensors[0].dim() <= dims and not (self.site.rule.replays and dims == 0)):
            got = "a packed sequence" if packed else f"an input of shape {tuple(tensors[0].shape)}"
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called with {got}; one axis more than the {dims} of a single "
                "example is needed, examples first. Fix: pass a padded batch, x.unsqueeze(0) for a single example."
            )


class _Operations:
    """Records what happens to parameters outside of layers' calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)

    def are_recorded(self) -> bool:
        recorder = self._recorder()
        return recorder is not None and recorder.tape is not None

    def record(self, use: Use, parameters: dict[str, Tensor], key: tuple[str, int]) -> None:
        recorder = self._recorder()
        if recorder is None or recorder.tape is None:
            return
        tape, out = recorder.tape, use.out
        layout = recorder.layouts.get(key, Layout())
        self._refuse_shared(use, layout, recorder.num_examples)
        fold = layout.fold(out, recorder.num_examples)
        tape.is_first(parameters.values())
        args = tuple(tensor.detach() for tensor in use.data)
        whose = layout.example_of_row(fold, out)
        call = LayerCall(
            name=f"{use.names[0]} {use.where}",
            layer=Operation(use.recipe, {name: value.detach().clone() for name, value in parameters.items()}),
            rule=BLACK_BOX,
            parameter_names=local_names(use.names),
            args=args,
            kwargs={},
            autocast=Autocast.current(out.device.type),
            batch=tape.batch,
            versions=versions_of(args),
            fingerprints=(fingerprint(out),),
            example_of_row=whose,
        )
        hook_gradient(out, tape.wait_for_gradient(call, batch_axis=layout.axis))

    @staticmethod
    def _refuse_shared(use: Use, layout: Layout, num_examples: int | None) -> None:
        shape = tuple(use.out.shape)
        if shape and (num_examples is None or shape[layout.axis] == layout.fold(use.out, num_examples) * num_examples):
            return
        raise UnsupportedLayerError(
            f"Parameter '{use.names[0]}' meets the data {use.where}, in a tensor of shape {shape}, in which the {num_examples} examples "
            "cannot be found on the first axis. Fix: give it a row for each example, as in queries.expand(N, -1, -1), put the "
            "operation into a small module of its own, or leave the parameter out with layers=."
        )


def _example_of_row(inputs: tuple[Any, ...]) -> Tensor | None:
    """Which example each row of a packed sequence belongs to: at every position come those that are long enough, longest first."""
    packed = next((value for value in inputs if isinstance(value, PackedSequence)), None)
    if packed is None:
        return None
    ranks = torch.cat([torch.arange(int(count)) for count in packed.batch_sizes]).to(packed.data.device)
    return ranks if packed.sorted_indices is None else packed.sorted_indices[ranks]


def _parameters_in_use(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}


def _parameters_to_keep(module: nn.Module, values: bool) -> dict[str, Tensor]:
    """Copies of the parameters of step t or, for rules that have no use for them, only their shapes and types."""
    named = module.named_parameters(remove_duplicate=False)
    return {n: p.detach().clone() if values else torch.empty_like(p, device="meta") for n, p in named}
