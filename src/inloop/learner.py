"""The learner: the paper's loop around the user's own.

    step t        a_i ~ p(.; φ_t)              sample
                  g_t = ∇L_t(θ_t)              the user's forward and backward pass, recorded on a tape
                  r_i = <∇l_i(θ_{t-1}), g_t>   step: reward the examples of step t-1 by the gradient of step t,
                  φ_{t+1} <- φ_t               give the rewards to the update rule, which may move the policy,
                                               and release the tape of t-1
                  θ_{t+1} <- θ_t               the user's optimizer

g_t is the raw batch gradient, before clipping, weight decay and momentum; with ``optimizer=`` it is Pᵀ g_t (``judging.py``). Step t+1 rewards a
choice of step t, so the choices of step t+2 are the first that can follow from it. Recording opens in ``sample`` or ``use`` and closes in ``step``.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from inloop.alignment import Recording
from inloop.alignment.plan import warn_of_coupled_examples
from inloop.distributed import is_distributed, unwrapped
from inloop.errors import UsageError, VerificationError
from inloop.host import on_host
from inloop.judging import Judging
from inloop.optimizers import StepDerivative
from inloop.policies import Actions, Policy
from inloop.randomness import default_generator, on_cpu
from inloop.recording import Finished, StepRecorder
from inloop.references import HeldOutLoss, Named, Reference, as_reference
from inloop.refusals import (
    as_scalar,
    refuse_late_step,
    refuse_other_state,
    refuse_useless_options,
    refuse_wrong_arguments,
    scale_of,
)
from inloop.report import Reporter, StepReport, summarise_rewards
from inloop.rewards import Reward, as_reward
from inloop.sampler import Sampler
from inloop.states import refuse_other_structure
from inloop.step import Draw, Judge, Step
from inloop.updates import NoUpdate, Update, as_update
from inloop.verdicts import Told, statistics_for, told_by

log = logging.getLogger("inloop")


class InLoop:
    """Learns a policy over per-example choices while a model trains.

    Args:
        model: The model in training.
        policy: The distribution to learn.
        optimizer: The model's optimizer, or a list of all of them. Rewards are then true for the steps that it takes: with AdamW, each
            entry of a gradient is weighted by AdamW's step size for it. None: the paper's rewards, which are true for SGD; a trainer's adapter then gives its
            own, unless this is False. An :class:`inloop.optimizers.StepDerivative` has more options.
        reward: "gar" (gradient alignment), "nslr" (next-step loss), "loss" (the example's own, for baselines), or a
            :class:`~inloop.rewards.Reward`.
        reference: The judge of a step: "next" (the next step, as in the paper), "previous", "other half", "trail", a function that returns a
            scalar loss on held-out data (evaluated after the step), or a :class:`~inloop.references.Reference`.
        update: How the policy learns: an :class:`~inloop.updates.Update`; None for :class:`~inloop.updates.Anchored` if the policy's
            parameters are scores of alternatives, as those of a mixture are, else for :class:`~inloop.updates.Reinforce`, the paper's (a
            policy without parameters stays as it is); False to watch the rewards without moving the policy.
        interleave: Let every second step use the policy's neutral choices: all sources alike, bad ones too, or no augmentation. Such a step
            judges the one before it and trains the model, but is not rewarded itself.
        part: The share of each batch that is rewarded, chosen at random; the whole batch trains the model. Memory and time of the rewards
            shrink with it; the policy's gradient keeps its expectation, with 1 / part times the variance. Verified steps are rewarded whole.
        record: What to record of a step, how to keep it, and when to verify it; see :class:`inloop.Recording`.
        generator: The source of all sampling; the default follows torch's seed. Two learners made after one ``torch.manual_seed`` draw alike.
        callback: Called with the :class:`~inloop.report.StepReport` of each step; one function, or a list of them.

    Attributes:
        policy: The distribution that is learned.
        num_steps: Steps so far.
        update: Moves the policy; its ``version`` counts the updates.
        statistics: Examples, rewards and losses of each source, with a verdict (:class:`~inloop.verdicts.SourceStatistics`); ``print(learner)``
            shows the table. None if the policy has no sources.
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
        record = Recording() if record is None else record
        refuse_wrong_arguments(model, policy, self.callbacks, part, record, generator)
        self.model = model = unwrapped(model)
        self.policy, self.interleave, self.part = policy.cpu(), interleave, part
        self.reward = as_reward(reward)
        refuse_useless_options(self.reward, part, record)
        self.reference = as_reference(reference)
        self.update = as_update(update, policy, self.reward)
        self.num_steps = 0
        self._sampler = Sampler(policy, on_cpu(generator) if generator else default_generator("sampling of actions"))
        self._reporter = Reporter(self.reference.is_training_data and not isinstance(self.update, NoUpdate))
        self.statistics = statistics_for(policy, self.reference)
        self._rewarded_since_saved = True
        self._num_pauses = 0
        self._closed = False
        self._aligns_once = self.reward.may_align_early()
        self._judging = Judging(self.reference)
        early = self._aligns_once and self.reference.is_next_gradient
        self._recorder = StepRecorder(model, record, self.reward.needs_tape, early)
        with ExitStack() as undo:  # a learner that is refused leaves nothing behind
            undo.callback(self._recorder.remove)
            self.use_optimizer(optimizer)
            undo.callback(self.use_optimizer, None)
            self.reference.attach(model, self.reward)
            undo.callback(self.reference.detach)
            self.update.attach(policy, self.reward, self.reference, self.statistics)
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
        *,
        scaler: torch.amp.GradScaler | None = None,
        losses: Tensor | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> StepReport:
        """Reward the step before by this step's gradient. Call it after ``backward``, before clipping and the optimizer.

        Args:
            loss: This step's loss.
            scaler: The scaler that multiplied the loss before ``backward``; rewards are those of the unscaled loss. If the scaler will skip
                the step because a gradient is not finite, the learner drops it, too.
            losses: The loss of each example, [N]: for the verdicts on sources, and for the reward "loss".
            logits: The model's scores of the classes, [N, C], or [N, T, C] for texts. With the labels they tell whether a source's labels
                surprise the model, and what the losses are.
            labels: The right classes, [N] or [N, T]; those below 0 do not count. For a language model give ``logits[:, :-1]`` and
                ``labels[:, 1:]``, unless they are shifted already.

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
            report = self._step(as_scalar(loss), draws, scale, told_by(losses, logits, labels, draws))
        except VerificationError as error:
            self.close()
            raise VerificationError(f"{error} The learner has been closed.") from None
        except BaseException:
            self._judging.drop()
            self.skip()
            raise
        self._sampler.announced = []
        for call in self.callbacks:
            call(report)
        return report

    def _step(self, loss: Tensor, draws: list[Draw], scale: float, told: Told) -> StepReport:
        if self._judging.derivative is not None and self._recorder.optimizer_stepped:
            refuse_late_step()
        finished = self._recorder.finish(draws, self.reference)
        current = Step(draws, finished.tape, told.losses_N, scale)
        # Reading a number waits for the device. So all are read at once, unless one decides what is computed.
        at_once = self.reward.needs_tape and not finished.must_be_looked_at
        mean_loss: Tensor | float = loss
        if not at_once:
            self._judging.refuse_unknown(finished.gradients)
            mean_loss, problem = self._look(finished, draws, told, *on_host([loss, finished.norm]))
            if problem is not None:
                return self._drop(current, None, problem)
        judge = Judge(finished.gradients, mean_loss, scale)
        step, judge, dropped = self._judging.match(current, judge)  # step t-1, g_t = ∇L_t(θ_t)
        rewards = [] if step is None or step.is_empty else [step.gather_rewards(self.reward(step, judge))]
        loss, norm, *others = on_host([loss, finished.norm, *rewards, *told.tensors()])
        if at_once:
            _, problem = self._look(finished, draws, told, loss, norm)
            if problem is not None:
                return self._drop(current, step, problem)
        if self.statistics is not None:
            self.statistics.count(draws, told.read(others[len(rewards) :]))
        lag = self._lag(draws)
        results: dict[str, Any] = {"dropped": dropped}
        if step is not None and rewards:
            results = self._reward(step, others[0])
        if self.reference.waiting is current:
            current.own_parameters()  # before the optimizer changes them; those of step t-1 are released by now
        self._judging.end_step()
        report = self._reporter.report(self.num_steps, lag, self._sampler.probabilities(), **results)
        if self.statistics is not None:
            self.statistics.add(report)
        return report

    def _look(
        self, finished: Finished, draws: list[Draw], told: Told, loss: Tensor, norm: Tensor
    ) -> tuple[float, str | None]:
        """Look at a step's loss and gradient norm, agree on them with other processes, and count the step."""
        shared = [*self._sampler.shared(draws), told.mark()] if is_distributed() else ()
        found = self._recorder.look(finished, loss, norm, (self.num_steps, shared))
        self.num_steps += 1
        return found

    def _lag(self, draws: list[Draw]) -> int:
        return max([self.update.version - draw.version for draw in draws])

    def _drop(self, current: Step, rewarded: Step | None, problem: str) -> StepReport:
        self._judging.drop()
        for step in (current, rewarded):
            if step is not None:
                step.release()
        lag = self._lag(current.draws)
        return self._reporter.report(self.num_steps, lag, self._sampler.probabilities(), dropped=problem)

    def _reward(self, step: Step, rewards_N: Tensor) -> dict[str, Any]:
        """Move the policy by the rewards r_i = <∇l_i(θ_{t-1}), g_t> and release the step. Return the fields of the report."""
        step.release()
        self._rewarded_since_saved = True
        values_N = rewards_N.numpy().astype(np.float64)
        if not np.isfinite(values_N).all():
            return {"dropped": "a reward is not finite"}
        rewards_N = torch.from_numpy(values_N)
        updated = self.update.add(step.draws, rewards_N)  # φ_{t+1} <- φ_t
        return {"updated": updated, **summarise_rewards(self.policy, step.draws, rewards_N)}

    # ---------------------------------------------------------------- batches chosen ahead, and batches given up

    def draw(self, n: int, plain: bool = False) -> Draw:
        """Choose for ``n`` examples that are used later: for loaders that work ahead.

        Args:
            plain: Draw the policy's neutral choices, for the plain steps of interleaving.
        """
        self._refuse_if_closed()
        return self._sampler.draw(n, self.update.version, plain)

    def use(self, draw: Draw | Actions) -> None:
        """Announce the next (micro-)batch, and begin to record it.

        Args:
            draw: From :meth:`draw`; or actions that were chosen elsewhere, which count as drawn by the present policy.
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
        """Open the recording of a step with its first draw, and expect the draw's batch."""
        if not self._recorder.is_open:
            known = self._judging.open()
            at_once = known if self._aligns_once else None
            self._recorder.open(self._judging.waiting, self._judging.of_last_step, at_once)
        self._sampler.announced.append(draw)
        self.reference.batch_begins(self.num_announced - 1)
        if draw.plain:
            self._recorder.expect_plain()
        self._recorder.expect(self.num_announced - 1, draw.num_examples, draw.rewarded_here)

    def use_optimizer(self, optimizer: object) -> None:
        """Reward the steps of this optimizer from here on, if it was made after the learner or in place of another."""
        self._judging.use_optimizer(self.model, optimizer)

    @property
    def num_dropped(self) -> int:
        """How many steps were dropped so far."""
        return self._reporter.num_dropped

    @property
    def num_announced(self) -> int:
        """How many draws were announced since the last step."""
        return len(self._sampler.announced)

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss of this (micro-)batch if processes have different numbers of examples, else 1.

        Processes average their gradients, so an example of a small part would count for more than one of a large part. With this
        factor the average is that of the mean over all examples.
        """
        return self._sampler.loss_weight()

    def skip(self) -> None:
        """Forget the draws and the recording since the last step.

        If a backward pass has rewarded a part of the step before already, that step goes unrewarded.
        """
        self._refuse_in_a_pause("skip")
        waiting = self._judging.waiting
        if waiting is not None and waiting.begun:
            log.info("inloop: step %d is not rewarded, since the batch after it was skipped", self.num_steps)
            self.reference.drop()
        self._recorder.close()
        self._sampler.announced = []

    # ---------------------------------------------------------------- lifetime and state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in this block; the step that waits for its judge goes on waiting."""
        self._num_pauses += 1
        try:
            with self._recorder.paused():
                yield
        finally:
            self._num_pauses -= 1

    def close(self) -> None:
        """Remove all hooks from the model and free the memory. The policy stays as it is."""
        self._closed = True
        self._recorder.remove()
        self.reference.detach()
        self.update.detach()
        self.use_optimizer(None)
        self._sampler.announced = []

    def __repr__(self) -> str:
        parts = (self.model, self.policy, self.reward, self.reference, self.update)
        names = ", ".join(type(part).__name__ for part in parts)
        dropped = f", {self.num_dropped} dropped" if self.num_dropped else ""
        optimizer = "" if self._judging.derivative is None else f" with {self._judging.derivative.names}"
        updates = f"{self.update.version} update{'' if self.update.version == 1 else 's'}"
        return f"InLoop({names}{optimizer}: {self.num_steps} steps{dropped}, {updates})"

    def __str__(self) -> str:
        return repr(self) if self.statistics is None else f"{self!r}\n{self.statistics}"

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

        This drops the step that waits for its judge, whose tape is as large as the activations of a step. The present run drops it, too, so
        a run that continues from this state equals it bit for bit.
        """
        if self.reference.waiting is not None:
            if not self._rewarded_since_saved:
                log.warning(
                    "inloop: state_dict() drops the step that waits to be rewarded; called after every step, nothing is ever rewarded"
                )
            self._rewarded_since_saved = False
            self._recorder.early.stop()
            self.reference.drop()
        policy = {name: value.clone() for name, value in self.policy.state_dict().items()}
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {"num_steps": self.num_steps, "policy": policy, "recording": self._recorder.state_dict(), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a step that waits here is dropped."""
        parts = {"policy": self.policy, "recording": self._recorder, **self._parts()}
        state = tree_map_only(Tensor, Tensor.cpu, state)  # a reference moves its tensors to the model
        refuse_other_state(self.policy, self.update, state, {"num_steps", *parts})
        own, num_steps = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}, self.num_steps
        # Whatever may fail comes first, so that a state that does not fit changes nothing.
        with _sentences_of_states():
            for name, values in {"num_steps": num_steps, **own}.items():
                refuse_other_structure(state[name], values, name)
            draws = self._sampler.restored_draws(state["sampler"])
            self._judging.refuse_other_state(state["judging"])
        try:
            with _sentences_of_states():
                self._recorder.load_state_dict(state["recording"])
                self.skip()
                self.reference.drop()
                for name, part in parts.items():
                    part.load_state_dict(state[name])
                self.num_steps = state["num_steps"]
                for draw in draws:
                    self._announce(draw)
        except UsageError:
            for name, part in parts.items():
                part.load_state_dict(own[name])
            self.num_steps = num_steps
            self.skip()
            raise

    def _parts(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "judging": self._judging,
            "sampler": self._sampler,
            "reporter": self._reporter,
            **({} if self.statistics is None else {"statistics": self.statistics}),
        }


@contextmanager
def _sentences_of_states() -> Iterator[None]:
    """Turn an error about an entry with the right form, and a value that cannot be, into a sentence."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"The state cannot be loaded ({error!r}). Fix: load a state that such a learner has saved."
        ) from error
