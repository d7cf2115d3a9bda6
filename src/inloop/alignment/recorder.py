"""Record layer calls: after a layer's forward pass a hook waits for its output's gradient, then writes to a tape.

A forward pass under ``no_grad`` leaves nothing, and outside of a step hooks do nothing. The recorder writes nothing on
the user's modules; hooks in a copy of the model do nothing.
"""

import logging
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from inloop.alignment.black_box import BeforeCall, BlackBoxCall, RunAgain, fingerprint, random_state
from inloop.alignment.call import (
    ALL_ROWS_OF_ONE,
    PLAIN,
    Autocast,
    LayerCall,
    Layout,
    Layouts,
    Recorded,
    detached,
    make_twin,
    original_type,
    reparametrizing_hooks,
)
from inloop.alignment.casts import Casts
from inloop.alignment.direction import Direction
from inloop.alignment.early import EarlyAlignment
from inloop.alignment.follow import FindExamples, Watch
from inloop.alignment.hooks import NODES, Exchange, Fused, Identity, hook_gradient
from inloop.alignment.inputs import example_of_row, have_objects, with_own_objects
from inloop.alignment.kept import tensors_in, versions_of
from inloop.alignment.operation import Use, record_use
from inloop.alignment.plan import Plan, Site
from inloop.alignment.tape import Reduction, Retention, Tape
from inloop.distributed import is_sharded
from inloop.errors import UnsupportedLayerError
from inloop.hooks import Hook, remove_all
from inloop.uncompiled import run_compiled_again, run_uncompiled
from inloop.warn import warn_once

log = logging.getLogger("inloop")

_ONE_ROW = torch.Size([1])
_MOST_SHAPES = 1000  # to remember the decisions for, per layer: sequences may have any length

MakeModelCall = Callable[[Site], Callable[..., RunAgain]]


class Recorder:
    """The hooks on one model, and the tape that they write to now (None: they do nothing).

    Args:
        make_model_call: Returns a function that makes the calls of a site with an inner plan (``replay.py``).
        layouts: Where the examples are in the outputs, if known.
        find_examples: Finds it out for a model and its inputs, if it is not known (``probe.py``).

    Attributes:
        early: Receives every gradient that arrives; None if nothing aligns early.
        saw_gradient: Whether a backward pass has reached a parameter since this was set to False.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        copy_inputs: bool = False,
        retain: Retention = "exact",
        make_model_call: MakeModelCall | None = None,
        layouts: Layouts | None = None,
        find_examples: FindExamples | None = None,
    ) -> None:
        self.copy_inputs = copy_inputs
        self.retain: Retention = retain
        self.tape: Tape | None = None
        self.casts = Casts()
        self.early: EarlyAlignment | None = None
        self.saw_gradient = False
        self._is_removed = False
        self._parts: set[tuple[int, str]] = set()  # by micro-batch, what was called of the model; "" for itself
        self._pass_of_batch: dict[int, int] = {}  # the first pass through the model, by micro-batch
        self._has_warned = False
        self.plan = plan
        self._make_model_call = make_model_call
        self._layouts: Layouts = layouts or {}
        self._watch: Watch | None = None
        handles: list[RemovableHandle] = []
        # Hooks refer to the recorder weakly, so a forgotten recorder takes its hooks along.
        self.remove_hooks = weakref.finalize(self, remove_all, handles)
        weakref.finalize(self, run_compiled_again, id(self))
        for site in plan.sites:
            runs_again = site.rule is None
            if runs_again:
                # Run before hooks that are part of the computation, after the user's, which may draw random numbers.
                first, before = bool(reparametrizing_hooks(site.module)), BeforeForward(self, site)
                handles.append(site.module.register_forward_pre_hook(before, prepend=first, with_kwargs=True))
            # Run first, to see the layer's own output before the user's hooks change it. Run after an exception too, to
            # forget the state of a module to run again.
            after = AfterForward(self, site)
            handle = site.module.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=runs_again)
            handles.append(handle)
        self._handles = handles
        self._not_followed = dict(model.named_parameters())  # parameters without a hook on their gradient
        self._follow_gradients()
        # Watch, unless the whole model is run again, until a step shows that there is no need.
        if not any(site.inner is not None and not site.name for site in plan.sites):
            operations = _Operations(self)
            self._watch = Watch(
                model, plan, operations.are_recorded, operations.record, operations.num_announced, find_examples
            )
            self._watch.layouts = self._layouts

    def make_model_call(self, site: Site) -> Callable[..., RunAgain]:
        assert self._make_model_call is not None
        return self._make_model_call(site)

    def layout(self, site: Site, index: int, output: Tensor) -> Layout:
        """Return where the examples are in an output: as the probe found, or as the module declares."""
        if self.has_one_example:
            return PLAIN if output.shape[:1] == _ONE_ROW else ALL_ROWS_OF_ONE
        layouts = self._layouts if self._watch is None else self._watch.layouts
        found = layouts.get((site.name, index)) if layouts else None
        axis = site.batch_axis(index, output) if found is None and (index or site.sequence_first) else 0
        return found or (Layout(axis) if axis else PLAIN)

    @property
    def layouts(self) -> Layouts:
        return self._layouts if self._watch is None else self._watch.layouts

    @property
    def num_examples(self) -> int | None:
        """The number of examples of the running pass, if it is watched."""
        return None if self._watch is None else self._watch.num_examples

    @property
    def has_one_example(self) -> bool:
        """Whether the running pass of the model has one example, whose all rows then are."""
        return self._watch is not None and self._watch.has_one_example

    def note_pass(self, name: str) -> None:
        """Note how many examples the model was given; warn once if its parts are called by themselves."""
        watch, tape = self._watch, self.tape
        assert tape is not None
        if watch is None:
            return
        if watch.is_whole and watch.num_examples is not None:
            tape.given[tape.batch] = watch.num_examples
        self._warn_of_two_passes(watch, tape)
        if watch.is_asleep or torch._C._current_graph_task_id() != -1:  # in a backward pass, a checkpoint runs again
            return
        self._parts.add((tape.batch, watch.part if watch.is_running else name))
        parts = [part for batch, part in self._parts if batch == tape.batch]
        if len(parts) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "inloop: parts of the model (%s) are called one after the other, and not all by its forward pass, so what happens between them "
                "cannot be seen. Each row is taken to be the example at its place in the batch. If rows are sorted between the parts, or shared by all "
                "examples (texts of classes), rewards are wrong. Fix: compare with inloop.check once, or call the model itself (shown once)",
                ", ".join(f"'{part}'" if part else "its forward pass" for part in sorted(parts)[:3]),
            )

    def _warn_of_two_passes(self, watch: Watch, tape: Tape) -> None:
        """Warn if the model is called twice for one micro-batch, perhaps on other examples of the same number."""
        if not (watch.is_whole and watch.is_running) or torch._C._current_graph_task_id() != -1:
            return
        if self._pass_of_batch.setdefault(tape.batch, watch.num_passes) != watch.num_passes:
            warn_once(
                "the model is called twice for one (micro-)batch. Rows at the same place count for the same example, which is right for two views "
                "of it, and wrong if the second call is on other examples. Fix: call learner.sample before each micro-batch; back-propagate a loss on "
                "other examples after learner.step (shown once)"
            )

    @property
    def follows_operations(self) -> bool:
        """Whether operations are recorded now, in place of the running layer."""
        return self._watch is not None and self._watch.follows_operations

    def _follow_gradients(self) -> None:
        """Hook the gradients of all parameters; try frozen ones again at the next step."""
        for name, parameter in list(self._not_followed.items()):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(_AfterGradient(self, name)))
                del self._not_followed[name]

    def start(self, reduction: Reduction, known: Direction | None = None, magnitudes: bool = True) -> Tape:
        """Record on a new tape from here on.

        Args:
            known: The direction to align calls with when they arrive, if it is known already.
            magnitudes: Whether to keep what verifying small gradients needs.
        """
        self.stop()
        self._parts.clear()
        self._pass_of_batch.clear()
        self.casts = Casts()
        if self._not_followed:
            self._follow_gradients()
        one_pass = self.early is not None and self.early.state == "on"
        run_uncompiled(id(self))
        self.tape = Tape(self.plan, reduction, self.retain, one_pass, known, magnitudes)
        return self.tape

    def stop(self) -> None:
        """Record nothing more on the current tape, also of backward passes still to come."""
        watch = self._watch
        if self.tape is not None:
            self.tape.close()
            if watch is not None and self.tape.seen and not watch.is_needed:
                if watch.knows_layouts:
                    self._layouts = watch.layouts
                    watch.remove()
                    self._watch = None
                elif watch.has_one_example:
                    watch.sleep()
        self.tape = None
        run_compiled_again(id(self))
        if watch is not None:
            watch.leave_model(entirely=True)  # hooks do not run after an interrupt

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave no trace of passes in this block."""
        tape, early, saw_gradient = self.tape, self.early, self.saw_gradient
        self.tape = self.early = None
        run_compiled_again(id(self))
        try:
            yield
        finally:
            if not self._is_removed:
                if tape is not None:
                    run_uncompiled(id(self))
                self.tape, self.early, self.saw_gradient = tape, early, saw_gradient

    def remove(self) -> None:
        self.stop()
        self.early = None
        self._is_removed = True
        if self._watch is not None:
            self._watch.remove()
        self.remove_hooks()


class _AfterGradient(Hook[Recorder]):
    """Tells the tape and the early alignment that a backward pass has finished a parameter's gradient."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        super().__init__(recorder)
        self.name = name

    def __call__(self, parameter: Tensor) -> None:
        recorder = None if is_compiling() else self.owner()
        if recorder is None:
            return
        recorder.saw_gradient = True
        gradient, early, tape = parameter.grad, recorder.early, recorder.tape
        if early is not None and gradient is not None and self.name in early.awaited:
            early.gradient_arrived(self.name, gradient)
        if tape is not None:
            tape.note_gradient(self.name, gradient)


class _Operations:
    """Gives the uses of parameters outside of layer calls to the tape of a recorder, to which it refers weakly."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)

    def are_recorded(self) -> bool:
        recorder = self._recorder()
        return recorder is not None and recorder.tape is not None

    def num_announced(self) -> int | None:
        """How many examples the running pass should have, if that is known."""
        recorder = self._recorder()
        return None if recorder is None or recorder.tape is None else recorder.tape.announced

    def record(self, use: Use, parameters: dict[str, Tensor], key: tuple[str, int]) -> None:
        recorder = self._recorder()
        if recorder is not None and recorder.tape is not None:
            layout = ALL_ROWS_OF_ONE if recorder.has_one_example else recorder.layouts.get(key, PLAIN)
            record_use(recorder.tape, use, parameters, layout, recorder.num_examples)


class _LayerHook(Hook["Recorder"]):
    def __init__(self, recorder: "Recorder", site: Site) -> None:
        super().__init__(recorder)
        self.site = site

    def recorder(self) -> "Recorder | None":
        """Return the owner if it records this pass, else None."""
        recorder = self.owner()
        if recorder is None or recorder.tape is None or not torch.is_grad_enabled() or recorder.follows_operations:
            return None
        if self.site.in_segment and torch._C._current_graph_task_id() != -1:
            return None  # a checkpoint inside the segment runs again; the segment accounts for it
        return recorder


def _are_the_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class BeforeForward(_LayerHook):
    """Keeps the state that the forward pass of a module to run again may change: parameters, buffers, random state."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder, site = None if is_compiling() else self.recorder(), self.site
        if recorder is None or recorder.tape is None or not site.trainable():
            return
        running = recorder.tape.running
        if site.name in running:
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) calls itself in its own forward pass, so it cannot be run again. "
                "Fix: split the recursion into separate modules, or leave it out with layers=."
            )
        if running:  # below another module to run again, which accounts for it
            return
        if site.inner is None:
            self._refuse_parts(module)
        # A whole model's parameters are copied after the step, when those of the previous step are not needed any more.
        copied = site.inner is None
        named = module.named_parameters(remove_duplicate=False)
        parameters = {name: value.detach().clone() if copied else value.detach() for name, value in named}
        device = next(iter(parameters.values())).device
        twin = make_twin(module, parameters)
        own = with_own_objects((args, kwargs)) if have_objects((args, kwargs)) else None
        running[site.name] = BeforeCall(twin, random_state(device), versions_of((args, kwargs)), own)

    def _refuse_parts(self, module: nn.Module) -> None:
        """Raise if the module has parts that one function of the examples cannot have."""
        name, kind = self.site.name, original_type(module).__name__
        coupled = [n for n, child in module.named_modules() if n and isinstance(child, _BatchNorm) and child.training]
        if coupled:
            raise UnsupportedLayerError(
                f"'{name}' ({kind}) owns parameters directly, so it is aligned as a whole, but it contains BatchNorm in training mode "
                f"('{coupled[0]}'), which mixes its examples. Fix: move the parameters into a small module of their own, put BatchNorm "
                "in eval mode, or leave the module out with layers=."
            )
        if any(is_sharded(parameter) for parameter in module.parameters()):
            raise UnsupportedLayerError(
                f"'{name}' ({kind}) has no rule, so it is run again as a whole, but parts of it are sharded by themselves. Fix: call "
                "fully_shard on it, not on parts of it, register a rule, or leave it out with layers=."
            )


class AfterForward(_LayerHook):
    """Waits for the gradient of the layer's output."""

    def __init__(self, recorder: "Recorder", site: Site) -> None:
        super().__init__(recorder, site)
        self._shapes: dict[str, Any] = {}  # of the parameters: tensors without values
        self._twin: tuple[list[Any], nn.Module] | None = None  # and the attributes of the module that it was made of
        self._batched_dims: set[int] = set()
        self._fused: dict[object, bool] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        recorder, site = None if is_compiling() else self.recorder(), self.site
        if recorder is None or recorder.tape is None:
            return None
        tape = recorder.tape
        state = tape.running.pop(site.name, None) if site.rule is None else None
        if tape.running or (site.rule is None and state is None) or output is None:
            return None  # below another module to run again, frozen, or left by an exception
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return None  # hooks see other tensors here; the check for unseen uses refuses the parameters
        self._refuse_foreign_parameters(module)
        trainable = site.trainable()
        outputs = [output] if type(output) is Tensor else tensors_in(output)
        if trainable and not outputs:
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) returned a {type(output).__name__}, in which no tensor can be seen. "
                "Fix: return tensors in tuples, lists or dicts, or leave it out with layers=."
            )
        if not trainable or not any([out.requires_grad for out in outputs]):
            return None
        self._refuse_unbatched(module, args, kwargs)
        recorder.note_pass(site.name)
        if state is not None:
            return self._wait_to_run_again(recorder, module, (args, kwargs), output, trainable, state)
        call = self._layer_call(recorder, module, (args, kwargs), outputs[0], trainable)
        layout = recorder.layout(site, 0, outputs[0])
        if layout is PLAIN and len(outputs) == 1 and tape.fuses and self._can_fuse(call, module, args, output):
            form = call.rule.per_example
            assert form is not None
            exchange = Exchange(tape.wait_for_gradient(call, fused=True), output, call.layer, form.backward)
            return Fused.apply(exchange, args[0], module.weight, module.bias)  # type: ignore[no-untyped-call]
        if layout is PLAIN and len(outputs) == 1 and type(args[0] if args else None) is Tensor:
            hook_gradient(output, tape.wait_for_gradient(call))
            return None
        for index, out in enumerate(outputs):
            if out.requires_grad:
                hook_gradient(out, tape.wait_for_gradient(self._placed(recorder, call, index, out, args)))
        return None

    def _layer_call(
        self, recorder: "Recorder", module: nn.Module, inputs: Any, output: Tensor, trainable: dict[str, str]
    ) -> LayerCall:
        tape, rule = recorder.tape, self.site.rule
        assert tape is not None
        assert rule is not None
        args, kwargs = inputs
        if tape.first_parameters is not None and not any([t.grad_fn is not None for t in tensors_in(inputs)]):
            tape.first_parameters += [p for p in module.parameters() if p.requires_grad]
        autocast = Autocast.current(output.device.type)
        casts = autocast.enabled and rule.casts_input and output.dtype is autocast.dtype
        args = (recorder.casts.cast(args, autocast.dtype, tape.batch) if casts else None) or detached(
            args, recorder.copy_inputs
        )
        kwargs = detached(kwargs, recorder.copy_inputs) if kwargs else {}
        return LayerCall(
            name=self.site.name,
            layer=self._twin_of(module),
            rule=rule,
            parameter_names=trainable,
            args=args,
            kwargs=kwargs,
            autocast=autocast,
            batch=tape.batch,
            versions=versions_of((args, kwargs)) if kwargs else versions_of(args),
        )

    def _twin_of(self, module: nn.Module) -> nn.Module:
        """Return a twin: the same for all calls, while the module has the same attributes, no buffers and no parameters to keep."""
        parameters = self._parameters_to_keep(module)
        if module._buffers or module._modules or parameters is not self._shapes:
            return make_twin(module, parameters)
        attributes = list(module.__dict__.values())
        if self._twin is None or not _are_the_same(self._twin[0], attributes):
            self._twin = attributes, make_twin(module, parameters)
        return self._twin[1]

    def _parameters_to_keep(self, module: nn.Module) -> Any:
        """Return copies of the parameters of step t or, if the rule does not read them, only shapes and types."""
        rule = self.site.rule
        if rule is not None and rule.keeps_parameters:
            return {name: None if p is None else p.detach().clone() for name, p in module._parameters.items()}
        for name, p in module._parameters.items():
            known = self._shapes.get(name)
            if p is not None and (known is None or known.dtype is not p.dtype or known.shape != p.shape):
                self._twin = None
                self._shapes[name] = torch.empty_like(p, device="meta", requires_grad=False)
        return self._shapes

    def _placed(self, recorder: "Recorder", call: Recorded, index: int, out: Tensor, args: Any) -> Any:
        """Return the call of one output, with the place of the examples in it."""
        layout = recorder.layout(self.site, index, out)
        whose = layout.example_of_row(out, recorder.num_examples) if layout is not PLAIN and out.dim() else None
        if index == 0 and type(args) is tuple and not all([type(value) is Tensor for value in args]):
            packed = next((value for value in args if isinstance(value, PackedSequence)), None)
            whose = whose if packed is None else example_of_row(packed)
        return call if layout is PLAIN and index == 0 and whose is None else call.placed(index, layout.axis, whose)

    def _can_fuse(self, call: LayerCall, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> bool:
        """Whether the graph node of this call can be exchanged, and should be."""
        form = call.rule.per_example
        if form is None or form.backward is None or len(args) != 1 or type(args[0]) is not Tensor:
            return False
        x = args[0]
        key = x.shape, x.dtype, output.shape, output.dtype, tuple(call.parameter_names), call.autocast
        if key not in self._fused:
            if len(self._fused) > _MOST_SHAPES:
                self._fused.clear()
            parameters = [value for value in module._parameters.values() if value is not None]
            alike = all(value.dtype == output.dtype and value.device == output.device for value in (*parameters, x))
            trial = call.with_gradient(output.detach())
            self._fused[key] = alike and form.is_worthwhile(trial, fused=True)
        # Another learner, or a user, may wait for the gradient of this output, or have exchanged its node already.
        return self._fused[key] and not output._backward_hooks and not isinstance(output.grad_fn, NODES)

    def _wait_to_run_again(
        self,
        recorder: "Recorder",
        module: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
        trainable: dict[str, str],
        state: BeforeCall,
    ) -> Any:
        """Return a replacement for the output: behind a node each tensor has only the gradient of its users."""
        tape, site = recorder.tape, self.site
        assert tape is not None
        if versions_of(inputs) != state.versions:
            raise UnsupportedLayerError(
                f"'{site.name}' ({type(module).__name__}) changes its input in place, so it cannot be run again. Fix: work on a "
                "copy of the input, or leave the module out with layers=."
            )
        if tape.first_parameters is not None and not any([t.grad_fn is not None for t in tensors_in(inputs)]):
            tape.first_parameters += [p for p in module.parameters() if p.requires_grad]
        outputs = tensors_in(output)
        args, kwargs = detached(inputs if state.inputs is None else state.inputs, recorder.copy_inputs)
        make = BlackBoxCall if site.inner is None else recorder.make_model_call(site)
        call = make(
            name=site.name,
            layer=state.layer,
            parameter_names=trainable,
            args=args,
            kwargs=kwargs,
            autocast=Autocast.current(outputs[0].device.type),
            batch=tape.batch,
            versions=versions_of((args, kwargs)),
            random_state=state.drawn_from(),
            fingerprints=tuple([fingerprint(out) for out in outputs]),
        )
        places = iter(range(len(outputs)))
        stored = {t.untyped_storage().data_ptr() for t in tensors_in(inputs) if t.numel() and not t.is_sparse}

        def exchange(out: Tensor) -> Tensor:
            index = next(places)
            if not out.requires_grad or isinstance(out, nn.Parameter):  # a parameter is followed by itself
                return out
            waiting = tape.wait_for_gradient(self._placed(recorder, call, index, out, inputs[0]))
            # A view of the input: a change in place would change the input without autograd's knowledge.
            if out.untyped_storage().data_ptr() in stored:
                out = out.clone()
            exchanged: Tensor = Identity.apply(Exchange(waiting, out), out)  # type: ignore[no-untyped-call]
            return exchanged

        return tree_map_only(Tensor, exchange, output)

    def _refuse_foreign_parameters(self, module: nn.Module) -> None:
        for value in module._parameters.values():
            if value is None or type(value) is nn.Parameter:
                continue
            if value.grad_fn is not None:
                raise UnsupportedLayerError(
                    f"'{self.site.name}' ({type(module).__name__}) was called with other tensors in place of its parameters "
                    "(functional_call), so its part in their gradients is unknown. Fix: call the operation with these "
                    "tensors (torch.nn.functional), or leave the layer out with layers=."
                )
            if is_sharded(value):
                raise UnsupportedLayerError(
                    f"'{self.site.name}' ({original_type(module).__name__}) computes with parameters that are divided among processes "
                    "(tensor parallelism), which is not supported. Fix: shard with fully_shard, or leave it out with layers=."
                )

    def _refuse_unbatched(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and type(args[0]) is Tensor and args[0].dim() in self._batched_dims:
            return
        tensors = tensors_in((args, kwargs))
        if not tensors:
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called without a tensor, so its output is shared by all examples. "
                "Fix: pass it the batch and return a row for each example (expand), or leave it out with layers=."
            )
        if any(tensor.is_nested for tensor in tensors):
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called with a nested tensor, which is not supported. Fix: pass a padded batch, "
                "as from torch.nested.to_padded_tensor."
            )
        rule = self.site.rule
        dims = 0 if rule is None else rule.example_dims(module)
        dims += 2 if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) else 0
        packed = any(isinstance(value, PackedSequence) for value in args)
        if isinstance(module, nn.RNNBase) and packed:
            return
        if packed or (tensors[0].dim() <= dims and not (rule is None and dims == 0)):
            got = "a packed sequence" if packed else f"an input of shape {tuple(tensors[0].shape)}"
            raise UnsupportedLayerError(
                f"'{self.site.name}' ({type(module).__name__}) was called with {got}; one axis more than the {dims} of a single "
                "example is needed, examples first. Fix: pass a padded batch, x.unsqueeze(0) for a single example."
            )
        if args and args[0] is tensors[0]:
            self._batched_dims.add(args[0].dim())
