"""A few steps of one of the paper's full recipes, to see that it runs: losses, rewards, time and memory.

    python -m benchmarks.paper_recipe [--preset paper-cifar100-wl] [--steps 4] [--json]

On random images of CIFAR's size: the output does not depend on them, and no data is needed. WRN-28-10 at batch 256 needs
about 16 GB.
"""

import argparse
import json
import resource
import time

import torch

from inloop.report import StepReport
from inloop_lab.augmentation.experiment import AugmentExperiment, learning_rate
from inloop_lab.augmentation.settings import PRESETS, with_augment_defaults
from inloop_lab.data.images import ImageData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="paper-cifar100-wl")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = with_augment_defaults(**PRESETS[options.preset])
    generator = torch.Generator().manual_seed(0)
    num_classes = 100 if settings.data == "cifar100" else 10
    images = torch.randint(256, (2 * settings.batch, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(num_classes, (2 * settings.batch,), generator=generator)
    data = ImageData(settings.data, images, labels, images, labels, num_classes)
    experiment = AugmentExperiment(settings, data, 0)
    assert experiment.learner is not None
    reports: list[StepReport] = []
    experiment.learner.callback = reports.append
    steps = []
    for step in range(options.steps):
        started = time.perf_counter()
        loss = experiment.train_step(
            images[: settings.batch], labels[: settings.batch], learning_rate(settings, step / 195)
        )
        report = reports[-1]
        steps.append(
            {
                "loss": round(loss, 4),
                "paid": report.rewarded,
                "reward_std": round(report.reward_std, 6) if report.rewarded else None,
                "policy_moved": report.updated,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    result = {
        "preset": options.preset,
        "network": settings.network,
        "batch": settings.batch,
        "parameters": sum(p.numel() for p in experiment.model.parameters()),
        "policy_parameters": sum(p.numel() for p in experiment.learner.policy.parameters()),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
        "steps": steps,
    }
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
