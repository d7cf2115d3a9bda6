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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inloop.alignment import Recording
from inloop.distributed import is_distributed, unwrapped, world_size
from inloop.errors import UsageError, VerificationError
from inloop.policies import Actions, Policy
from inloop.randomness import default_generator
from inloop.recording import StepRecorder
from inloop.references import HeldOutLoss, Reference, as_reference
from inloop.refusals import as_number, refuse_state_of_other, refuse_useless_options, scale_of, warn_of_coupled_examples
from inloop.report import Reporter, StepReport, summarise_rewards
from inloop.rewards import Reward, as_reward
from inloop.sampler import Sampler
from inloop.step import Draw
from inloop.updates import Update, Watch, as_update

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
        refuse_useless_options(self.reward, part, record)
        self.reference = as_reference(reference)
        self.update = as_update(update, policy)
        self.interleave = interleave
        self.part = part
        self.num_steps = 0
        self._sampler = Sampler(policy, generator or default_generator("sampling of actions"))
        self._reporter = Reporter(policy, self.reference.is_training_data and not isinstance(self.update, Watch))
        self._rewarded_since_saved = True
        self._num_pauses = 0
        self._closed = False
        early = self.reward.may_align_early() and self.reference.is_next_gradient
        self._recorder = StepRecorder(model, record, self.reward.needs_tape, early)
        with ExitStack() as undo:  # a learner that is refused leaves nothing behind
            undo.callback(self._recorder.remove)
            self.reference.attach(model, self.reward)
            undo.callback(self.reference.detach)
            self.update.attach(policy, self.reward)
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
        step, judge = self.reference.match(finished.step, finished.judge)  # step t-1 is judged by g_t = ∇L_t(θ_t)
        finished.step.own_parameters()
        if step is None or step.is_empty:
            return self._reporter.report(self.num_steps, lag)
        rewards_N = step.gather_rewards(self.reward(step, judge))  # r_i = <∇l_i(θ_{t-1}), g_t>
        step.release()
        self._rewarded_since_saved = True
        if not bool(rewards_N.isfinite().all()):
            return self._reporter.report(self.num_steps, lag, dropped="a reward is not finite")
        updated = self.update.add(step.draws, rewards_N)  # φ_{t+1} <- φ_t
        rewards = summarise_rewards(self.policy, step.draws, rewards_N)
        return self._reporter.report(self.num_steps, lag, updated=updated, **rewards)

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
            self._recorder.open(None if self.reference.waiting is None else self.reference.waiting.tape)
        self._sampler.waiting.append(draw)
        if draw.plain:
            self._recorder.expect_plain()
        self._recorder.expect(len(self._sampler.waiting) - 1, draw.rewarded_here)

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
            "policy": {name: value.clone() for name, value in self.policy.state_dict().items()},
            "update": self.update.state_dict(),
            "generator": self._sampler.generator.get_state(),
            "num_steps": self.num_steps,
            "num_dropped": self._reporter.num_dropped,
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
        if state["update"].keys() != self.update.state_dict().keys():
            raise UsageError(
                f"The state is of another update rule than {type(self.update).__name__}. Fix: give the learner the same."
            )
        self._recorder.load_state_dict(state["recording"])
        self.skip()
        self.policy.load_state_dict(state["policy"])
        self.update.load_state_dict(state["update"])
        self._sampler.generator.set_state(state["generator"])
        self.num_steps, self._reporter.num_dropped = state["num_steps"], state["num_dropped"]
        self.reference.drop()
        self.reference.load_state_dict(state["reference"])
        self._sampler.forget_copy()
        for draw in draws:
            self._announce(draw)
