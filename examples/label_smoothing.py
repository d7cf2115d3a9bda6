"""Algorithm 1 with one number: how much to smooth the labels, learned in the run.

Every second step uses the plain loss (the paper's first remedy); its gradient says how the
smoothing of the step before should change. Looking one step ahead, less smoothing is faster, so it
falls from its start in both runs; with a third of the labels wrong it ends at a multiple of its
value with clean ones.

    python examples/label_smoothing.py [--steps 600] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digits


class Smoothing(nn.Module):
    """φ: the share of the target that is spread evenly over the classes, between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(-2.0))

    def share(self) -> Tensor:
        return torch.sigmoid(self.logit)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_p = F.log_softmax(logits, dim=1)
        return (1 - self.share()) * F.nll_loss(log_p, labels) - self.share() * log_p.mean()


def learned_smoothing(share_wrong: float, steps: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    images, labels = digits()
    wrong = torch.rand(len(labels), generator=generator) < share_wrong
    labels = torch.where(wrong, torch.randint(0, 10, labels.shape, generator=generator), labels)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    smoothing = Smoothing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = inloop.MetaGradient(
        model,
        smoothing,
        optimizer,
        meta_optimizer=torch.optim.Adam(smoothing.parameters(), lr=0.02),
        remedy="phi-free",
    )
    for _ in range(steps):
        index = torch.randint(0, len(labels), (256,), generator=generator)

        def loss_function(meta: nn.Module | None, index: Tensor = index) -> Tensor:
            logits = model(images[index])
            loss: Tensor = (
                F.cross_entropy(logits, labels[index])
                if meta is None
                else meta(logits, labels[index])
            )
            return loss

        learner.step(loss_function)
        optimizer.step()
        optimizer.zero_grad()
    return float(smoothing.share().detach())


def main(steps: int = 600, seed: int = 0) -> tuple[float, float]:
    clean, noisy = (learned_smoothing(share_wrong, steps, seed) for share_wrong in (0.0, 0.33))
    print(
        f"learned smoothing: {clean:.3f} with clean labels, "
        f"{noisy:.3f} with a third of them wrong (start: 0.119)"
    )
    return clean, noisy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
