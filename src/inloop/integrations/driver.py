"""What the adapters of all trainers do: make the learner when the model is ready, announce batches, pay steps, keep the state."""

from typing import Any

from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.mixture.epochs import EpochLoader
from inloop.mixture.loader import MixtureLoader
from inloop.mixture.sources import IndexedSource
from inloop.policies import MixturePolicy, Policy
from inloop.report import StepReport


class Driver:
    """A learner over a mixture, driven by somebody else's training loop.

    Args:
        batch_size: Examples in each (micro-)batch of this process.
        batches_per_epoch: By default as many as one pass over all sources has.
        learner_options: For :class:`inloop.InLoop`.
        loader_options: For :class:`inloop.mixture.loader.MixtureLoader`.
    """

    def __init__(
        self,
        mixture: Mixture,
        policy: Policy | None,
        batch_size: int,
        batches_per_epoch: int | None,
        learner_options: dict[str, Any],
        loader_options: dict[str, Any],
    ) -> None:
        self.mixture = mixture
        self.policy = policy or MixturePolicy(len(mixture.sources))
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch or _batches_in_a_pass(mixture, batch_size)
        self.learner_options, self.loader_options = learner_options, loader_options
        self.learner: InLoop | None = None
        self.report: StepReport | None = None
        self._loader: MixtureLoader | None = None
        self._state: dict[str, Any] | None = None
        self._loss = 0.0

    def attach(self, model: nn.Module) -> None:
        """The model is ready, in whatever wrapper. Does nothing the second time."""
        if self.learner is not None:
            return
        self.learner = InLoop(model, self.policy, **self.learner_options)
        self._loader = self.mixture.loader(self.learner, self.batch_size, **self.loader_options)
        if self._state is not None:
            self.learner.load_state_dict(self._state["learner"])
            self._loader.load_state_dict(self._state["loader"])
            self._state = None

    def loader(self) -> EpochLoader:
        return EpochLoader(self._attached()[1], self.batches_per_epoch)

    def begin_batch(self) -> None:
        """Call it before each (micro-)batch is trained on."""
        self._attached()[1].use_next()

    def add_loss(self, loss: Tensor) -> None:
        """Of a micro-batch, as it is back-propagated; those of a step are added up."""
        self._loss += float(loss.detach())

    def end_step(self, scaler: Any = None) -> None:
        """Call it after the last backward pass of a step, before gradients are clipped."""
        loss, self._loss = self._loss, 0.0
        self.report = self._attached()[0].step(loss, scaler=scaler)

    def state_dict(self) -> dict[str, Any]:
        learner, loader = self._attached()
        return {"learner": learner.state_dict(), "loader": loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, now or when the model is ready."""
        self._state = state
        if self.learner is not None:
            learner, loader = self._attached()
            learner.load_state_dict(state["learner"])
            loader.load_state_dict(state["loader"])
            self._state = None

    def close(self) -> None:
        """Take the learner off the model; the policy stays as it is."""
        if self.learner is not None:
            self.learner.close()

    def _attached(self) -> tuple[InLoop, MixtureLoader]:
        if self.learner is None or self._loader is None:
            raise UsageError("There is no learner yet: it is made when training begins.")
        return self.learner, self._loader


def _batches_in_a_pass(mixture: Mixture, batch_size: int) -> int:
    if not all(isinstance(source, IndexedSource) for source in mixture.sources):
        raise UsageError(
            "A source is a stream, which has no length. Fix: say how many batches an epoch has, batches_per_epoch=."
        )
    return max(1, sum(source.size or 0 for source in mixture.sources) // batch_size)
