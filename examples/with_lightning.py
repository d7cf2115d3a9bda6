"""Lightning trains, inloop learns the mixture: five sources, the second with random labels.

python examples/with_lightning.py [--steps 200]          (pip install lightning)
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digit_sources
from inloop.integrations.lightning import InLoopCallback, MixtureDataModule

BAD = 1


class Classifier(pl.LightningModule):
    """An ordinary LightningModule, but for the line that tells the logits and labels: they show which sources have wrong labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.trainer.datamodule.tell(logits, y)  # type: ignore[attr-defined]
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(steps: int = 200) -> Tensor:
    pl.seed_everything(0, verbose=False)
    mixture = inloop.Mixture(digit_sources(5, BAD))
    policy = inloop.MixturePolicy(mixture)
    data = MixtureDataModule(mixture, batch_size=128, batches_per_epoch=50, policy=policy)
    callback = InLoopCallback(data)
    trainer = pl.Trainer(
        callbacks=[callback],
        max_steps=steps,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data)
    print(callback.learner)
    print(f"source {BAD} has random labels")
    return policy.probabilities()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
