"""Recording a model's step: what a user calls, and what a learner makes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from inloop.alignment.direction import gradients_of
from inloop.alignment.plan import LayerFilter, make_plan
from inloop.alignment.recorder import Recorder
from inloop.alignment.replay import replayed_site
from inloop.alignment.segments import with_segments
from inloop.alignment.tape import Reduction, Retention, Tape, check_retention
from inloop.distributed import is_sharded
from inloop.errors import UsageError


@contextmanager
def capture(
    model: nn.Module,
    reduction: Reduction = "mean",
    layers: LayerFilter | None = None,
    *,
    batchnorm_affine: bool = False,
    copy_inputs: bool = False,
    retain: Retention = "exact",
    verify: bool = False,
) -> Iterator[Tape]:
    """Record one forward and backward pass, to align its examples with any direction afterwards.

    Args:
        model: Any module. The first axis of its first input counts the examples; where they are in its layers is found out.
        reduction: How the loss that is back-propagated reduces over examples, "mean" or "sum".
        layers: Which layers count: names (each with all below it) or a predicate on (name, module); None for all.
        batchnorm_affine: Whether BatchNorm's own weight and bias count (the paper's authors left them out).
        copy_inputs: Keep copies of the layers' inputs, for writers that torch cannot see.
        retain: How to keep what is recorded: "exact"; in "half" the memory, as float16 with a scale for each tensor (a number
            loses up to 2**-11 of itself); or "recompute": only the model's input and a copy of its parameters, from which the step is
            done again when it is aligned (exact, little memory, about a forward and a backward pass more).
        verify: Check at the end that the examples add up to every ``p.grad`` (which must have been empty before).

    Raises:
        UnsupportedLayerError: If a layer with trainable parameters cannot be aligned exactly.
        VerificationError: With ``verify``, if a parameter's gradient is not the sum of the recorded examples.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> with capture(model, reduction="sum") as tape:
        ...     model(x).sum().backward()
        >>> tape.align({"weight": torch.tensor([[1.0, 10.0]])})
        tensor([ 1., 20.])
    """
    recorder = make_recorder(model, layers, batchnorm_affine=batchnorm_affine, copy_inputs=copy_inputs, retain=retain)
    try:
        tape = recorder.start(reduction)
        yield tape
        recorder.stop()
        if verify:
            tape.verify(gradients_of(model))
        tape.own_parameters()
    finally:
        recorder.remove()


def make_recorder(
    model: nn.Module,
    layers: LayerFilter | None = None,
    *,
    batchnorm_affine: bool = False,
    copy_inputs: bool = False,
    retain: Retention = "exact",
    segments: Iterable[str] = (),
) -> Recorder:
    """A recorder on the layers of a model; to recompute, on the model as a whole; on ``segments`` that are checkpointed, as a whole, too."""
    check_retention(retain)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError("The model is wrapped in DistributedDataParallel. Fix: record what is inside, model.module.")
    if retain == "recompute" and any(is_sharded(parameter) for parameter in model.parameters()):
        raise UsageError(
            "retain='recompute' keeps a copy of all parameters, and the model is sharded. Fix: use 'exact' or 'half'."
        )
    plan = make_plan(model, layers, batchnorm_affine)
    if retain == "recompute":
        plan = replace(plan, sites=(replayed_site(model, plan),))
    elif not any(is_sharded(parameter) for parameter in model.parameters()):
        plan = with_segments(model, plan, segments, layers, batchnorm_affine)
    return Recorder(model, plan, copy_inputs=copy_inputs, retain=retain)
