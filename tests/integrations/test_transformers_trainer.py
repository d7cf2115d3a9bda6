import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.errors import CheckpointError, UsageError
from tests.integrations.plain_loop import CLIP, assert_same, make_mixture, make_net, make_options, train_plainly

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("accelerate")
from inloop.integrations.transformers import MixtureTrainer, _are_of_classes  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


class Model(nn.Module):
    """As the Trainer wants it: takes names, gives a loss."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(examples):
    x, y = zip(*examples, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


def make_trainer(folder, record, steps, mixture=None, batch=16, **options):
    mixture = mixture or make_mixture()
    mixture.collate = collate
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        optim="sgd",
        learning_rate=0.2,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **({"save_strategy": "no"} | options),
    )

    def keep(report):
        record.append((report.probabilities, report.reward_mean))

    return MixtureTrainer(
        model=Model(),
        args=arguments,
        mixture=mixture,
        batches_per_epoch=8,
        eval_dataset=[{"x": torch.randn(8), "labels": torch.tensor(1)} for _ in range(10)],
        learner_options={"callback": keep} | make_options(),
    )


def test_the_same_as_the_plain_loop_so_the_reference_is_unclipped(tmp_path):
    record = []
    trainer = make_trainer(tmp_path, record, 20, eval_strategy="steps", eval_steps=5)
    trainer.train()
    assert_same(record, train_plainly(20))
    assert not any(part._forward_hooks for part in trainer.model.modules())
    assert any("eval_loss" in line for line in trainer.state.log_history)


def test_accumulation(tmp_path):
    record = []
    trainer = make_trainer(tmp_path, record, 10, gradient_accumulation_steps=2)
    trainer.train()
    assert_same(record, train_plainly(10, micro_batches=2))
    assert (
        trainer.learner.statistics.signs.excess.number_K.sum() == 10 * 2 * 16
    )  # the learner is told logits and labels


def test_labels_that_are_no_classes_are_not_told():
    assert _are_of_classes(torch.zeros(2, 3), torch.zeros(2).long())
    assert not _are_of_classes(torch.zeros(2, 1), torch.zeros(2).long())
    assert not _are_of_classes(torch.zeros(2, 3), torch.zeros(2))
    assert not _are_of_classes(torch.zeros(2, 5, 3), torch.zeros(2, 5).long())
    assert not _are_of_classes(None, torch.zeros(2).long())


def test_a_run_continues_from_a_checkpoint(tmp_path):
    whole, first, second = [], [], []
    make_trainer(tmp_path / "a", whole, 20, save_strategy="steps", save_steps=6).train()
    make_trainer(tmp_path / "b", first, 12, save_strategy="steps", save_steps=6).train()
    make_trainer(tmp_path / "b", second, 20, save_strategy="steps", save_steps=6).train(resume_from_checkpoint=True)
    assert json.loads((tmp_path / "b" / "checkpoint-18" / "trainer_state.json").read_text())["global_step"] == 18
    assert_same(first + second, whole)


def test_training_twice_goes_on(tmp_path):
    record = []
    trainer = make_trainer(tmp_path, record, 4)
    trainer.train()
    trainer.train()
    assert trainer.learner.num_steps == 8
    assert not any(part._forward_hooks for part in trainer.model.modules())


def test_a_checkpoint_without_the_learners_state_is_refused(tmp_path):
    make_trainer(tmp_path, [], 6, save_strategy="steps", save_steps=3).train()
    (tmp_path / "checkpoint-3" / "inloop.pt").unlink()
    with pytest.raises(CheckpointError, match="inloop.pt cannot be read"):
        make_trainer(tmp_path, [], 9).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_an_epoch_is_a_multiple_of_a_step(tmp_path):
    trainer = make_trainer(tmp_path, [], 4, gradient_accumulation_steps=3)
    with pytest.raises(UsageError, match="no multiple of the 3 batches"):
        trainer.train()


def test_workers(tmp_path):
    record = []
    make_trainer(tmp_path, record, 6, dataloader_num_workers=1).train()
    assert len(record) == 6


def test_a_train_dataset_is_refused(tmp_path):
    with pytest.raises(UsageError, match="mixture="):
        MixtureTrainer(model=Model(), train_dataset=[1], mixture=make_mixture())


def test_three_lines_for_sources_from_datasets(tmp_path):
    """Rows with a column that the model does not take; rewards by example in mixed batches."""
    first, second, third = (
        datasets.Dataset.from_dict(
            {"input_ids": torch.randint(1, 30, (50, 6)).tolist(), "labels": [k % 2] * 50, "text": ["a"] * 50}
        )
        for k in range(3)
    )
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    model = transformers.BertForSequenceClassification(config)

    mixture = inloop.Mixture([first, second, third])
    reports = []
    options = {"callback": reports.append}
    trainer = MixtureTrainer(model=model, args=arguments, mixture=mixture, learner_options=options)
    trainer.train()

    assert trainer.learner.num_steps == 4
    assert int(reports[-1].rewards.count_K.sum()) == 8
    assert mixture.collate is torch.utils.data.default_collate  # the Trainer's own is for it alone
    assert int(mixture.drawn_K.sum()) == 32
