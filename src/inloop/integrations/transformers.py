"""The Trainer of Hugging Face transformers, with batches from a learned mixture.

    trainer = MixtureTrainer(model=model, args=arguments, mixture=inloop.Mixture([first, second, third]))
    trainer.train()

The reference gradient is unclipped: MixtureTrainer reads it at the end of ``training_step``, the only place after the backward pass and
before the Trainer clips (``on_pre_optimizer_step`` comes after that).
"""

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from inloop.checkpoints import read_checkpoint, write_checkpoint
from inloop.errors import UsageError
from inloop.integrations.driver import Driver, EpochLoader
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.policies import Policy

_FILE = "inloop.pt"


class MixtureTrainer(Trainer):
    """A Trainer that draws its batches from a mixture, example by example, and learns which sources to draw from.

    Args:
        mixture: The training data, in place of ``train_dataset``; any ``datasets.Dataset`` is a source. A mixture without a collate
            function of its own uses the Trainer's.
        policy: By default a :class:`inloop.MixturePolicy` over the sources.
        batches_per_epoch: By default one pass over all sources.
        learner_options: Options of :class:`inloop.InLoop`.
    """

    def __init__(
        self,
        *args: Any,
        mixture: Mixture,
        policy: Policy | None = None,
        batches_per_epoch: int | None = None,
        learner_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("train_dataset") is not None:
            raise UsageError("MixtureTrainer got a train_dataset. Fix: give the training data as mixture=.")
        super().__init__(*args, **kwargs)
        if mixture.collate is default_collate:
            mixture = copy.copy(mixture)  # another Trainer may have another collator
            mixture.collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        arguments = self.args
        arguments.ignore_data_skip = True  # the loader's own state says where to continue
        loader_options = {
            "num_workers": arguments.dataloader_num_workers,
            "prefetch": arguments.dataloader_prefetch_factor or 2,
            "micro_batches": arguments.gradient_accumulation_steps,
        }
        self.driver = Driver(
            mixture, policy, self._train_batch_size, batches_per_epoch, learner_options or {}, loader_options
        )
        self.add_callback(_Attach(self.driver))

    @property
    def learner(self) -> InLoop | None:
        """The learner; None before training begins."""
        return self.driver.learner

    def get_train_dataloader(self) -> EpochLoader:  # type: ignore[override]
        return self.driver.loader()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.driver.close()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor | Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        self.driver.begin_batch()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.driver.add_loss(loss)
        if self.accelerator.sync_gradients:
            self.driver.end_step(self.accelerator.scaler)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels: Any = inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        logits: Any = outputs.get("logits") if isinstance(outputs, dict) else None
        if model.training and _are_of_classes(logits, labels):
            self.driver.tell(logits, labels)
        return (loss, outputs) if return_outputs else loss

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.driver.load_state_dict(read_checkpoint(Path(checkpoint) / _FILE))


def _are_of_classes(logits: Any, labels: Any) -> bool:
    """Whether these are the scores of classes, and one class for each example.

    The labels of language models are not told: models shift them by themselves, and their logits are large.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
        return False
    return logits.dim() == 2 and logits.shape[1] > 1 and labels.shape == logits.shape[:1]


class _Attach(TrainerCallback):
    """Makes the learner when the model is ready, and saves its state beside the Trainer's."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.driver.attach(kwargs["model"], kwargs.get("optimizer"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = self.driver.state_dict()  # in all processes: it drops the step that waits for its reward
        if args.should_save:
            write_checkpoint(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _FILE, saved)
