"""Lightning trains, inloop learns which sources to draw from: five of digits, the second with random labels.

python examples/with_lightning.py [--steps 200]          (pip install lightning)
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.integrations.lightning import InLoopCallback, MixtureDataModule
from inloop.lab.data import load_digits

BAD = 1


class Classifier(pl.LightningModule):
    """An ordinary LightningModule: it knows nothing of the mixture."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_sources():
    images, labels = load_digits()
    sources = list(zip(images.chunk(5), labels.chunk(5), strict=True))
    sources[BAD] = sources[BAD][0], torch.randint(10, sources[BAD][1].shape)
    return sources


def main(steps=200):
    pl.seed_everything(0, verbose=False)
    data = MixtureDataModule(inloop.Mixture(make_sources()), batch_size=128, batches_per_epoch=50)
    callback = InLoopCallback(data, accumulate=5)
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
    shares = data.driver.policy.probabilities()
    print(
        "shares of the sources:", ", ".join(f"{p:.2f}{'*' if k == BAD else ''}" for k, p in enumerate(shares.tolist()))
    )
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
