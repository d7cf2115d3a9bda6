"""Recording: forward hooks that put a hook on each layer's output, which writes to a tape when the gradient arrives.

The tape holds what waits for its gradient, and lets go of it when it is closed. So a forward pass under ``no_grad`` leaves nothing, one that is
never differentiated nothing beyond its step, and an in-place activation after the layer does no harm.
Nothing is written on the user's modules; hooks in a copy of the model do nothing.
"""

import logging
import weakref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inloop.alignment.early import EarlyAlignment
from inloop.alignment.hook import not_compiled, remove_all
from inloop.alignment.layer_hooks import AfterForward, BeforeForward
from inloop.alignment.layout import Layout, Layouts
from inloop.alignment.plan import Plan, Site
from inloop.alignment.probe import layouts_of
from inloop.alignment.recorded_use import record_use
from inloop.alignment.spare import Spare
from inloop.alignment.tape import Reduction, Retention, Tape
from inloop.alignment.trace import Use
from inloop.alignment.twin import reparametrizing_hooks
from inloop.alignment.watch import Watch
from inloop.distributed import is_distributed

log = logging.getLogger("inloop")


class Recorder:
    """The hooks on one model, and the tape that they write to at the moment (None: they do nothing).

    Attributes:
        early: An older tape's alignment with the gradients that are being formed; None if there is none.
        gave_up: Whether the last tape was given up.
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
        self.gave_up = False
        self.early: EarlyAlignment | None = None
        self.plan = plan
        self._spare = Spare()
        self._watch: Watch | None = None
        self._layouts: Layouts = layouts or {}
        handles: list[RemovableHandle] = []
        # A recorder that is simply forgotten takes its hooks along: they know it only weakly.
        self.remove_hooks = weakref.finalize(self, remove_all, handles)
        for site in self.plan.sites:
            before, after = BeforeForward(self, site), AfterForward(self, site)
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
                handle = parameter.register_post_accumulate_grad_hook(_AfterGradient(self, name))
                handles.append(handle)

        if not any(site.rule.visit_layers and not site.name for site in plan.sites):  # the whole model is done again
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
        self.gave_up = False
        self.tape = Tape(self.plan, reduction, self.retain, expect_one_pass, self._spare)
        return self.tape

    def stop(self) -> None:
        """Record nothing more on the current tape, also of backward passes still to come."""
        if self.tape is not None:
            self.tape.close()
            if self._watch is not None and self.tape.calls and not self._watch.is_needed:
                self._layouts = self._watch.layouts
                remove_all(self._watch.handles)
                self._watch = None
        self.tape = None
        if self._watch is not None:
            self._watch.leave_model(entirely=True)  # after an interrupt, to which hooks do not answer
        self._spare.clear()

    def give_up(self) -> None:
        """A parameter was changed between two backward passes of what should be one step: none of it can be relied on, nor need it be kept."""
        log.warning(
            "the model's parameters were changed between two backward passes of what is recorded as one step; it is given up. Fix: with a learner, call "
            "learner.step(loss) before each optimizer.step(), and learner.close() when it is not needed any more (it records again from the next "
            "learner.sample on); with capture, record one step at a time"
        )
        if self.tape is not None:
            self.tape.calls.clear()
        self.stop()
        self.gave_up = True

    def remove(self) -> None:
        self.stop()
        self.early = None
        self.remove_hooks()


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
            if recorder.tape.moved_between_passes(self.name, parameter) and not is_distributed():
                recorder.give_up()  # (several processes might see it differently)
                return
            recorder.tape.passes[self.name] += 1
            recorder.tape.settle()


class _Operations:
    """Hands the uses of parameters outside of layers' calls to the tape of a recorder, which it knows only weakly."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)

    def are_recorded(self) -> bool:
        recorder = self._recorder()
        return recorder is not None and recorder.tape is not None

    def record(self, use: Use, parameters: dict[str, Tensor], key: tuple[str, int]) -> None:
        recorder = self._recorder()
        if recorder is not None and recorder.tape is not None:
            layout = recorder.layouts.get(key, Layout())
            record_use(recorder.tape, use, parameters, layout, recorder.num_examples)
