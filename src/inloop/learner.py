"""The learner: the paper's loop around the user's own.

    step t        a_i ~ p(.; φ_t)              sample
                  g_t = ∇L_t(θ_t)              the user's forward and backward pass, recorded on a tape
                  r_i = <∇l_i(θ_{t-1}), g_t>   step: reward the examples of step t-1 by the gradient of step t,
                  φ_{t+1} <- φ_t               move the policy by sum_i r_i ∇log p(a_i), release the tape of t-1
                  θ_{t+1} <- θ_t               the user's optimizer

g_t is the raw batch gradient: before clipping, weight decay and momentum. So a choice of step t is rewarded in step t+1 and first shows
in what is sampled for step t+2. Recording opens when a batch is announced (``sample``, ``use``) and closes in ``step``.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inloop.alignment import Direction, Recording, Tape, gradients_of
from inloop.distributed import unwrapped, world_size
from inloop.errors import UsageError, VerificationError
from inloop.policies import Actions, Policy
from inloop.randomness import default_generator
from inloop.recording import StepRecorder
from inloop.references import HeldOutLoss, Reference, as_reference
from inloop.refusals import (
    agree,
    as_number,
    gradient_norm,
    refuse_changed_model,
    refuse_cleared_passes,
    refuse_missing_gradients,
    refuse_missing_tape,
    refuse_other_batch_sizes,
    refuse_other_losses,
    refuse_other_parts,
    refuse_state_of_other,
    scale_of,
    warn_of_coupled_examples,
    warn_once,
    what_is_not_finite,
)
from inloop.report import StepReport, describe_collapse, summarise_rewards
from inloop.rewards import Reward, as_reward
from inloop.sampler import Sampler
from inloop.step import Draw, Judge, Step
from inloop.updates import Reinforce, Update, Watch

log = logging.getLogger("inloop")
_STATE = {"policy", "update", "generator", "num_steps", "num_dropped", "draws", "reference", "recording"}


class InLoop:
    """Learns a policy over per-example choices while a model trains.

    Args:
        model: The model in training.
        policy: The distribution to learn.
        reward: "gar" (gradient alignment), "nslr" (next-step loss), "loss" (each example's own, for baselines), or a
            :class:`~inloop.rewards.Reward`.
        reference: What a step is judged by: "next" (the next step, as in the paper), "previous" (the step before), a
            function that returns a scalar loss on held-out data, evaluated at the parameters after the step, or a
            :class:`~inloop.references.Reference`.
        update: How the policy learns: an :class:`~inloop.updates.Update`; None for :class:`~inloop.updates.Reinforce` as in the paper (a policy
            without parameters stays as it is); False to watch the rewards without moving the policy.
        interleave: Let every second step use the policy's neutral choices (for a mixture all sources alike, the bad ones, too, which
            makes them harder to find; for augmentation no operation); such a step judges the one before it, trains the
            model like any other, and is not rewarded itself.
        part: The share of each batch's examples that are rewarded, chosen at random; all train the model. What is kept of a step, and the time
            that its rewards take, shrink with it; the policy's gradient has the same expectation, and 1 / part times the variance. Steps
            that are verified are rewarded whole.
        record: What is recorded of a step, how it is kept, and when it is verified; see :class:`inloop.Recording`.
        generator: The source of all sampling; by default one that follows torch's seed. (Learners that are made after one ``torch.manual_seed`` draw
            alike: for repeats in one process, seed before each, or give generators.)
        callback: Called with each step's :class:`~inloop.report.StepReport`; one, or a list of them.

    Attributes:
        policy: The distribution that is learned.
        num_steps: Steps so far.
        update: What moves the policy; its ``version`` counts the updates.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        *,
        reward: Literal["gar", "nslr", "loss"] | Reward = "gar",
        reference: Literal["next", "previous"] | HeldOutLoss | Reference = "next",
        update: Update | Literal[False] | None = None,
        interleave: bool = False,
        part: float = 1.0,
        record: Recording | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[StepReport], None] | Sequence[Callable[[StepReport], None]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(policy, Policy):
            got = f"InLoop({type(model).__name__}, {type(policy).__name__})"
            raise UsageError(
                f"{got}: the first argument is the model, an nn.Module, the second the policy, an inloop.Policy."
            )
        self.callbacks = callback if isinstance(callback, Sequence) else [] if callback is None else [callback]
        if not all(map(callable, self.callbacks)):
            raise UsageError(f"callback={callback!r}: allowed are a function of a StepReport, and a list of them.")
        if not 0 < part <= 1:
            raise UsageError(f"part={part}: allowed are numbers above 0, up to 1.")
        record = record or Recording()
        self.model = model = unwrapped(model)
        self.policy = policy
        self.reward = as_reward(reward)
        _refuse_useless_options(self.reward, part, record)
        self.reference = as_reference(reference)
        self.reference.attach(model, self.reward)
        self.update = _as_update(update, policy)
        self.update.attach(policy, self.reward)
        self.interleave = interleave
        self.part = part
        self.num_steps = 0
        self.num_dropped = 0
        self._sampler = Sampler(policy, generator or default_generator("sampling of actions"))
        self._dropped_in_a_row = 0
        self._abandoned_in_a_row = 0
        self._rewarded_since_saved = True
        self._was_collapsing = False
        self._num_pauses = 0
        self._closed = False
        early = self.reward.may_align_early() and self.reference.is_next_gradient
        self._recorder = StepRecorder(model, record, self.reward.needs_tape, early)
        if self.reward.needs_tape:
            warn_of_coupled_examples(model)

    # ---------------------------------------------------------------- the two calls of a training loop

    def sample(self, n: int) -> Actions:
        """Choose for the ``n`` examples of the next (micro-)batch, and begin to record it. Call it once before each micro-batch."""
        draw = self.draw(n, plain=self.interleave and self.num_steps % 2 == 1)
        self.use(draw)
        return draw.actions

    def step(
        self,
        loss: Tensor | float,
        scaler: torch.amp.GradScaler | None = None,
        losses: Tensor | None = None,
    ) -> StepReport:
        """Reward the step before by this step's gradient. Call it after ``backward``, before clipping and the optimizer.

        Args:
            loss: This step's loss.
            scaler: That the loss was scaled with before ``backward``, so that rewards are those of the loss itself. A step that it
                will skip, for gradients that are not finite, is dropped here, too.
            losses: Of each example, [N]; for the reward "loss".

        Raises:
            UsageError: Without actions, or without gradients.
            BatchSizeError: If there are more or fewer actions than examples.
            VerificationError: If the recorded examples do not add up to a gradient. The learner is closed then.
        """
        self._refuse_if_closed()
        if self._num_pauses:
            raise UsageError("learner.step was called inside learner.paused(). Fix: leave the block first.")
        scale = scale_of(scaler)
        draws = self._sampler.of_step()
        try:
            report = self._step(as_number(loss), draws, scale, losses)
        except VerificationError as error:
            self.close()
            raise VerificationError(f"{error} The learner has been closed.") from None
        except BaseException:
            self.reference.drop()
            self.skip()
            raise
        self._abandoned_in_a_row = 0
        self._sampler.waiting = []
        for call in self.callbacks:
            call(report)
        return report

    def _step(self, loss: float, draws: list[Draw], scale: float, losses_N: Tensor | None) -> StepReport:
        gradients = gradients_of(self.model)
        norm = gradient_norm(gradients)
        tape = self._finish_recording(draws, gradients, norm)
        refuse_other_losses(losses_N, draws)
        step = Step(draws, tape, None if losses_N is None else losses_N.detach(), scale)
        verify = self._recorder.wants_verification(tape)
        agreed = agree(loss, norm, verify, self.num_steps, self._sampler.shared(draws) if world_size() > 1 else ())
        self.num_steps += 1
        lag = max([self.update.version - draw.version for draw in draws])
        problem = what_is_not_finite(self.model, agreed.loss, gradients, agreed.norm)
        waiting = None if self.reference.waiting is None else self.reference.waiting.tape
        if problem is None:
            problem = self._recorder.problem_of(tape, waiting, gradients, agreed.verifies)
        if problem:
            self.reference.drop()
            step.release()
            return self._report(lag, dropped=problem)
        rewarded, judge = self.reference.match(step, Judge(gradients, agreed.loss, scale))
        if tape is not None:
            tape.own_parameters()
        if rewarded is None or not rewarded.draws or not any([draw.num_everyone for draw in rewarded.draws]):
            return self._report(lag)
        return self._report(lag, **self._reward(rewarded, judge))

    def _reward(self, step: Step, judge: Judge) -> dict[str, Any]:
        """Reward the examples of a step, and move the policy; returns what to report of it."""
        rewards_N = step.gather_rewards(self.reward(step, judge))
        step.release()
        self._rewarded_since_saved = True
        if not bool(rewards_N.isfinite().all()):
            return {"dropped": "a reward is not finite"}
        updated = self.update.add(step.draws, rewards_N)
        return {"updated": updated, **summarise_rewards(self.policy, step.draws, rewards_N)}

    def _report(self, lag: int, dropped: str | None = None, **rewards: Any) -> StepReport:
        self._dropped_in_a_row = 0 if dropped is None else self._dropped_in_a_row + 1
        if dropped is not None:
            self.num_dropped += 1
            if _is_power_of_two(self._dropped_in_a_row):
                log.warning(
                    "inloop: step %d: %s; dropped (%d so far), the policy stays",
                    self.num_steps,
                    dropped,
                    self.num_dropped,
                )
        report = StepReport(
            step=self.num_steps,
            lag=lag,
            dropped=dropped,
            num_dropped=self.num_dropped,
            probabilities=self.policy.probabilities(),
            **rewards,
        )
        # A judge that is not drawn from the mixture does not agree with itself: a source that it gives everything to may deserve it.
        may_collapse = self.reference.is_training_data and not isinstance(self.update, Watch)
        collapsing = may_collapse and report.collapsing
        if collapsing and not self._was_collapsing:
            log.warning("inloop: step %d: %s", self.num_steps, describe_collapse(report.shares))
        self._was_collapsing = collapsing
        return report

    def _finish_recording(self, draws: list[Draw], gradients: Direction, norm: float) -> Tape | None:
        """Take the step's tape, if it has one, and refuse what cannot be a training step."""
        refuse_changed_model(self._recorder.plan, gradients)
        plain = all([draw.plain for draw in draws])
        tape = None if plain else self._recorder.tape
        self._recorder.close()
        refuse_missing_gradients(tape, gradients, norm)
        if self.reward.needs_tape and not plain:
            refuse_missing_tape(tape)
        if tape is not None:
            refuse_cleared_passes(tape)
            refuse_other_batch_sizes(tape, draws)
            refuse_other_parts(tape, draws)
            tape.mean_over = sum([draw.num_everyone for draw in draws]) / world_size()
        if self._recorder.optimizer_stepped and not self.reference.is_training_data:
            warn_once(
                "the model's parameters changed between the backward pass and learner.step, so the held-out loss is not that of the step it judges. "
                "Fix: call learner.step(loss) before optimizer.step()"
            )
        return tape

    # ---------------------------------------------------------------- batches that are chosen ahead, or given up

    def draw(self, n: int, plain: bool = False) -> Draw:
        """Choose for ``n`` examples that are used later: for loaders that work ahead.

        Args:
            plain: Draw the policy's neutral choices, for the plain steps of interleaving.
        """
        self._refuse_if_closed()
        return self._sampler.draw(n, self.update.version, plain)

    def use(self, draw: Draw | Actions) -> None:
        """The next (micro-)batch that is trained on is the one that was chosen by ``draw``: record it.

        Args:
            draw: From :meth:`draw`; or actions that were chosen elsewhere, which count as drawn by the policy as it is now.
        """
        self._refuse_if_closed()
        if not isinstance(draw, Draw):
            draw = self._sampler.chosen_elsewhere(draw, self.update.version)
        if self._recorder.is_open and self._recorder.was_abandoned():
            self._abandoned_in_a_row += 1
            repeated = self._abandoned_in_a_row > 1 and _is_power_of_two(self._abandoned_in_a_row)
            log.log(
                logging.WARNING
                if repeated
                else logging.INFO,  # one batch may be given up; a second in a row has its reason
                "inloop: gradients were cleared, or used by the optimizer, without learner.step (%d time(s) in a row); their draws are "
                "dropped. Fix: call learner.step(loss) after loss.backward(), before the optimizer",
                self._abandoned_in_a_row,
            )
            self._recorder.early.turn_off()  # the next such pass costs no rewards
            self.skip()
        if self.part < 1 and not draw.plain and self._recorder.may_record_less():
            draw = self._sampler.choose_rewarded(draw, self.part)
        self._announce(draw)

    def _announce(self, draw: Draw) -> None:
        """Open the recording of a step, if this is the first of its draws, and expect the draw's batch."""
        if not self._recorder.is_open:
            self._recorder.open(None if self.reference.waiting is None else self.reference.waiting.tape)
        self._sampler.waiting.append(draw)
        if draw.plain:
            self._recorder.expect_plain()
        self._recorder.expect(len(self._sampler.waiting) - 1, draw.rewarded_here)

    @property
    def loss_weight(self) -> float:
        """What to multiply the mean loss of this (micro-)batch with if processes have different numbers of examples, else 1.

        Processes average their gradients, so an example of a small part would count for more than one of a large. With this
        weight the average is that of the mean over all examples.
        """
        draw = self._sampler.waiting[-1] if self._sampler.waiting else None
        return 1.0 if draw is None or not draw.num_everyone else world_size() * draw.num_examples / draw.num_everyone

    @property
    def num_waiting(self) -> int:
        """How many draws were announced by ``sample`` or ``use`` and have not been used by a step yet."""
        return len(self._sampler.waiting)

    def skip(self) -> None:
        """Forget what was sampled and recorded since the last step.

        After a backward pass the step before goes unrewarded: that pass was to judge it, and has done so in part.
        """
        waiting = self.reference.waiting
        if waiting is not None and waiting.tape is not None and waiting.tape.begun:
            log.info("inloop: step %d is not rewarded, since the batch after it was skipped", self.num_steps)
            self.reference.drop()
        self._recorder.close()
        self._sampler.waiting = []

    # ---------------------------------------------------------------- lifetime and state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward and backward passes in this block leave no trace, and the step that waits to be rewarded goes on waiting."""
        self._num_pauses += 1
        try:
            with self._recorder.paused():
                yield
        finally:
            self._num_pauses -= 1

    def close(self) -> None:
        """Take all hooks off the model and free what is held. The policy stays as it is."""
        self._closed = True
        self._recorder.remove()
        self.reference.detach()
        self.update.detach()
        self._sampler.waiting = []

    def __repr__(self) -> str:
        names = type(self.model).__name__, type(self.policy).__name__, type(self.reward).__name__
        return f"InLoop({', '.join(names)}: {self.num_steps} steps, {self.update.version} updates of the policy)"

    def __reduce__(self) -> Any:
        raise UsageError(
            "A learner cannot be copied or pickled: it has hooks on its model. Fix: save learner.state_dict(), and load it into a new "
            "InLoop. (The model can be copied and pickled; copies have no learner.)"
        )

    def __enter__(self) -> "InLoop":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError("This learner is closed. Fix: make a new InLoop for the model.")

    def state_dict(self) -> dict[str, Any]:
        """Everything that continuing needs, as plain tensors and numbers.

        The step that waits to be rewarded is dropped, here and now: its tape is as large as the activations of a step. As the run that
        goes on drops it too, it and a run continued from this state are equal bit for bit.
        """
        if self.reference.waiting is not None:
            if not self._rewarded_since_saved:
                log.warning(
                    "inloop: state_dict() drops the step that waits to be rewarded; called after every step, nothing is ever rewarded"
                )
            self._rewarded_since_saved = False
            self._recorder.early.stop()
            self.reference.drop()
        return {
            "policy": {name: value.clone() for name, value in self.policy.state_dict().items()},
            "update": self.update.state_dict(),
            "generator": self._sampler.generator.get_state(),
            "num_steps": self.num_steps,
            "num_dropped": self.num_dropped,
            "draws": [draw.state_dict() for draw in self._sampler.waiting],
            "recording": self._recorder.state_dict(),
            "reference": self.reference.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a step that waits here is dropped."""
        if missing := _STATE - set(state):
            raise UsageError(
                f"This is no state of an InLoop learner: it has no {sorted(missing)}; it has {sorted(state)[:5]}."
            )
        refuse_state_of_other(self.policy, state["policy"])
        # What is likely to fail comes first, so that a state that does not fit changes nothing.
        draws = [Draw.restored(self.policy, saved) for saved in state["draws"]]
        self.skip()
        self._recorder.load_state_dict(state["recording"])
        self.policy.load_state_dict(state["policy"])
        self.update.load_state_dict(state["update"])
        self._sampler.generator.set_state(state["generator"])
        self.num_steps, self.num_dropped = state["num_steps"], state["num_dropped"]
        self.reference.drop()
        self.reference.load_state_dict(state["reference"])
        self._sampler.forget_copy()
        for draw in draws:
            self._announce(draw)


def _as_update(update: Update | Literal[False] | None, policy: Policy) -> Update:
    if update is None:
        return Reinforce() if any(True for _ in policy.parameters()) else Watch()
    if update is False:
        return Watch()
    if not isinstance(update, Update):
        raise UsageError(f"update={update!r}: allowed are an inloop.updates.Update, False (watch only) and None.")
    return update


def _refuse_useless_options(reward: Reward, part: float, record: Recording) -> None:
    """Raise for options that are about recorded layers if the reward makes no use of these."""
    if reward.needs_tape:
        return
    default = Recording()
    given = ["part"] if part < 1 else []
    given += [f.name for f in fields(record) if getattr(record, f.name) != getattr(default, f.name)]
    if useless := [name for name in given if name not in ("verify", "reduction")]:
        raise UsageError(
            f"{useless[0]}= is about recorded layers, of which {type(reward).__name__} makes no use. Fix: leave it out, or use reward='gar'."
        )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
