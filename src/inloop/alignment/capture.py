"""Record one step of a model: the options, :func:`capture` for users, and the recorder for learners."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from inloop.alignment.direction import Direction, gradients_of
from inloop.alignment.plan import LayerFilter, make_plan, warn_of_coupled_examples
from inloop.alignment.probe import find_examples
from inloop.alignment.recorder import Recorder
from inloop.alignment.replay import model_call, whole_site, with_segments
from inloop.alignment.tape import Reduction, Retention, Tape
from inloop.distributed import is_sharded
from inloop.errors import BatchSizeError, UsageError, VerificationError

_RETENTIONS = {
    "exact": "tensors as they are",
    "half": "in float16, each with a scale",
    "recompute": "only the batch and the parameters",
}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What to record of a step, and how to keep it.

    Args:
        reduction: How the back-propagated loss reduces over examples, "mean" or "sum".
        layers: Which layers count: names (each with all below it) or a predicate on (name, module); None for all.
        batchnorm_affine: Whether BatchNorm's own weight and bias count (the paper's authors left them out).
        copy_inputs: Keep copies of the layers' inputs, in case code that torch cannot see writes into them: a buffer of batches that NumPy or
            another process fills again, or ``.data``. Without copies such a step is rewarded wrongly, and nothing notices.
        retain: How to keep recorded tensors: "exact"; "half", in half the memory, as float16 with a scale for each
            tensor (a number loses up to 2**-11 of itself); or "recompute": keep only the model's input and a copy of
            its parameters, and run the step again to align (exact, little memory, about one more forward and backward).
        verify: When to check that the examples add up to every ``p.grad``: True, always; False, never; "first", the
            first two times that a learner sees a kind of step (the second reveals gradients that were not cleared),
            unless it is rewarded in part. :func:`capture` records a single step and checks it, unless this is False.
    """

    reduction: Reduction = "mean"
    layers: LayerFilter | None = None
    batchnorm_affine: bool = False
    copy_inputs: bool = False
    retain: Retention = "exact"
    verify: bool | Literal["first"] = "first"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise UsageError(
                f"reduction={self.reduction!r}: allowed are 'mean' and 'sum', as in the loss that is back-propagated."
            )
        if self.retain not in _RETENTIONS:
            allowed = ", ".join(f"{name!r} ({meaning})" for name, meaning in _RETENTIONS.items())
            raise UsageError(f"retain={self.retain!r}: allowed are {allowed}.")
        if self.verify not in ("first", True, False):
            raise UsageError(f"verify={self.verify!r}: allowed are 'first', True and False.")


@contextmanager
def capture(
    model: nn.Module, record: Recording | None = None, *, num_examples: int | None = None, **options: Any
) -> Iterator[Tape]:
    """Record one forward and backward pass, to align its examples with any direction afterwards.

    Args:
        model: Any module. The first axis of its first input counts the examples; inloop finds them in its layers.
        record: The options of the recording.
        num_examples: How many examples the pass has, if its first input has several rows for each, such as the patches of all images.
        options: Single options of :class:`Recording`, which override those of ``record``.

    Raises:
        UnsupportedLayerError: If a layer with trainable parameters cannot be aligned exactly.
        VerificationError: If the recorded examples do not add up to what the block has added to a ``p.grad``; not with
            ``verify=False``.
        BatchSizeError: If the layers saw another number of examples than the model was given.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> with capture(model, reduction="sum") as tape:
        ...     model(x).sum().backward()
        >>> tape.align({"weight": torch.tensor([[1.0, 10.0]])})
        tensor([ 1., 20.])
    """
    allowed = [field.name for field in fields(Recording)]
    if unknown := sorted(set(options) - set(allowed)):
        raise UsageError(f"capture got {unknown[0]}=; allowed are {', '.join(allowed)}.")
    record = replace(record or Recording(), **options)
    warn_of_coupled_examples(model)
    recorder = make_recorder(model, record)
    before = {name: g.clone() for name, g in gradients_of(model).items() if g is not None and record.verify}
    try:
        tape = recorder.start(record.reduction, magnitudes=bool(record.verify))
        tape.announced = num_examples
        yield tape
        recorder.stop()
        if tape.seen:
            tape.refuse_other_number()
            _refuse_other_number(tape, num_examples)
            if record.verify:
                _verify(tape, gradients_of(model), before)
        tape.own_parameters()
    finally:
        recorder.remove()


def _refuse_other_number(tape: Tape, num_examples: int | None) -> None:
    recorded = sum(tape.batch_sizes().values())
    if num_examples is not None and recorded != num_examples:
        raise BatchSizeError(
            f"capture was given num_examples={num_examples}, and the layers saw {recorded} rows, of which it cannot be told which belong to which "
            "example. Fix: give the layers a row for each example, as in [N, rows, ...], in one call."
        )


def _verify(tape: Tape, gradients: Direction, before: Direction) -> None:
    """Verify the tape with what the block has added to gradients, which it may have cleared first."""
    if any(g is not None and bool(g.any()) for g in before.values()):
        with suppress(VerificationError):
            tape.verify({name: _added(g, before.get(name)) for name, g in gradients.items()})
            return
    tape.verify(gradients)


def _added(gradient: Tensor | None, before: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or before is None else gradient - before


def make_recorder(model: nn.Module, record: Recording, segments: Iterable[str] = ()) -> Recorder:
    """Return a recorder on the layers of a model; each of ``segments``, or a model to recompute, is one layer to it."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError("The model is wrapped in DistributedDataParallel. Fix: record what is inside, model.module.")
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    if record.retain == "recompute" and sharded:
        raise UsageError(
            "retain='recompute' keeps a copy of all parameters, and the model is sharded. Fix: use 'exact' or 'half'."
        )
    plan = make_plan(model, record.layers, record.batchnorm_affine)
    if record.retain == "recompute":
        plan = replace(plan, sites=(whole_site(model, plan),))
    elif not sharded:
        plan = with_segments(model, plan, segments, record.layers, record.batchnorm_affine)
    return Recorder(
        model,
        plan,
        copy_inputs=record.copy_inputs,
        retain=record.retain,
        make_model_call=model_call,
        find_examples=partial(find_examples, plan=plan),
    )
