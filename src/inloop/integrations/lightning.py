"""Lightning: a data module that draws batches from a mixture, and a callback that learns which sources to draw from.

    data = MixtureDataModule(inloop.Mixture([clean, doubtful]), batch_size=64)
    trainer = lightning.Trainer(callbacks=[InLoopCallback(data)], gradient_clip_val=1.0)
    trainer.fit(module, data)

A classifier's ``training_step`` should call ``self.trainer.datamodule.tell(logits, labels)``: what tells wrong sources from different ones.

The reference gradient is unclipped: the callback reads it in ``on_before_optimizer_step``. Lightning calls that after the last backward pass
of a step, before it clips.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.integrations.driver import Driver, EpochLoader
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.policies import Policy


class MixtureDataModule(pl.LightningDataModule):
    """Training batches drawn from a mixture. Subclass it to add validation data.

    Args:
        batch_size: Examples in each batch, of each process.
        batches_per_epoch: By default one pass over all sources.
        policy: By default a :class:`inloop.MixturePolicy` over the sources.
        loader_options: Further options of :meth:`inloop.Mixture.loader`, such as ``num_workers``.
    """

    def __init__(
        self,
        mixture: Mixture,
        batch_size: int,
        *,
        batches_per_epoch: int | None = None,
        policy: Policy | None = None,
        **loader_options: Any,
    ) -> None:
        super().__init__()
        self.driver = Driver(mixture, policy, batch_size, batches_per_epoch, {}, loader_options)

    def train_dataloader(self) -> EpochLoader:
        return self.driver.loader()

    def tell(self, logits: Tensor, labels: Tensor) -> None:
        """Tell the learner the logits and labels of a batch, as :meth:`inloop.InLoop.step` takes them. Call it once in each ``training_step``."""
        self.driver.tell(logits, labels)


class InLoopCallback(pl.Callback):
    """Learns the mixture of a :class:`MixtureDataModule` while Lightning trains.

    Args:
        model: Returns the module of the LightningModule to learn from, by default all of it.
        learner_options: Further options of :class:`inloop.InLoop`, such as ``callback=inloop.Records("run.jsonl")``.
    """

    def __init__(
        self,
        data: MixtureDataModule,
        *,
        model: Callable[[pl.LightningModule], nn.Module] = lambda module: module,
        **learner_options: Any,
    ) -> None:
        self.driver = data.driver
        self.driver.learner_options = learner_options
        self._model = model

    @property
    def learner(self) -> InLoop | None:
        return self.driver.learner

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise UsageError(
                "The LightningModule optimizes by hand, and only it knows when a step ends. Fix: call learner.sample and learner.step in "
                "training_step, as in a plain loop."
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise UsageError(
                "precision='16-mixed' scales the loss, and Lightning unscales the gradients before the callback sees them. Fix: use 'bf16-mixed', or a plain "
                "loop with learner.step(loss, scaler=scaler)."
            )
        self.driver.loader_options = {"micro_batches": trainer.accumulate_grad_batches} | self.driver.loader_options
        self.driver.attach(self._model(pl_module), trainer.optimizers)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.driver.begin_batch()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.driver.add_loss(loss)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.driver.end_step()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.driver.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.driver.close()

    def state_dict(self) -> dict[str, Any]:
        return self.driver.last_state() or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.driver.load_state_dict(state)
