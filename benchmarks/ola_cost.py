"""Time of a training step of OLA, as a ratio to one of UniformAugment: augmentation, forward, backward, reward, update.

    python -m benchmarks.ola_cost [--network wrn-16-4] [--batch 64] [--repeats 20] [--json]

Steps are timed in pairs: every second step of OLA is without operations, and rewards the other. Both kinds alternate within one
run; the report has medians. On random images, so no data is needed.
"""

import argparse
import json
import statistics
import time

import torch

from inloop_lab.augmentation.experiment import AugmentExperiment
from inloop_lab.augmentation.settings import AugmentSettings
from inloop_lab.data.images import ImageData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="wrn-16-4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2 * options.batch, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (2 * options.batch,), generator=generator)
    data = ImageData("random", images, labels, images, labels, num_classes=10)
    experiments = {
        augment: AugmentExperiment(
            AugmentSettings(network=options.network, batch=options.batch, augment=augment), data, 0
        )
        for augment in ("ua", "ola")
    }
    times: dict[str, list[float]] = {"ua": [], "ola": []}
    for repeat in range(options.repeats + 2):
        for augment, experiment in experiments.items():
            started = time.perf_counter()
            for _ in range(2):
                experiment.train_step(images[: options.batch], labels[: options.batch], 0.05)
            if repeat >= 2:  # the learner checks the first steps, which takes time
                times[augment].append((time.perf_counter() - started) / 2)
    seconds = {augment: statistics.median(values) for augment, values in times.items()}
    report = {
        "network": options.network,
        "batch": options.batch,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "ua_seconds": seconds["ua"],
        "ola_seconds": seconds["ola"],
        "time_ratio": seconds["ola"] / seconds["ua"],
    }
    print(json.dumps(report) if options.json else f"{report['time_ratio']:.3f} times UA ({report})")


if __name__ == "__main__":
    main()
