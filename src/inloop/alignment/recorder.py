"""Recording: forward hooks that put a hook on each layer's output, which writes to a tape when the gradient arrives.

The closure of that output hook owns the layer's input until then. So a forward pass under ``no_grad``, in evaluation, or
one that is never differentiated leaves nothing, and an in-place activation after the layer does no harm.
Nothing is written on the user's modules; hooks in a copy of the model do nothing.
"""

import weakref
from collections.abc import Callable
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
from inloop.alignment.output_hook import hook_gradient
from inloop.alignment.plan import Plan, Site
from inloop.alignment.spare import Spare
from inloop.alignment.tape import Reduction, Retention, Tape
from inloop.alignment.twin import make_twin, reparametrizing_hooks
from inloop.errors import UnsupportedLayerError


class Recorder:
    """The hooks on one model, and the tape that they write to at the moment (None: they do nothing).

    Attributes:
        early: An older tape's alignment with the gradients that are being formed; None if there is none.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, copy_inputs: bool = False, retain: Retention = "exact") -> None:
        self.copy_inputs = copy_inputs
        self.retain: Retention = retain
        self.tape: Tape | None = None
        self.early: EarlyAlignment | None = None
        self.plan = plan
        self._spare = Spare()
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

    def start(self, reduction: Reduction, expect_one_pass: bool = False) -> Tape:
        """Let a new tape record from here on."""
        self.stop()
        self.tape = Tape(self.plan, reduction, self.retain, expect_one_pass, self._spare)
        return self.tape

    def stop(self) -> None:
        """Record nothing more on the current tape, also of backward passes still to come."""
        if self.tape is not None:
            self.tape.close()
        self.tape = None
        self._spare.clear()

    def remove(self) -> None:
        self.stop()
        self.early = None
        self.remove_hooks()


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _do_nothing(*_: object) -> None:
    """What stands in for a hook in copies of the model."""


def _hook_of_a_copy() -> object:
    return _do_nothing


class _AfterGradient:
    """Tells what is recorded, and what is aligned early, that a backward pass is done with a parameter."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = weakref.ref(recorder)
        self.name = name

    def __call__(self, parameter: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            return
        if recorder.early is not None and parameter.grad is not None:
            recorder.early.gradient_arrived(self.name, parameter.grad)
        if recorder.tape is not None:
            recorder.tape.passes[self.name] += 1
            recorder.tape.settle()


class _Hook:
    """A hook of one recorder on one module. Copies of the module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, recorder: Recorder, site: Site) -> None:
        self.recorder = weakref.ref(recorder)
        self.site = site

    def __deepcopy__(self, memo: object) -> object:
        return _do_nothing

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _hook_of_a_copy, ()

    def tape(self) -> Tape | None:
        recorder = self.recorder()
        return recorder.tape if recorder is not None and torch.is_grad_enabled() else None


class _BeforeForward(_Hook):
    """Keeps, for a black box, what its forward pass may change or consume: parameters, buffers, random state."""

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


class _AfterForward(_Hook):
    """Waits on the layer's output for its gradient."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tape, site = self.tape(), self.site
        if tape is None:
            return None
        state = tape.black_box_state.pop(site.name, None)
        if tape.black_box_state or (site.rule.replays and state is None) or output is None:
            return None  # inside another black box, frozen, or left by an exception
        trainable = site.trainable()
        outputs = tensors_in(output)
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
        recorder = self.recorder()
        assert recorder is not None
        args, kwargs = detached(inputs, recorder.copy_inputs)
        rule = self.site.rule
        if not any(tensor.requires_grad for tensor in tensors_in(inputs)):
            tape.is_first(module)
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
        if tape.fuses and can_fuse(call, module, inputs[0], outputs):
            return fuse(call, module, inputs[0][0], outputs[0], tape.wait_for_gradient(call, form_gradients=True))
        for index, out in enumerate(outputs):
            if out.requires_grad:
                hook_gradient(out, tape.wait_for_gradient(call, index, _batch_axis(module, index)))
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
        if packed or (tensors[0].dim() <= dims and not (self.site.rule.replays and dims == 0)):
            got = "a packed sequence" if packed else f"an input of shape {tuple(tensors[0].shape)}"
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called with {got}; one axis more than the {dims} of a single "
                "example is needed, examples first. Fix: pass a padded batch, x.unsqueeze(0) for a single example."
            )


def _batch_axis(module: nn.Module, output_index: int) -> int:
    """Axis of the examples: the first, but for the final states of a recurrent layer, [layers, N, features]."""
    return 1 if isinstance(module, nn.RNNBase) and output_index > 0 else 0


def _parameters_in_use(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}


def _parameters_to_keep(module: nn.Module, values: bool) -> dict[str, Tensor]:
    """Copies of the parameters of step t or, for rules that have no use for them, only their shapes and types."""
    named = module.named_parameters(remove_duplicate=False)
    return {n: p.detach().clone() if values else torch.empty_like(p, device="meta") for n, p in named}
