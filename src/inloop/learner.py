"""The learner: the paper's loop around the user's own.

    step t        a_i ~ p(.; φ_t)              sample
                  g_t = ∇L_t(θ_t)              the user's forward and backward pass, recorded on a tape
                  r_i = <∇l_i(θ_{t-1}), g_t>   step: pay the examples of step t-1 with the gradient of step t,
                  φ_{t+1} <- φ_t               move the policy by sum_i r_i ∇log p(a_i), free the tape of t-1
                  θ_{t+1} <- θ_t               the user's optimizer

To *pay* a step is to give its examples their rewards. g_t is the raw batch gradient: before clipping, weight decay and
momentum. So a choice of step t is paid in step t+1 and first shows in what is sampled for step t+2.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inloop.alignment import Direction, Tape, gradients_of
from inloop.alignment.capture import make_recorder
from inloop.alignment.plan import LayerFilter
from inloop.alignment.tape import Reduction, Retention, check_reduction
from inloop.distributed import unwrapped, world_size
from inloop.draws import Draw, DrawnStep
from inloop.errors import UsageError, VerificationError
from inloop.pending import Pending
from inloop.policies import Actions, FixedMixture, Policy
from inloop.randomness import default_generator
from inloop.recording import CHANGED_GRADIENTS, Recording
from inloop.reinforce import make_updater
from inloop.report import StepReport, describe_collapse, summarise_rewards
from inloop.rewards import Normalisation, Reference, Reward, as_reward, check_options
from inloop.sampler import Sampler
from inloop.step_checks import (
    Verifier,
    agree,
    as_number,
    gradient_norm,
    refuse_changed_model,
    refuse_missing_gradients,
    refuse_missing_tape,
    refuse_other_batch_sizes,
    refuse_other_losses,
    refuse_other_parts,
    refuse_state_of_other,
    scale_of,
    warn_of_coupled_examples,
    what_is_not_finite,
)

log = logging.getLogger("inloop")
_STATE = {"policy", "updater", "generator", "num_steps", "num_dropped", "draws", "previous", "pending", "recording"}


class InLoop:
    """Learns a policy over per-example choices while a model trains.

    Args:
        model: The model in training.
        policy: The distribution to learn.
        reward: "gar" (gradient alignment), "nslr" (next-step loss), "loss" (each example's own, for baselines), or a
            :class:`~inloop.rewards.Reward`.
        reference: What a step is judged by: "next" (the next step, as in the paper), "previous" (the step before), or a
            function that returns a scalar loss on held-out data; it is evaluated at the parameters after the step.
        accumulate: Paid steps for each policy update. (A policy with a rule of its own, as the baselines of :mod:`inloop.policies`, has no use for
            this, nor for ``policy_optimizer`` and ``normalisation``.)
        interleave: Let every second step use the policy's neutral choices (for a mixture all sources alike, the bad ones, too, which
            makes them harder to find; for augmentation no operation); such a step pays the one before it, trains the
            model like any other, and is not paid itself.
        policy_optimizer: Over the policy's parameters; by default ``Adam(lr=0.1)``.
        normalisation: Of rewards: "step" (mean 0 and deviation 1 within the step), "center" (mean 0 only: steps with small rewards
            then count little, as when a model has fitted its data), "window" (within the accumulated steps), "none"; by default
            what suits the reward.
        start_after: Steps before the policy first moves; rewards are reported from the start.
        dry_run: Report rewards, never move the policy.
        reduction: How the loss that is back-propagated reduces over examples, "mean" or "sum".
        layers: Which layers count for the reward; see :func:`inloop.capture`.
        batchnorm_affine: Whether BatchNorm's own weight and bias count.
        copy_inputs: Keep copies of the layers' inputs, for writers that torch cannot see.
        retain: How to keep what is recorded until it is paid: "exact", in "half" the memory, or "recompute", in hardly any; see
            :func:`inloop.capture`.
        part: The share of each batch's examples that are rewarded, chosen at random; all train the model. What is kept of a step, and the time
            that its rewards take, shrink with it; the policy's gradient has the same expectation, and 1 / part times the variance. Steps
            that are verified are rewarded whole.
        verify: Check that the recorded examples add up to every gradient: the "first" two times that a kind of step is seen
            (the second shows gradients that were not cleared), on each step (True), never (False).
        generator: The source of all sampling; by default one that follows torch's seed. (Learners that are made after one ``torch.manual_seed`` draw
            alike: for repeats in one process, seed before each, or give generators.)
        callback: Called with each step's :class:`~inloop.report.StepReport`; one, or a list of them.

    Attributes:
        policy: The distribution that is learned.
        num_steps: Steps so far.
        updater: What moves the policy; its ``version`` counts the updates.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        *,
        reward: Literal["gar", "nslr", "loss"] | Reward = "gar",
        reference: Literal["next", "previous"] | Callable[[], Tensor] = "next",
        accumulate: int = 10,
        interleave: bool = False,
        policy_optimizer: torch.optim.Optimizer | None = None,
        normalisation: Normalisation | None = None,
        start_after: int = 0,
        dry_run: bool = False,
        reduction: Reduction = "mean",
        layers: LayerFilter | None = None,
        batchnorm_affine: bool = False,
        copy_inputs: bool = False,
        retain: Retention = "exact",
        part: float = 1.0,
        verify: bool | Literal["first"] = "first",
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
        if start_after < 0:
            raise UsageError(f"start_after={start_after}: allowed are whole numbers from 0.")
        if not 0 < part <= 1:
            raise UsageError(f"part={part}: allowed are numbers above 0, up to 1.")
        check_reduction(reduction)
        self.model = model = unwrapped(model)
        self.policy = policy
        self.reward = as_reward(reward)
        check_options(
            self.reward,
            normalisation,
            part=part < 1,
            layers=layers is not None,
            retain=retain != "exact",
            batchnorm_affine=batchnorm_affine,
            copy_inputs=copy_inputs,
        )
        self.interleave = interleave
        self.start_after = start_after
        self.dry_run = dry_run
        self.part = part
        self.updater = make_updater(policy, policy_optimizer, accumulate, normalisation or self.reward.normalisation)
        self.num_steps = 0
        self.num_dropped = 0
        self._sampler = Sampler(policy, generator or default_generator("sampling of actions"))
        self._pending = Pending(model, self.reward, reference)
        self._collapsing = False
        self._paused = 0
        self._num_abandoned = 0
        self._closed = False
        options: dict[str, Any] = {"batchnorm_affine": batchnorm_affine, "copy_inputs": copy_inputs, "retain": retain}
        self._recording = Recording(
            model, partial(make_recorder, model, layers, **options), reduction, Verifier(verify), retain != "recompute"
        )
        if self.reward.needs_tape:
            warn_of_coupled_examples(model)
        self._begin_step()

    # ---------------------------------------------------------------- the two calls of a training loop

    def sample(self, n: int) -> Actions:
        """Choose for the ``n`` examples of the next (micro-)batch. Call it once before each micro-batch."""
        draw = self.draw(n, plain=self.interleave and self.num_steps % 2 == 1)
        self.use(draw)
        return draw.actions

    def step(
        self,
        loss: Tensor | float,
        actions: Actions | None = None,
        scaler: torch.amp.GradScaler | None = None,
        losses: Tensor | None = None,
    ) -> StepReport:
        """Pay the step before with this step's gradient. Call it after ``backward``, before clipping and the optimizer.

        Args:
            loss: This step's loss.
            actions: What was chosen for this step's examples; None for all that was sampled since the last step.
            scaler: That the loss was scaled with before ``backward``, so that rewards are those of the loss itself. A step that it
                will skip, for gradients that are not finite, is dropped here, too.
            losses: Of each example, [N]; for the reward "loss".

        Raises:
            UsageError: Without actions, or without gradients.
            BatchSizeError: If there are more or fewer actions than examples.
            VerificationError: If the recorded examples do not add up to a gradient. The learner is closed then.
        """
        self._refuse_if_closed()
        if self._paused:
            raise UsageError("learner.step was called inside learner.paused(). Fix: leave the block first.")
        scale = scale_of(scaler)
        draws = self._sampler.take(actions, self.updater.version)
        try:
            report = self._step(as_number(loss), draws, scale, losses)
        except VerificationError as error:
            self.close()
            raise VerificationError(f"{error} The learner has been closed.") from None
        except BaseException:
            self._drop_pending()
            self.skip()
            raise
        self._num_abandoned = 0
        self._begin_step(draws)
        for call in self.callbacks:
            call(report)
        return report

    def _step(self, loss: float, draws: list[Draw], scale: float, losses_N: Tensor | None) -> StepReport:
        gradients = gradients_of(self.model)
        refuse_changed_model(self._recording.recorder.plan, gradients)
        norm = gradient_norm(gradients)
        tape = self._finish_recording(draws, gradients, norm)
        refuse_other_losses(losses_N, draws)
        current = DrawnStep.of(draws, tape, losses_N, scale)
        verifies = self._recording.wants_verification(tape)
        agreed = agree(loss, norm, verifies, self.num_steps, self._sampler.shared(draws))
        self.num_steps += 1
        lag = max(self.updater.version - draw.version for draw in draws)
        problem = what_is_not_finite(agreed.loss, gradients, agreed.norm)
        if problem is None and tape is not None:
            problem = self._recording.what_is_wrong(tape, gradients, agreed.verifies)
        if problem:
            self._drop_pending()
            current.release()
            return self._report(lag, dropped=problem)
        paid, reference = self._pending.match(current, Reference(gradients, agreed.loss, scale))
        if paid is None or paid.num_everyone == 0:
            return self._report(lag)
        return self._report(lag, **self._pay(paid, reference))

    def _pay(self, paid: DrawnStep, reference: Reference) -> dict[str, Any]:
        """Reward the examples of a step, and move the policy; returns what to report of it."""
        if paid.begun_with_other(reference.direction):
            self._recording.one_pass = False
            paid.release()
            return {"dropped": CHANGED_GRADIENTS}
        rewards_N = self.reward(paid.kept, reference)
        if self.reward.needs_tape:
            rewards_N = rewards_N / (paid.scale * reference.scale)
        rewards_N = paid.rewards_of_everyone(rewards_N)
        paid.release()
        if not bool(rewards_N.isfinite().all()):
            return {"dropped": "a reward is not finite"}
        moves = not self.dry_run and self.num_steps > self.start_after
        updated = moves and self.updater.add(rewards_N, paid.draws)
        return {"updated": updated, **summarise_rewards(self.policy, paid.draws, rewards_N)}

    def _report(self, lag: int, dropped: str | None = None, **payment: Any) -> StepReport:
        if dropped is not None:
            self.num_dropped += 1
            log.warning("step %d: %s; dropped (%d so far), the policy stays", self.num_steps, dropped, self.num_dropped)
        report = StepReport(
            step=self.num_steps,
            lag=lag,
            dropped=dropped,
            num_dropped=self.num_dropped,
            probabilities=self.policy.probabilities(),
            **payment,
        )
        # A held-out judge does not agree with itself: what it gives everything to may deserve it. Fixed shares are as they were meant.
        may_collapse = not callable(self._pending.reference) and not isinstance(self.policy, FixedMixture)
        if report.collapsing and not self._collapsing and may_collapse:
            log.warning("step %d: %s", self.num_steps, describe_collapse(report.shares))
        self._collapsing = report.collapsing
        return report

    # ---------------------------------------------------------------- batches that are chosen ahead, or given up

    def draw(self, n: int, plain: bool = False) -> Draw:
        """Choose for ``n`` examples that are used later: for loaders that work ahead.

        Args:
            plain: Draw the policy's neutral choices, for the plain steps of interleaving.
        """
        self._refuse_if_closed()
        return self._sampler.draw(n, self.updater.version, plain)

    def use(self, draw: Draw) -> None:
        """The next (micro-)batch that is trained on is the one that was chosen by ``draw``."""
        self._refuse_if_closed()
        if self._recording.was_abandoned():
            self._num_abandoned += 1
            log.log(
                logging.WARNING
                if self._num_abandoned == 3
                else logging.INFO,  # one pass may be given up; a third has its reason
                "gradients were cleared, or used by the optimizer, without learner.step (%d time(s) in a row); what was sampled for them is forgotten. Fix: call "
                "learner.step(loss) after loss.backward(), before the optimizer",
                self._num_abandoned,
            )
            self._recording.one_pass = False  # the next such pass costs no payment
            self.skip()
        if self.part < 1 and not draw.plain and self._recording.may_record_less():
            draw = self._sampler.choose_paid(draw, self.part)
        self._sampler.waiting.append(draw)
        if draw.plain:
            self._recording.recorder.stop()  # never paid, so nothing to record
        self._recording.expect(len(self._sampler.waiting) - 1, draw.paid_here)

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

        After a backward pass the step before goes unpaid: it was to be paid by that pass, and has been in part.
        """
        if self._pending.begun:
            log.info("step %d is not paid, since the batch after it was skipped", self.num_steps)
            self._drop_pending()
        self._begin_step(self._sampler.waiting)

    # ---------------------------------------------------------------- recording

    def _begin_step(self, used: Sequence[Draw] = ()) -> None:
        """Record from here on; draws that were not used yet wait for their batch."""
        self._sampler.forget(used)
        if self._pending.tape is not None:
            self._pending.tape.own_parameters()
        if self.reward.needs_tape:
            self._recording.begin()
        self._expect_waiting()
        # With several backward passes a step, the gradients that the first one leaves are not final.
        self._recording.pay_early(self._pending.align_early() if self._recording.one_pass else None)

    def _expect_waiting(self) -> None:
        for batch, draw in enumerate(self._sampler.waiting):
            self._recording.expect(batch, draw.paid_here)

    def _finish_recording(self, draws: list[Draw], gradients: Direction, norm: float) -> Tape | None:
        """Take the step's tape, if it has one, and refuse what cannot be a training step."""
        plain = any(draw.plain for draw in draws)
        tape = None if plain else self._recording.tape
        refuse_missing_gradients(tape, gradients, norm)
        if self.reward.needs_tape and not plain:
            refuse_missing_tape(tape)
        if tape is not None:
            refuse_other_batch_sizes(tape, draws)
            refuse_other_parts(tape, draws)
            tape.mean_over = sum(draw.num_everyone for draw in draws) / world_size()
        self._recording.end()
        return tape

    def _drop_pending(self) -> None:
        self._pending.drop()
        self._recording.pay_early(None)

    # ---------------------------------------------------------------- lifetime and state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward and backward passes in this block leave no trace, and the step that waits to be paid goes on waiting."""
        self._paused += 1
        try:
            with self._recording.paused():
                yield
        finally:
            self._paused -= 1

    def close(self) -> None:
        """Take all hooks off the model and free what is held. The policy stays as it is."""
        self._closed = True
        self._recording.close()
        self._drop_pending()
        self._sampler.waiting = []

    def __repr__(self) -> str:
        names = type(self.model).__name__, type(self.policy).__name__, type(self.reward).__name__
        return f"InLoop({', '.join(names)}: {self.num_steps} steps, {self.updater.version} updates of the policy)"

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

    def state_dict(self, pending: bool = False) -> dict[str, Any]:
        """Everything that continuing needs, as plain tensors and numbers.

        Args:
            pending: Keep the step that waits to be paid. Its tape is as large as the activations of a step, so by default that
                step is dropped, here and now; as the run that goes on drops it too, it and a run continued from this state are
                equal bit for bit.
        """
        waiting = self._pending.state_dict(keep_step=pending)
        if self._pending.step is None:
            self._recording.pay_early(None)
        return {
            "policy": {name: value.clone() for name, value in self.policy.state_dict().items()},
            "updater": self.updater.state_dict(),
            "generator": self._sampler.generator.get_state(),
            "num_steps": self.num_steps,
            "num_dropped": self.num_dropped,
            "draws": [draw.state_dict() for draw in self._sampler.waiting],
            "recording": self._recording.state_dict(),
            **waiting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; what is pending here is dropped."""
        if missing := _STATE - set(state):
            raise UsageError(
                f"This is no state of an InLoop learner: it has no {sorted(missing)}; it has {sorted(state)[:5]}."
            )
        refuse_state_of_other(self.policy, state["policy"])
        # What is likely to fail comes first, so that a state that does not fit changes nothing.
        draws = [Draw.restored(self.policy, saved) for saved in state["draws"]]
        self._recording.load_state_dict(state["recording"])
        saved = state["pending"]
        step = None if saved is None else DrawnStep.restored(self.policy, self._recording.recorder.plan, saved)
        self.policy.load_state_dict(state["policy"])
        self.updater.load_state_dict(state["updater"])
        self._sampler.generator.set_state(state["generator"])
        self.num_steps, self.num_dropped = state["num_steps"], state["num_dropped"]
        self._pending.restore(step, state["previous"])
        self.skip()
        self._sampler.restore(draws)
        self._expect_waiting()
