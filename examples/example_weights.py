"""Algorithm 1 with a weight for each training example: wrongly labelled digits lose theirs.

The loss is differentiable in the weights, so no sampling is needed: each step moves them by the
gradient of the next step's loss. A fifth of the labels is wrong; the model never sees which.

    python examples/example_weights.py [--steps 400] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digits


class ExampleWeights(nn.Module):
    """φ: one logit for each training example. Weights have mean one in a batch."""

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_examples))

    def forward(self, index_N: Tensor) -> Tensor:
        weights_N = torch.sigmoid(self.logits[index_N])
        return weights_N / weights_N.mean()


def main(steps: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    images, labels = digits()
    wrong = torch.rand(len(labels), generator=generator) < 0.2
    labels = torch.where(
        wrong, (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10, labels
    )

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    weights = ExampleWeights(len(labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = inloop.MetaGradient(
        model, weights, optimizer, meta_optimizer=torch.optim.Adam(weights.parameters(), lr=0.1)
    )

    for _ in range(steps):
        index = torch.randint(0, len(labels), (256,), generator=generator)

        def loss_function(meta: nn.Module | None, index: Tensor = index) -> Tensor:
            assert meta is not None  # there are no steps without φ
            losses = F.cross_entropy(model(images[index]), labels[index], reduction="none")
            weighted: Tensor = meta(index) * losses
            return weighted.mean()

        learner.step(loss_function)  # in place of loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    learned = weights(torch.arange(len(labels))).detach()
    print(
        f"mean weight of rightly labelled examples {learned[~wrong].mean():.2f}, "
        f"of wrongly labelled {learned[wrong].mean():.2f}"
    )
    return learned, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
