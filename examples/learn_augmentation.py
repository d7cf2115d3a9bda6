"""Digits, and six operations to augment them with: which to keep is learned in training.

python examples/learn_augmentation.py [--steps 600] [--seed 0]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop import augment
from inloop.datasets import digit_pixels


def blot(images: Tensor, share_N: Tensor) -> Tensor:
    """An operation of one's own: everything above a line turns black; at full strength all."""
    rows = torch.arange(images.shape[2]).view(1, 1, -1, 1)
    return images * (rows >= (share_N * images.shape[2]).ceil().view(-1, 1, 1, 1))


def main(steps: int = 600, seed: int = 0) -> dict[str, float]:
    torch.manual_seed(seed)
    pixels, labels = digit_pixels()
    order = torch.randperm(len(pixels))
    train, test = order[:1500], order[1500:]
    augment.register_operation("blot", blot, magnitudes=(0.5, 1.0))
    space = augment.make_space(
        ["identity", "auto_contrast", "sharpness", "flip_ud", "invert", "blot"], base="ra"
    )
    policy = augment.AugmentPolicy(space, numbers=(1, 2))
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    learner = inloop.InLoop(model, policy, interleave=True, update=inloop.Reinforce(accumulate=1))

    print("step   " + "".join(f"{name:>15}" for name in space.operations))
    for step in range(1, steps + 1):
        rows = train[torch.randint(len(train), (250,))]
        actions = learner.sample(250)  # every second batch stays as it is
        images = augment.apply(pixels[rows], actions)
        loss = F.cross_entropy(model(images.float() / 127.5 - 1), labels[rows])
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(
                f"{step:4d}   "
                + "".join(f"{p:15.2f}" for p in policy.probabilities()["keep"].tolist())
            )
    learner.close()

    answers = model.eval()(pixels[test].float() / 127.5 - 1).argmax(dim=1)
    accuracy = (answers == labels[test]).float().mean().item()
    print(f"test accuracy {accuracy:.3f}")
    return dict(zip(space.operations, policy.probabilities()["keep"].tolist(), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
