"""Two sources, one of them partly mislabelled and larger than the other, judged by the next batch and by a validation set.

    python results/hazards/few_sources.py digits|cifar10 [--seeds 5]

writes few-sources-DATA.json beside this file, run by run; runs in it are not repeated. The smaller source has right labels; a share of the
other's is random. The validation set has right labels and a tenth as many examples as are trained on; the test set is as large.
"""

import argparse
import json

import torch
from different import HERE, Problem, train
from torch import Tensor, nn

from inloop.atomic_files import write_atomically
from inloop.datasets import digits
from inloop_lab.data.images import to_input
from inloop_lab.data.named import load_data

ARMS = ("uniform", "gar", "gar, held-out")


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def load(data: str) -> tuple[Tensor, Tensor, int]:
    """Images, labels, and the size of the smaller source."""
    if data == "digits":
        return *digits(), 360
    images = load_data("cifar10")
    return to_input(images.train_x[:24_000]), images.train_y[:24_000], 5_000


def problem(data: str, share_wrong: float, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    images, labels, right = load(data)
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order], labels[order]
    others = len(images) // 12  # for each of the validation and the test set
    is_wrong = torch.rand(len(images), generator=generator) < share_wrong
    noisy = torch.where(is_wrong, torch.randint(10, labels.shape, generator=generator), labels)
    good, bad, judge, test = slice(right), slice(right, -2 * others), slice(-2 * others, -others), slice(-others, None)
    return Problem(
        names=["right", "partly wrong"],
        sources=[(images[good], labels[good]), (images[bad], noisy[bad])],
        held_out=[(images[judge], labels[judge]), (images[test], labels[test])],
        make_model=perceptron if data == "digits" else convolutions,
        make_optimizer=lambda model: (
            torch.optim.SGD(model.parameters(), lr=0.1)
            if data == "digits"
            else torch.optim.Adam(model.parameters(), lr=1e-3)
        ),
        steps=400,
        batch=128,
        judges=range(1),
    )


def main(data: str, seeds: int) -> None:
    path = HERE / f"few-sources-{data}.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    done = {(result["wrong"], result["arm"], result["seed"]) for result in results}
    for seed in range(seeds):
        for wrong in (0.3, 0.6, 1.0):
            for arm in ARMS:
                if (wrong, arm, seed) in done:
                    continue
                run = train(problem(data, wrong, seed), arm, seed)
                accuracy = run["held_out_accuracy"][1]
                run = {"share": run["shares"][1], "called_bad": run["named"] == [1], "accuracy": accuracy}
                results.append({"wrong": wrong, "arm": arm, "seed": seed} | run)
                print(*results[-1].values(), flush=True)
                write_atomically(path, lambda file: file.write(json.dumps({"results": results}, indent=1).encode()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("digits", "cifar10"))
    parser.add_argument("--seeds", type=int, default=5)
    main(**vars(parser.parse_args()))
