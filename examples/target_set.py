"""What the model is for decides which sources it learns from: turned digits, of which few are there.

Three sources: upright digits, digits turned by ninety degrees, and some with random labels. The
learner is judged by 150 turned digits, not by the next batch.

    python examples/target_set.py [--steps 400] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.datasets import digits


def main(steps: int = 400, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    images, labels = digits()
    turned = images.rot90(1, (-2, -1))
    sources = [
        (images[:500], labels[:500]),
        (turned[500:1000], labels[500:1000]),
        (images[1000:1500], torch.randint(10, (500,))),
    ]
    target_x, target_y = turned[1500:1650], labels[1500:1650]
    test_x, test_y = turned[1650:], labels[1650:]

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def target_loss() -> Tensor:
        """On a part of the target set, drawn anew each time."""
        rows = torch.randint(len(target_x), (64,))
        return F.cross_entropy(model(target_x[rows]), target_y[rows])

    mixture = inloop.Mixture(sources)
    # One source may deserve nearly everything: the default form and rule stay near equal shares.
    policy = inloop.MixturePolicy(mixture, form="softmax", floor=0.02)
    learner = inloop.InLoop(model, policy, reference=target_loss, update=inloop.Reinforce())
    for _, (x, y) in mixture.loader(learner, batch_size=128, num_batches=steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()

    shares = policy.probabilities()
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    print("shares: upright {:.2f}, turned {:.2f}, random labels {:.2f}".format(*shares.tolist()))
    print(f"accuracy on turned digits {accuracy:.3f}")
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
