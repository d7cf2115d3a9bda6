"""What must hold of a training step before it is rewarded or judges another; errors that name the fix where it does not."""

import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from inloop.alignment import Direction, Recording, Tape
from inloop.alignment.plan import Plan
from inloop.distributed import gather_numbers, is_distributed, is_sharded, own_part, whole
from inloop.errors import BatchSizeError, UsageError
from inloop.many import are_small, joined
from inloop.policies import Policy, SourceInfo, source_policy
from inloop.rewards import Reward
from inloop.step import Draw
from inloop.updates import Update
from inloop.warn import warn_once

log = logging.getLogger("inloop")


def refuse_wrong_arguments(
    model: object, policy: object, callbacks: Sequence[object], part: object, record: object, generator: object
) -> None:
    """Raise unless a learner can be made of these."""
    if not isinstance(model, nn.Module) or not isinstance(policy, Policy):
        got = f"InLoop({type(model).__name__}, {type(policy).__name__})"
        raise UsageError(
            f"{got}: the first argument is the model, an nn.Module, the second the policy, an inloop.Policy."
        )
    if not all(map(callable, callbacks)):
        raise UsageError(f"callback={callbacks!r}: allowed are a function of a StepReport, and a list of them.")
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise UsageError(f"part={part!r}: allowed are numbers above 0, up to 1.")
    if not isinstance(record, Recording):
        raise UsageError(f"record={record!r}: allowed is an inloop.Recording, as in Recording(retain='half').")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UsageError(
            f"generator={generator!r}: allowed is a torch.Generator, as in torch.Generator().manual_seed(0)."
        )


def as_scalar(loss: Tensor | float) -> Tensor:
    """A scalar loss, wherever it is."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UsageError(
                f"learner.step was given a loss of shape {tuple(loss.shape)}; the step's scalar loss is needed."
            )
        return whole(loss.detach()).reshape(())
    if not isinstance(loss, int | float):
        raise UsageError(
            f"learner.step was given a loss that is a {type(loss).__name__}; a number is needed, or a tensor with one. Fix: of a model's output give "
            "output.loss."
        )
    return torch.tensor(float(loss), dtype=torch.float64, device="cpu")


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """What a scaler has multiplied the loss with."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise UsageError(f"scaler is a {type(scaler).__name__}; allowed are None and a torch.amp.GradScaler.")
    if scaler is None or not scaler.is_enabled():
        return 1.0
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    if any(getattr(state.get("stage"), "name", "READY") != "READY" for state in states):
        raise UsageError(
            "learner.step(loss, scaler=scaler) was called after scaler.unscale_ or scaler.step, which change the gradients. Fix: call "
            "it right after scaler.scale(loss).backward()."
        )
    return float(scaler.get_scale())


def gradient_norm(gradients: Direction) -> Tensor:
    """‖g‖ over all parameters, where they are: one pass that shows gradients that are gone (zero) or broken (not finite)."""
    plain: list[Tensor] = []
    sharded: list[Tensor] = []
    for gradient in gradients.values():
        if gradient is not None:
            values = _values(gradient) if gradient.is_sparse else gradient
            (sharded if type(values) is not Tensor and is_sharded(values) else plain).append(values)
    if not sharded and len({(values.device, values.dtype) for values in plain}) == 1:
        values = joined(plain) if are_small(plain) else torch.stack(torch._foreach_norm(plain))
        norm: Tensor = torch.linalg.vector_norm(values)
        return norm  # get_total_norm takes twice the time
    norms = [whole(get_total_norm(group)) for group in (plain, sharded) if group]
    return norms[0] if len(norms) == 1 else torch.tensor(math.hypot(*map(float, norms)), device="cpu")


def are_gone(tape: Tape | None, gradients: Direction) -> bool:
    """Whether there is no gradient that is not exactly zero, though the recorded passes had one (dead units leave one that is)."""
    if any(g is not None and bool(own_part(_values(g)).any()) for g in gradients.values()):
        return False
    return tape is None or not tape.is_zero()


def refuse_changed_model(plan: Plan, gradients: Direction) -> None:
    """Raise if parameters have come or gone since the learner was made."""
    if changed := sorted(gradients.keys() ^ plan.shapes.keys()):
        raise UsageError(
            f"The model has changed since the learner was made: '{changed[0]}' is {'new' if changed[0] in gradients else 'gone'}. Fix: make a new InLoop "
            "for it, with the same policy."
        )


def refuse_missing_gradients(tape: Tape | None, gradients: Direction, norm: float | None = None) -> None:
    """Raise unless a backward pass has left gradients and, if ``tape`` is given, records.

    Args:
        norm: Of the gradients; None if it is not known yet.
    """
    recorded = tape is not None and bool(tape.seen)
    is_zero = norm == 0 or all(gradient is None for gradient in gradients.values())
    if tape is not None and recorded and is_zero and are_gone(tape, gradients):
        raise UsageError(
            "A backward pass was recorded but the gradients are gone: they were cleared before learner.step. "
            "Fix: call optimizer.zero_grad() after learner.step(loss) and optimizer.step(). (Optimizers that step within the backward "
            "pass leave no gradients to align with, and are not supported.)"
        )
    if all(gradient is None for gradient in gradients.values()):
        raise UsageError(
            "learner.step was called but no parameter of the model has a gradient. Fix: call loss.backward() before it, "
            "on the model that the learner has."
        )
    if tape is not None and not recorded:
        raise UsageError(
            "No layer of the model took part in a recorded forward and backward pass since the last step. Fix: run both "
            "between learner.sample(n) and learner.step(loss), outside learner.paused(), on the model that the learner has."
        )


def refuse_late_step() -> None:
    raise UsageError(
        "learner.step was called after optimizer.step, but with optimizer= the rewards need the optimizer's state of the step before. Fix: call "
        "learner.step(loss) between loss.backward() and optimizer.step()."
    )


def refuse_missing_tape() -> None:
    raise UsageError(
        "This step was not recorded, since a plain step was sampled before it was trained on. Fix: with interleave=True call "
        "learner.sample(n) right before each batch, or draw ahead with learner.draw and learner.use."
    )


def warn_of_late_held_out_loss() -> None:
    warn_once(
        "the model's parameters changed between the backward pass and learner.step, so the held-out loss is not that of the step it judges. "
        "Fix: call learner.step(loss) before optimizer.step()"
    )


def refuse_other_recordings(tape: Tape, draws: Sequence[Draw]) -> None:
    """Raise unless the tape has the examples of the draws, each once, in their order."""
    _refuse_cleared_passes(tape)
    _refuse_other_batch_sizes(tape, draws)
    _refuse_other_rows(tape, draws)


def _refuse_cleared_passes(tape: Tape) -> None:
    """Raise if gradients were cleared between the backward passes of one step: the first of them are not in the gradient."""
    if tape.lost_gradients:
        raise UsageError(
            "The gradients were cleared between two backward passes of one step (as by LBFGS, which runs its closure several times, or by a "
            "batch that was given up). Fix: put all passes but the one that counts into `with learner.paused():`, call learner.skip() after a "
            "batch that was given up, and learner.step(loss) before each optimizer.step()."
        )


def _refuse_other_batch_sizes(tape: Tape, draws: Sequence[Draw]) -> None:
    """Raise unless there is one action for each example."""
    tape.refuse_other_number()
    chosen, seen = [draw.num_examples for draw in draws], list(tape.batch_sizes().values())
    passes = max(tape.reached.values(), default=1)
    often = f" in {passes} backward passes" if passes > len(seen) else ""
    if len(seen) == len(chosen) and all(s > c > 0 == s % c for s, c in zip(seen, chosen, strict=True)):
        raise BatchSizeError(
            f"The actions are for {chosen} example(s), and the layers saw {seen} rows, of which it cannot be told which belong to which example. "
            "Fix: give the layers a row for each example, as in [N, rows, ...]; or if each row is an example by itself, choose for each, with "
            "learner.sample(rows)."
        )
    if sum(seen) != sum(chosen) or (len(seen) == len(chosen) and seen != chosen):
        raise BatchSizeError(
            f"The actions are for {chosen} example(s), the model saw {seen} (one number a micro-batch){often}. There must be one "
            "action for each example, in order. Fix: call learner.sample(n) once before each micro-batch, with its size; for "
            "batches that are chosen ahead, use learner.draw(n) and call learner.use(draw) right before each is trained on; after a batch that was "
            "given up, call learner.skip()."
        )


def _mark(tensors: Sequence[Tensor]) -> float:
    """A number that differs if any of the tensors does; a float64 holds it exactly."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return float(int.from_bytes(digest.digest()[:6], "little"))


def _refuse_other_rows(tape: Tape, draws: Sequence[Draw]) -> None:
    """Raise if other examples were recorded than will be rewarded."""
    if not tape.part and not any([draw.rewarded_rows is not None for draw in draws]):
        return
    batches = sorted({call.batch for call in tape.seen})
    parts = [tape.part.get(batch) for batch in batches]
    rows = [draw.rewarded_here for draw in draws]
    if len(parts) != len(rows) or not all(_same_rows(*pair) for pair in zip(parts, rows, strict=True)):
        raise UsageError(
            "With part= below 1, batches must be trained on in the order in which they were sampled, each before the next is sampled, and with "
            "the actions that were sampled. Fix: for batches that are chosen ahead, use learner.draw(n) and call learner.use(draw) right before "
            "each is trained on."
        )


def refuse_useless_options(reward: Reward, part: float, record: Recording) -> None:
    """Raise for options that are about recorded layers if the reward makes no use of these."""
    default = Recording()
    given = ["part"] if part < 1 else []
    given += [f.name for f in fields(record) if getattr(record, f.name) != getattr(default, f.name)]
    if not reward.needs_tape and (useless := [name for name in given if name not in ("verify", "reduction")]):
        raise UsageError(
            f"{useless[0]}= is about recorded layers, of which {type(reward).__name__} makes no use. Fix: leave it out, or use reward='gar'."
        )


def refuse_other_state(policy: Policy, update: Update, state: Mapping[str, Any], needed: Collection[str]) -> None:
    """Raise unless a state is one of a learner with such a policy and update rule.

    Args:
        needed: The entries of a learner's state.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"This is no state of an InLoop learner but a {type(state).__name__}.")
    if missing := set(needed) - set(state):
        raise UsageError(
            f"This is no state of an InLoop learner: it has no {sorted(missing)}; it has {sorted(state)[:5]}."
        )
    if others := sorted(map(str, set(state) - set(needed))):
        raise UsageError(
            f"The state cannot be loaded: it has {', '.join(others[:5])}, of which this learner knows nothing. Fix: load it with the version that saved it, "
            "or with the same policy and options."
        )
    if others := sorted(name for name in needed if name != "num_steps" and not isinstance(state[name], Mapping)):
        raise UsageError(
            f"The state cannot be loaded: {others[0]} is a {type(state[others[0]]).__name__}; needed is a dict."
        )
    if others := sorted(name for name, value in state["policy"].items() if not isinstance(value, Tensor)):
        raise UsageError(f"The state cannot be loaded: policy.{others[0]} is no tensor.")
    ours = {name: list(value.shape) for name, value in policy.state_dict().items()}
    theirs = {name: list(value.shape) for name, value in state["policy"].items()}
    if ours != theirs:
        raise UsageError(
            f"The state is of a policy with {theirs}; this one, a {type(policy).__name__}, has {ours}. Fix: make the policy as it was when the "
            "state was saved."
        )
    names, own = state.get("statistics", {}).get("names"), getattr(source_policy(policy), "sources", None)
    if isinstance(names, list) and isinstance(own, SourceInfo) and names != own.names:
        raise UsageError(
            f"The state is of the sources {', '.join(map(str, names))}; the policy has {', '.join(own.names)}. Fix: give the same sources in the same order."
        )
    if state["update"].keys() != update.state_dict().keys():
        raise UsageError(
            f"The state is of another update rule than {type(update).__name__}. Fix: give the learner the same."
        )


def _same_rows(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def what_is_not_finite(model: nn.Module, loss: float, gradients: Direction, norm: float) -> str | None:
    """The reason to drop a step, or None."""
    if not math.isfinite(loss):
        broken = [name for name, p in model.named_parameters() if not bool(own_part(p.detach()).isfinite().all())]
        more = f" and {len(broken) - 1} more" if broken[1:] else ""
        where = f"; parameter '{broken[0]}'{more} is not finite, so no later loss will be" if broken else ""
        return f"the loss is {loss}{where}"
    if not math.isfinite(norm):  # or finite entries with squares that are not
        values = ((name, own_part(_values(g))) for name, g in gradients.items() if g is not None)
        name = next((name for name, part in values if not bool(part.isfinite().all())), None)
        if gather_numbers(name is not None).any():
            return f"the gradient of '{name}' is not finite" if name else "a gradient is not finite in another process"
    return None


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all processes must take the same decisions by.

    Attributes:
        loss: The mean of their losses, which is the loss whose gradient they have.
        norm: Of that gradient.
        verifies: Whether one of them sees a kind of step that is to be verified.
    """

    loss: float
    norm: float
    verifies: bool


def agree(loss: float, norm: float, verifies: bool, num_steps: int, shared: Sequence[Tensor]) -> Agreement:
    """Let all processes know of each other's loss, gradient and wish to verify.

    Args:
        shared: What must be equal in all of them: the policy, the random state, the draws.

    Raises:
        UsageError: If they are at different steps, or something of that differs.
    """
    if not is_distributed():
        return Agreement(loss, norm, verifies)
    everyone = gather_numbers(loss, norm, verifies, num_steps, _mark(shared))
    if not bool((everyone[:, 3:] == everyone[0, 3:]).all()):
        raise UsageError(
            f"The processes' learners are not at one: they have done {[int(n) for n in everyone[:, 3].tolist()]} steps, and their policies, random "
            f"states, draws and what is told of them are {'' if bool((everyone[:, 4] == everyone[0, 4]).all()) else 'not '}the same. Fix: call sample, step, "
            "skip and load_state_dict in all of them alike."
        )
    return Agreement(float(everyone[:, 0].mean()), float(everyone[:, 1].max()), bool(everyone[:, 2].any()))


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
