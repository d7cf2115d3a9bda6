import warnings

import pytest
import torch
import torch.nn.functional as F

import inloop
from inloop.errors import UsageError
from tests.integrations.plain_loop import CLIP, assert_same, make_mixture, make_net, make_options, train_plainly

pl = pytest.importorskip("lightning.pytorch")
from inloop.integrations.lightning import InLoopCallback, MixtureDataModule  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class WithValidation(MixtureDataModule):
    def val_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(20, 8), torch.zeros(20).long()), 10
        )


def quiet_trainer(callbacks, **options):
    return pl.Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(folder, steps, record, *, checkpoint=None, interleave=False, **options):
    data = WithValidation(make_mixture(), 16, batches_per_epoch=7, **options.pop("loader", {}))
    callback = InLoopCallback(
        data,
        callback=lambda report: record.append((report.probabilities, report.reward_mean)),
        interleave=interleave,
        **make_options(),
    )
    callbacks = [callback, *options.pop("callbacks", [])]
    trainer = quiet_trainer(callbacks, max_steps=steps, gradient_clip_val=CLIP, default_root_dir=folder, **options)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, ckpt_path=checkpoint)
    return trainer, module, callback


def test_the_same_as_the_plain_loop_with_clipping_and_validation(tmp_path):
    record = []
    _, module, _ = fit(tmp_path, 25, record, enable_checkpointing=False)
    assert_same(record, train_plainly(25))
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("interleave", [False, True])
def test_accumulation(tmp_path, interleave):
    record = []
    with pytest.raises(UsageError, match="no multiple of the 2 batches"):
        fit(tmp_path, 12, record, accumulate_grad_batches=2, interleave=interleave)


def test_accumulation_is_the_same_as_the_plain_loop(tmp_path):
    record = []
    data = MixtureDataModule(make_mixture(), 16, batches_per_epoch=8)
    callback = InLoopCallback(
        data, callback=lambda report: record.append((report.probabilities, report.reward_mean)), **make_options()
    )
    quiet_trainer(
        [callback], enable_checkpointing=False, max_steps=12, accumulate_grad_batches=2, gradient_clip_val=CLIP
    ).fit(Module(), data)
    assert_same(record, train_plainly(12, micro_batches=2))


def test_a_run_continues_from_a_checkpoint(tmp_path):
    whole, first, second = [], [], []
    save = {"every_n_train_steps": 9, "save_top_k": -1}
    fit(tmp_path / "a", 20, whole, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path / "a", **save)])
    fit(tmp_path / "b", 9, first, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path / "b", **save)])
    saved = next((tmp_path / "b").glob("*step=9.ckpt"))
    fit(tmp_path / "b", 20, second, checkpoint=saved, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path / "b", **save)])
    assert_same(first + second, whole)


def test_it_may_save_within_a_step_and_begin_again(tmp_path):
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx % 2 == 0:
                states.append(trainer.callbacks[0].state_dict())

    states, record = [], []
    data = MixtureDataModule(make_mixture(), 16, batches_per_epoch=8)
    callback = InLoopCallback(data, callback=record.append, **make_options())
    for steps in (6, 12):
        trainer = quiet_trainer(
            [callback, Saves()], enable_checkpointing=False, max_steps=steps, accumulate_grad_batches=2
        )
        trainer.fit(Module(), data)
    assert [report.step for report in record] == list(range(1, 19))
    assert [state["loader"]["num_yielded"] for state in states[:3]] == [0, 2, 4]


class Unusual(Module):
    """Asks for the number of steps before there is a loader, skips batches, and fails once."""

    fails_at = None

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise RuntimeError("as planned")
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 9
        return super().configure_optimizers()


def test_batches_that_are_skipped_and_a_fit_that_fails(tmp_path):
    record = []
    data = MixtureDataModule(make_mixture(), 16, batches_per_epoch=9)
    callback = InLoopCallback(data, callback=record.append)

    def fit_once(module):
        quiet_trainer([callback], enable_checkpointing=False, max_epochs=1).fit(module, data)

    failing = Unusual()
    failing.fails_at = 4
    with pytest.raises(RuntimeError, match="as planned"):
        fit_once(failing)
    assert not any(part._forward_hooks for part in failing.modules())
    before = len(record)
    fit_once(Unusual())
    assert len(record) - before == 6


def test_workers_and_no_sampler_of_lightnings_own(tmp_path):
    record = []
    trainer, _, _ = fit(tmp_path, 6, record, loader={"num_workers": 1})
    assert len(record) == 6
    assert type(trainer.train_dataloader).__name__ == "EpochLoader"


def test_manual_optimization_is_refused(tmp_path):
    class Manual(Module):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    data = MixtureDataModule(make_mixture(), 16)
    trainer = quiet_trainer([InLoopCallback(data)], enable_checkpointing=False, max_steps=2)
    with pytest.raises(UsageError, match="optimizes by hand"):
        trainer.fit(Manual(), data)


def test_a_part_of_the_module(tmp_path):
    data = MixtureDataModule(make_mixture(), 16)
    callback = InLoopCallback(data, model=lambda module: module.net)
    quiet_trainer([callback], enable_checkpointing=False, max_steps=4).fit(Module(), data)
    assert isinstance(callback.learner, inloop.InLoop)
    assert callback.learner.num_steps == 4


def test_a_data_module_without_its_callback_says_what_is_missing():
    data = MixtureDataModule(make_mixture(), 16, batches_per_epoch=7)
    with pytest.raises(UsageError, match=r"callbacks=\[InLoopCallback\(data\)\]"):
        quiet_trainer([], max_steps=2).fit(Module(), data)


def test_a_module_may_tell_its_logits_and_labels():
    class Tells(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self.trainer.datamodule.tell(logits, y)
            return F.cross_entropy(logits, y)

    data = MixtureDataModule(make_mixture(), 16, batches_per_epoch=8)
    callback = InLoopCallback(data)
    quiet_trainer([callback], enable_checkpointing=False, max_steps=12, accumulate_grad_batches=2).fit(Tells(), data)
    losses = callback.learner.statistics.signs.losses
    assert losses.number_K.sum() == 12 * 2 * 16
    assert callback.learner.statistics.labels_are_told
