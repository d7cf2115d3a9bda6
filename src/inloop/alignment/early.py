"""Align a step while the next gradient forms: its tape shrinks as the next one grows.

Otherwise the tape would stay until the next backward pass ends, on top of all that this pass records. Backward passes
go from the last layer to the first. When the gradients of some layers' parameters have arrived and are final, these layers'
calls of the previous step are aligned with them and released (except modules that are run again, which need a backward
pass of their own). A gradient is final if the step has one backward pass and
nothing changes ``p.grad`` before ``learner.step``. Only this module knows whether that holds:

    unknown ──a step had one backward pass──► on ──a second pass, or a gradient that changed──► off, for good
       └───────────────a step had several──────────────────────────────────────────────────────► off

On a device a call is aligned early only if its gradients arrive on the stream on which the step that waits was finished. Else another stream might
still write what the call has kept, and nodes that add up gradients may stay on a stream of their own, as under DDP.

It is off with several processes or a sharded model, which average gradients after they arrive, and after an abandoned
batch. The first gradient that proves not final costs this step and the one before their rewards; later steps
wait for ``learner.step``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from inloop.alignment.direction import Compute, Direction
from inloop.alignment.groups import Group
from inloop.alignment.kept import Kept
from inloop.alignment.tape import Tape
from inloop.host import current_stream

CHANGED_GRADIENTS = (
    "the gradients changed after the step's first backward pass (by another one, or by scaling or clipping), in which recorded "
    "tensors were released; from now on they are kept until learner.step, which takes more memory"
)


class EarlyAlignment:
    """Decides when to align calls of the waiting tape with the gradients that are forming.

    Attributes:
        state: "unknown", "on" or "off".
        awaited: The calls of the waiting tape, by the parameters whose gradients have not arrived.
    """

    def __init__(self, allowed: bool) -> None:
        self.state: Literal["unknown", "on", "off"] = "unknown" if allowed else "off"
        self._tape: Tape | None = None  # the waiting tape, while this aligns it
        self.awaited: dict[str, list[_Missing]] = {}
        self._gradients: dict[str, Tensor | None] = {}  # those that arrived
        self._ready = Group({})  # calls whose gradients are complete
        self._compute: Compute | None = None
        self._stream: torch.Stream | None = None  # on which the waiting step was finished

    def begin(self, waiting: Tape | None, compute: Compute | None = None) -> None:
        """Begin a step whose gradient will reward the step on the tape ``waiting``, if any.

        Args:
            compute: Changes the gradients before calls are aligned with them.
        """
        self.stop()
        self._compute = compute
        if self.state != "on" or waiting is None or waiting.is_one_group:
            return
        self._tape, self._ready, self._stream = waiting, Group(waiting.plan.sizes), waiting.stream
        for call in waiting.calls:
            if not call.needs_backward:  # a backward pass cannot run inside another
                names = set(call.parameter_names.values())
                missing = _Missing(call, len(names))
                for name in names:
                    self.awaited.setdefault(name, []).append(missing)

    def stop(self) -> None:
        """Stop aligning; the rest of the waiting tape stays as it is."""
        self._tape = None
        self.awaited.clear()
        self._gradients.clear()
        self._ready.take()

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        """Align calls whose gradients are complete, now that a backward pass has finished the one of ``name``."""
        users = self.awaited.pop(name)
        if gradient.is_sparse or current_stream(gradient.device) != self._stream:
            return
        self._gradients[name] = gradient.detach()
        is_full = False
        for missing in users:
            missing.number -= 1
            if not missing.number:
                is_full |= self._ready.add(missing.call)
        if is_full:
            assert self._tape is not None
            self._tape.align_early(self._ready.take(), self._gradients, self._compute)

    def learn_from(self, step: Tape | None, waiting: Tape | None, gradients: Direction) -> str | None:
        """Learn from a complete step. Return a sentence if the released tensors are still needed, else None.

        Args:
            step: The tape of the complete step; None if it was not recorded.
            waiting: The tape of the step that these gradients reward, if any.
        """
        if (step is not None and step.missed_a_pass) or (waiting is not None and waiting.differs_from(gradients)):
            self.state = "off"
            return CHANGED_GRADIENTS
        if step is not None and step.known is None and self.state != "off":
            self.state = "on" if max(step.reached.values(), default=0) == 1 else "off"
        return None

    def turn_off(self) -> None:
        """Turn off: gradients are not final when they arrive (processes average them, or a batch was abandoned)."""
        self.state = "off"


@dataclass(slots=True)
class _Missing:
    """A call, and how many of its parameters have no gradient yet."""

    call: Kept
    number: int
