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
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inloop.alignment import Direction, Recording
from inloop.alignment.direction import Computed
from inloop.distributed import is_distributed, unwrapped, world_size
from inloop.errors import UsageError, VerificationError
from inloop.optimizers import StepDerivative, as_derivative
from inloop.policies import Actions, Policy
from inloop.randomness import default_generator
from inloop.recording import StepRecorder
from inloop.references import HeldOutLoss, Named, Reference, as_reference
from inloop.refusals import (
    as_number,
    refuse_other_state,
    refuse_useless_options,
    refuse_wrong_arguments,
    scale_of,
    warn_of_coupled_examples,
)
from inloop.report import Reporter, StepReport, summarise_rewards
from inloop.rewards import Reward, as_reward
from inloop.sampler import Sampler
from inloop.step import Draw, Judge, Step
from inloop.updates import NoUpdate, Update, as_update

log = logging.getLogger("inloop")


class InLoop:
    """Learns a policy over per-example choices while a model trains.

    Args:
        model: The model in training.
        policy: The distribution to learn.
        optimizer: The model's optimizer, or a list of all of them: rewards are then true for the steps that it takes (with AdamW an example's
            gradient counts where its steps are long). None for the paper's rewards, which are true for SGD; a trainer's adapter gives its
            own then, unless it is False. An :class:`inloop.optimizers.StepDerivative` has more options.
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
        optimizer: Optimizer | Sequence[Optimizer] | StepDerivative | Literal[False] | None = None,
        reward: Literal["gar", "nslr", "loss"] | Reward = "gar",
        reference: Named | HeldOutLoss | Reference = "next",
        update: Update | Literal[False] | None = None,
        interleave: bool = False,
        part: float = 1.0,
        record: Recording | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[StepReport], None] | Sequence[Callable[[StepReport], None]] | None = None,
    ) -> None:
        self.callbacks = callback if isinstance(callback, Sequence) else [] if callback is None else [callback]
        refuse_wrong_arguments(model, policy, self.callbacks, part)
        record = record or Recording()
        self.model = model = unwrapped(model)
        self.policy = policy
        self.reward = as_reward(reward)
        refuse_useless_options(self.reward, part, record)
        self.reference = as_reference(reference)
        self.update = as_update(update, policy)
        self.interleave = interleave
        self.part = part
        self.num_steps = 0
        self._sampler = Sampler(policy, generator or default_generator("sampling of actions"))
        self._reporter = Reporter(policy, self.reference.is_training_data and not isinstance(self.update, NoUpdate))
        self._known: Direction | None = None  # the direction that judges the open step, if it is known already
        self._rewarded_since_saved = True
        self._num_pauses = 0
        self._closed = False
        self._aligns_once = self.reward.may_align_early()
        early = self._aligns_once and self.reference.is_next_gradient
        self._recorder = StepRecorder(model, record, self.reward.needs_tape, early)
        self.derivative: StepDerivative | None = None
        with ExitStack() as undo:  # a learner that is refused leaves nothing behind
            undo.callback(self._recorder.remove)
            self.use_optimizer(optimizer)
            self.reference.attach(model, self.reward)
            undo.callback(self.reference.detach)
            self.update.attach(policy, self.reward, self.reference)
            undo.pop_all()
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
        self._refuse_in_a_pause("step")
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
        self._sampler.waiting = []
        for call in self.callbacks:
            call(report)
        return report

    def _step(self, loss: float, draws: list[Draw], scale: float, losses_N: Tensor | None) -> StepReport:
        shared = self._sampler.shared(draws) if is_distributed() else ()
        finished = self._recorder.finish(draws, loss, scale, losses_N, self.reference, (self.num_steps, shared))
        self.num_steps += 1
        lag = max([self.update.version - draw.version for draw in draws])
        if finished.problem is not None:
            self.reference.drop()
            finished.step.release()
            return self._reporter.report(self.num_steps, lag, dropped=finished.problem)
        results = self._drop_step_not_taken()
        step, judge = self.reference.match(finished.step, finished.judge)  # step t-1 is judged by g_t = ∇L_t(θ_t)
        if step is not None and not step.is_empty:
            results = self._reward(step, self._seen_by_optimizer(judge, is_of_this_step=step is finished.step))
        if step is not finished.step:
            finished.step.own_parameters()  # before the optimizer changes them; those of step t-1 are released by now
        self.reference.end_step()
        if self.derivative is not None:
            self.derivative.mark()
        return self._reporter.report(self.num_steps, lag, **results)

    def _reward(self, step: Step, judge: Judge) -> dict[str, Any]:
        """Reward a step, move the policy, release the step. Returns the fields of the report."""
        rewards_N = step.gather_rewards(self.reward(step, judge))  # r_i = <∇l_i(θ_{t-1}), g_t>
        step.release()
        self._rewarded_since_saved = True
        if not bool(rewards_N.isfinite().all()):
            return {"dropped": "a reward is not finite"}
        updated = self.update.add(step.draws, rewards_N)  # φ_{t+1} <- φ_t
        return {"updated": updated, **summarise_rewards(self.policy, step.draws, rewards_N)}

    def _seen_by_optimizer(self, judge: Judge, is_of_this_step: bool) -> Judge:
        """The judge with Pᵀ g in place of its gradient g: the direction that counts is the one that the optimizer's step was taken in."""
        if is_of_this_step and self._known is not None:
            return replace(judge, direction=self._known)
        if self.derivative is None or not self.reference.is_gradient:
            return judge
        compute = self.derivative.of_next_step if is_of_this_step else self.derivative.of_last_step
        return replace(judge, direction=Computed(judge.direction, compute))

    def _drop_step_not_taken(self) -> dict[str, Any]:
        """Drop the step that waits if the optimizer has skipped it: it had no effect that could be judged."""
        if self.derivative is None or self.derivative.has_stepped or self.reference.waiting is None:
            return {}
        self.reference.drop()
        return {
            "dropped": "the optimizer has not stepped since the last learner.step, so the step before had no effect"
        }

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
        self._refuse_in_a_pause("use")
        if not isinstance(draw, Draw):
            draw = self._sampler.chosen_elsewhere(draw, self.update.version)
        if self._recorder.was_abandoned():
            self.skip()
        if self.part < 1 and not draw.plain and self._recorder.may_record_less():
            draw = self._sampler.choose_rewarded(draw, self.part)
        self._announce(draw)

    def _announce(self, draw: Draw) -> None:
        """Open the recording of a step, if this is the first of its draws, and expect the draw's batch."""
        if not self._recorder.is_open:
            waiting, derivative = self.reference.waiting, self.derivative if self.reference.is_gradient else None
            known = self.reference.known_direction()
            if known is not None and derivative is not None:
                known = Computed(known, derivative.of_next_step)
            self._known = known
            compute = None if derivative is None else derivative.of_last_step
            at_once = known if self._aligns_once else None
            self._recorder.open(None if waiting is None else waiting.tape, compute, at_once)
        self._sampler.waiting.append(draw)
        if draw.plain:
            self._recorder.expect_plain()
        self._recorder.expect(len(self._sampler.waiting) - 1, draw.rewarded_here)

    def use_optimizer(self, optimizer: object) -> None:
        """Reward the steps of this optimizer from here on; for optimizers that are made after the learner, or in place of another."""
        derivative = as_derivative(self.model, optimizer)
        if self.derivative is not None:
            self.derivative.remove()
        self.derivative = derivative

    @property
    def num_dropped(self) -> int:
        """How many steps were dropped so far."""
        return self._reporter.num_dropped

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

        The step before goes unrewarded if a backward pass has judged it in part already.
        """
        self._refuse_in_a_pause("skip")
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
        self.use_optimizer(None)
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

    def _refuse_in_a_pause(self, name: str) -> None:
        if self._num_pauses:
            raise UsageError(f"learner.{name} was called inside learner.paused(). Fix: leave the block first.")

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
            "num_steps": self.num_steps,
            "policy": {name: value.clone() for name, value in self.policy.state_dict().items()},
            "recording": self._recorder.state_dict(),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a step that waits here is dropped."""
        parts = self._parts()
        refuse_other_state(self.policy, self.update, state, {"num_steps", "policy", "recording", *parts})
        # What may fail comes first, so that a state that does not fit changes nothing.
        draws = self._sampler.restored_draws(state["sampler"])
        self._recorder.load_state_dict(state["recording"])
        self.skip()
        self.reference.drop()
        self.policy.load_state_dict(state["policy"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.num_steps = state["num_steps"]
        for draw in draws:
            self._announce(draw)

    def _parts(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "reference": self.reference,
            "sampler": self._sampler,
            "reporter": self._reporter,
            **({} if self.derivative is None else {"optimizer": self.derivative}),
        }
