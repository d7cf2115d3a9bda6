"""The common core of all trainers' adapters: makes the learner, announces batches, rewards steps, keeps the state."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inloop.distributed import world_size
from inloop.errors import UsageError
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.mixture.loader import MixtureLoader
from inloop.mixture.sources import IndexedSource
from inloop.policies import MixturePolicy, Policy


class Driver:
    """A learner over a mixture, driven by a trainer's loop.

    Args:
        batch_size: Examples in each (micro-)batch of this process.
        batches_per_epoch: By default one pass over all sources, divided among the processes.
        learner_options: Options of :class:`inloop.InLoop`.
        loader_options: Options of :meth:`inloop.Mixture.loader`.
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
        if batches_per_epoch is not None and batches_per_epoch < 1:
            raise UsageError(f"batches_per_epoch={batches_per_epoch}: allowed are whole numbers from 1.")
        self.mixture = mixture
        self.policy = policy or MixturePolicy(mixture)
        self.batch_size = batch_size
        self.learner_options, self.loader_options = learner_options, loader_options
        self.learner: InLoop | None = None
        self._batches_per_epoch = batches_per_epoch
        self._loader: MixtureLoader | None = None
        self._state: dict[str, Any] | None = None
        self._is_attached = False
        self._losses: list[float] = []
        self._told: list[tuple[Tensor, Tensor]] = []

    @property
    def batches_per_epoch(self) -> int:
        """The batches of an epoch: a multiple of the batches of a step, so that every step is full."""
        each = int(self.loader_options.get("micro_batches", 1))
        if self._batches_per_epoch is not None:
            if self._batches_per_epoch % each:
                raise UsageError(
                    f"batches_per_epoch={self._batches_per_epoch} is no multiple of the {each} batches that a step accumulates; the last step of an "
                    "epoch would have fewer. Fix: give a multiple."
                )
            return self._batches_per_epoch
        if not all(isinstance(source, IndexedSource) for source in self.mixture.sources):
            raise UsageError(
                "A source is a stream, which has no length. Fix: give the batches of an epoch, batches_per_epoch=."
            )
        total = sum(source.size or 0 for source in self.mixture.sources)
        return max(1, total // (self.batch_size * world_size() * each)) * each

    def attach(self, model: nn.Module, optimizer: object = None) -> None:
        """Make the learner of ``model``, in whatever wrapper. Does nothing if it is attached already.

        Args:
            optimizer: The trainer's own, in whatever wrapper, or a list; ``optimizer=`` among the learner's options comes first.
        """
        if self._is_attached:
            return
        options: dict[str, Any] = {"optimizer": optimizer} | self.learner_options
        self.learner = InLoop(model, self.policy, **options)
        self._loader = self.mixture.loader(self.learner, self.batch_size, **self.loader_options)
        self._is_attached, self._losses, self._told = True, [], []
        if self._state is not None:
            self.load_state_dict(self._state)

    def loader(self) -> "EpochLoader":
        """A loader of an epoch's batches. A trainer may ask for it before the model is ready, and iterate it afterwards."""
        return EpochLoader(self)

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        for _, batch in zip(range(self.batches_per_epoch), self._attached()[1].batches(), strict=False):
            yield batch

    def begin_batch(self) -> None:
        """Call it before training on each (micro-)batch."""
        self._attached()[1].use_next()

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, as it is back-propagated, to the loss of the step."""
        self._losses.append(float(loss.detach()))

    def tell(self, logits: Tensor, labels: Tensor) -> None:
        """Tell the learner the logits and labels of a micro-batch, if the trainer knows them."""
        self._told.append((logits.detach(), labels))

    def end_step(self, scaler: Any = None) -> None:
        """Call it after the last backward pass of a step, before clipping. Without any backward pass it skips the batch."""
        losses, self._losses = self._losses, []
        told, self._told = self._told, []
        learner, _ = self._attached()
        if losses:
            all_told = len(told) == len(losses)  # the examples of all micro-batches
            logits, labels = (torch.cat(parts) for parts in zip(*told, strict=True)) if all_told else (None, None)
            learner.step(sum(losses), scaler=scaler, logits=logits, labels=labels)
        else:
            learner.skip()

    def state_dict(self) -> dict[str, Any]:
        """The state, at any time. A continued run uses the micro-batches of an unfinished step again."""
        learner, loader = self._attached()
        saved, state = loader.state_dict(within_step=True), learner.state_dict()
        state["sampler"]["draws"] = []
        return {"learner": state, "loader": saved}

    def last_state(self) -> dict[str, Any] | None:
        """The present state, or the state at closing; None if no model was ever attached."""
        return self.state_dict() if self._is_attached else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, now or when the model is ready."""
        self._state = state
        if self._is_attached:
            learner, loader = self._attached()
            learner.load_state_dict(state["learner"])
            loader.load_state_dict(state["loader"])
            self._state = None

    def close(self) -> None:
        """Take the learner off the model. The next model that is attached continues from its state."""
        if self._is_attached:
            self._state = self.state_dict()
            self._attached()[0].close()
            self._is_attached = False

    def _attached(self) -> tuple[InLoop, MixtureLoader]:
        if not self._is_attached or self.learner is None or self._loader is None:
            raise UsageError(
                "There is no learner: it exists only while the trainer trains. Fix, for Lightning: give the Trainer "
                "callbacks=[InLoopCallback(data)]."
            )
        return self.learner, self._loader


class EpochLoader:
    """Yields an epoch's batches each time it is iterated.

    It is no ``DataLoader``: trainers would replace a DataLoader's sampler by their own. The policy draws the examples, so the length of an
    epoch is a free choice.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __len__(self) -> int:
        return self.driver.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self.driver.batches()
