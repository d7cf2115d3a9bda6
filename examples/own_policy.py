"""A policy of one's own: sources in an order, and one number for how much more later ones count.

Ten years of handwritten digits; the older a year, the more of its labels are wrong. A mixture has a
score for each year. This policy has a single slope, p(year) ∝ exp(slope · year), so it learns from
all years at once, and sooner.

    python examples/own_policy.py [--steps 200] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digits
from inloop.policies import Discrete

NUM_YEARS = 10


class Trend(Discrete):
    """``log p_k = log softmax(slope · k)``, k from -1 for the first choice to 1 for the last."""

    def __init__(self, num_choices: int) -> None:
        super().__init__(num_choices)
        self.slope = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("place_K", torch.linspace(-1, 1, num_choices))

    def log_probabilities(self) -> Tensor:
        return F.log_softmax(self.slope * self.get_buffer("place_K"), dim=0)


def make_years() -> list[tuple[Tensor, Tensor]]:
    images, labels = digits()
    years = []
    for year, (x, y) in enumerate(
        zip(images.chunk(NUM_YEARS), labels.chunk(NUM_YEARS), strict=True)
    ):
        wrong = torch.rand(len(y)) < 1 - year / (
            NUM_YEARS - 1
        )  # all in the first year, none in the last
        years.append((x, torch.where(wrong, torch.randint(10, y.shape), y)))
    return years


def main(steps: int = 200, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixture, policy = inloop.Mixture(make_years()), Trend(NUM_YEARS)
    learner = inloop.InLoop(model, policy)
    for _, (x, y) in mixture.loader(learner, batch_size=256, num_batches=steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()
    print(
        "share of each year:",
        " ".join(f"{share:.2f}" for share in policy.probabilities().tolist()),
    )
    return policy.probabilities()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
