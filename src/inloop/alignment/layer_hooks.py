"""The hooks on a layer: before its forward pass, for what can only be repeated, and after it, to wait for its gradient."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from inloop.alignment.black_box import BLACK_BOX, BlackBoxState, fingerprint, random_state
from inloop.alignment.call import Autocast, LayerCall, detached, tensors_in, versions_of
from inloop.alignment.fused import can_fuse, fuse
from inloop.alignment.hook import Hook, not_compiled
from inloop.alignment.layout import Layout
from inloop.alignment.output_hook import hook_gradient
from inloop.alignment.plan import Site
from inloop.alignment.tape import Tape
from inloop.alignment.twin import make_twin, original_type
from inloop.distributed import is_sharded
from inloop.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from inloop.alignment.recorder import Recorder


class _LayerHook(Hook["Recorder"]):
    def __init__(self, recorder: "Recorder", site: Site) -> None:
        super().__init__(recorder)
        self.site = site

    def tape(self) -> Tape | None:
        recorder = self.owner()
        if recorder is None or not torch.is_grad_enabled() or recorder.follows_operations:
            return None
        if self.site.in_segment and torch._C._current_graph_task_id() != -1:
            return None  # a checkpoint within the segment, which answers for it, is run again
        return recorder.tape


class BeforeForward(_LayerHook):
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
        if any(is_sharded(parameter) for parameter in module.parameters()):
            raise UnsupportedLayerError(
                f"'{name}' ({original_type(module).__name__}) has no rule, so it is run again as a whole, but parts of it are sharded by "
                "themselves. Fix: call fully_shard on it, not on parts of it, register a rule, or leave it out with layers=."
            )
        # Those of a whole model are copied when the step is over, and the copies for the step before are not needed any more.
        later = self.site.rule.visit_layers is not None
        parameters = _parameters_in_use(module) if later else _parameters_to_keep(module, values=True)
        device = next(iter(parameters.values())).device
        tape.black_box_state[name] = BlackBoxState(
            make_twin(module, parameters), random_state(device), versions_of((args, kwargs))
        )


class AfterForward(_LayerHook):
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
        if any(is_sharded(value) for value in module._parameters.values()):
            raise UnsupportedLayerError(
                f"'{site.name}' ({original_type(module).__name__}) computes with parameters that are divided among processes (tensor parallelism), "
                "which is not supported. Fix: shard with fully_shard, or leave it out with layers=."
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
            tape.note_first(module.parameters())
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
