"""What is tried with each model: a plain step, `inloop.check`, three steps with a learner, and whether its examples interact."""

import copy
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import inloop
from inloop.errors import InloopError

BATCH = 4
SECONDS = 60  # of the processor, for each part of a trial
KEPT = 300  # characters of a message
LARGEST = 1e30
Batch = dict[str, Any]


class Skipped(Exception):
    """A model that cannot be tried, and why."""


class Inputs(Protocol):
    """Makes batches for one model."""

    def __call__(self, seed: int) -> Batch:
        """Random inputs of BATCH examples, by the name of their argument."""

    def learn(self, error: str) -> bool:
        """Whether the message of a failed pass told how to make better ones."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds of the processor, whatever else the machine does."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again each second, in case that it is caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model in training mode, with every probability of dropping something at 0."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model.train()


def outputs(found: Any) -> Iterator[Tensor]:
    """The tensors in a model's output that can be trained. Caches are left out."""
    if isinstance(found, Tensor):
        trains = found.requires_grad or not torch.is_grad_enabled()
        if trains and found.is_floating_point() and found.dim() > 0 and len(found):
            yield found
    elif isinstance(found, Mapping | list | tuple):
        for value in found.values() if isinstance(found, Mapping) else found:
            yield from outputs(value)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """A fixed random projection of all that the model puts out for an example, [N].

    Examples are on the first axis of an output, or, if no output has them there, folded with positions into it.
    """
    found = list(outputs(model(**batch)))
    of_examples = [output for output in found if len(output) == BATCH] or [
        output.unflatten(0, (BATCH, -1)) for output in found if len(output) % BATCH == 0
    ]
    total = torch.zeros(BATCH)
    for index, output in enumerate(of_examples):
        generator = torch.Generator().manual_seed(index)
        weights = torch.randn(output.shape[1:], generator=generator, dtype=torch.float64).to(output)
        finite = output.masked_fill(~(output.abs() < LARGEST), 0.0)  # scores of what is masked are -inf, or as small
        total = total + (finite * weights).reshape(BATCH, -1).sum(1) / math.sqrt(max(weights.numel(), 1))
    if not of_examples:
        raise Skipped("no trainable output belongs to examples")
    return total


def plain_step(model: nn.Module, inputs: Inputs) -> int:
    """A step without inloop; how many parameters get a gradient.

    Raises:
        Skipped: If nothing can be learned from it.
    """
    replica = copy.deepcopy(model)
    batch = _second_try(replica, inputs)
    each = losses(replica, batch)
    if not each.isfinite().all():
        raise Skipped("losses are not finite")
    each.mean().backward()
    gradients = [p.grad for p in replica.parameters() if p.grad is not None]
    if not any(bool(gradient.to_dense().any()) for gradient in gradients):
        raise Skipped("no parameter has a gradient")
    if not all(bool(gradient.to_dense().isfinite().all()) for gradient in gradients):
        raise Skipped("gradients are not finite")
    return sum(bool(gradient.to_dense().any()) for gradient in gradients)


def _second_try(model: nn.Module, inputs: Inputs) -> Batch:
    """A batch that runs; messages about a wrong number of placeholders correct it."""
    for _ in range(6):
        try:
            with torch.no_grad():
                model(**inputs(0))
            break
        except Exception as error:
            if not inputs.learn(str(error)):
                raise
    return inputs(0)


def examples_interact(model: nn.Module, inputs: Inputs) -> tuple[bool, bool]:
    """Whether any example's loss changes with the other examples, and whether losses are random. BatchNorm is in eval mode."""
    replica = copy.deepcopy(model)
    for module in replica.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    mine, others = inputs(0), inputs(1)

    def loss_of(example: int, batch: Batch, seed: int = 0) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            return float(losses(copy.deepcopy(replica), batch)[example])

    def differs(one: float, other: float) -> bool:
        return abs(one - other) > 1e-4 * (abs(one) + 1e-2)

    is_random = differs(loss_of(0, mine), loss_of(0, mine, seed=1))
    interact = False
    for example in range(BATCH):
        mixed = {name: _one_among(example, value, others[name]) for name, value in mine.items()}
        interact = interact or differs(loss_of(example, mine), loss_of(example, mixed))
    return interact and not is_random, is_random


def _one_among(example: int, mine: Any, others: Any) -> Any:
    """One example of a batch and the rest of another; examples may be folded with positions into the first axis."""
    if not isinstance(mine, Tensor) or mine.shape != others.shape or len(mine) % BATCH:
        return mine
    mixed, count = others.clone(), len(mine) // BATCH
    mixed[example * count : (example + 1) * count] = mine[example * count : (example + 1) * count]
    return mixed


def checked(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The result of `inloop.check`."""
    report = inloop.check(model, inputs(0), losses, num_examples=BATCH)
    compared = [row for row in report.rows if row.relative_error is not None]
    error = report.max_relative_error
    result: dict[str, Any] = {
        "status": "exact" if report.ok else "interact" if report.interact else "wrong" if report.rows else "refused",
        "error": None if math.isnan(error) else error,
        "dtype": report.dtype,
        "compared": len(compared),
        "run_again": sum("run again" in row.rule for row in compared),
        "tensors": len(report.rows),
    }
    if not report.ok:
        result |= message_of(report.problems[0])
    return result


def message_of(text: str) -> dict[str, Any]:
    return {"message": " ".join(text.split())[:KEPT], "has_fix": "Fix:" in text}


def tried_with_a_learner(model: nn.Module, inputs: Inputs, steps: int = 3) -> dict[str, Any]:
    """Three steps of AdamW with a learner of two sources, in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learner = inloop.InLoop(model, inloop.MixturePolicy(2), optimizer=optimizer)
    for step in range(steps):
        learner.sample(BATCH)
        loss = losses(model, inputs(step)).mean()
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()
    return {"status": "ok"}


def part(name: str, run: Callable[[], dict[str, Any]], seconds: int = SECONDS) -> dict[str, Any]:
    """One part of a trial under the time limit; errors become a status."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        with time_limit(seconds):
            result = run()
    except InloopError as error:
        result = {"status": "refused", "kind": type(error).__name__} | message_of(str(error))
    except Exception as error:
        result = {"status": "crash", "kind": type(error).__name__} | message_of(f"{type(error).__name__}: {error}")
    return {name: result | {"seconds": round(time.perf_counter() - start, 1)}}
