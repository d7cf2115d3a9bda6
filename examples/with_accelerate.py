"""Accelerate: the plain loop; learner and loader are registered for its checkpoints.

python examples/with_accelerate.py [--steps 200]          (pip install accelerate)
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import inloop
from inloop.datasets import digit_sources

BAD, ACCUMULATE = 1, 2


def main(steps: int = 200, folder: str | None = None, resume: bool = False) -> Tensor:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    mixture = inloop.Mixture(digit_sources(5, BAD))
    policy = inloop.MixturePolicy(5)
    learner = inloop.InLoop(
        model, policy, optimizer=optimizer, update=inloop.Reinforce(accumulate=5)
    )
    loader = mixture.loader(learner, 64, num_batches=steps * ACCUMULATE, micro_batches=ACCUMULATE)
    accelerator.register_for_checkpointing(learner, loader)
    if resume:
        accelerator.load_state(folder)

    for _, (x, y) in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                learner.step(loss, scaler=accelerator.scaler)  # before clipping
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (
            folder is not None
            and accelerator.sync_gradients
            and learner.num_steps == steps // 2
            and not resume
        ):
            accelerator.save_state(folder)
    print(f"shares of the sources: {policy.probabilities()}; source {BAD} has random labels")
    return policy.probabilities()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().steps, temporary)
