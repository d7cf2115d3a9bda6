"""Ten sources of digits, one of them with random labels: the mixture learns to leave it.

python examples/find_bad_source.py [--steps 300] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digits

NUM_SOURCES, NOISY = 10, 3
Source = tuple[Tensor, Tensor]


def make_sources(generator: torch.Generator) -> tuple[list[Source], Source]:
    """Split the training digits into ten; the labels of one part are replaced by noise."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order], labels[order]
    train, test = slice(0, 1500), slice(1500, None)
    sources = list(
        zip(images[train].chunk(NUM_SOURCES), labels[train].chunk(NUM_SOURCES), strict=True)
    )
    noisy_images, noisy_labels = sources[NOISY]
    sources[NOISY] = noisy_images, torch.randint(0, 10, noisy_labels.shape, generator=generator)
    return sources, (images[test], labels[test])


def show(step: int, probabilities: Tensor) -> None:
    bars = "  ".join(
        f"{p:.3f}{'*' if k == NOISY else ' '}" for k, p in enumerate(probabilities.tolist())
    )
    print(f"step {step:4d}   {bars}")


def main(steps: int = 300, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    sources, (test_x, test_y) = make_sources(torch.Generator().manual_seed(seed))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    mixture = inloop.Mixture(sources)
    policy = inloop.MixturePolicy(mixture)
    learner = inloop.InLoop(model, policy, optimizer=optimizer)

    print(f"share of each source (source {NOISY}, marked *, has random labels)")
    show(0, policy.probabilities())
    for step in range(1, steps + 1):
        x, y = mixture.draw(learner.sample(256))
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        learner.step(loss, logits=logits, labels=y)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            show(step, policy.probabilities())
    learner.close()

    accuracy = (model.eval()(test_x).argmax(dim=1) == test_y).float().mean().item()
    print(learner)
    print(f"test accuracy {accuracy:.3f}")
    return policy.probabilities()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
