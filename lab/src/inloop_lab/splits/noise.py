"""Equal splits of a data set, the first of them made bad."""

from typing import Literal

import torch
from torch import Tensor

from inloop_lab.data.images import DataError, ImageData

Noise = Literal["labels", "images", "human", "none"]
NOISY_SPLIT = 0


def noisy_split(noise: str) -> int | None:
    """Which split is noisy; None if none is."""
    return None if noise == "none" else NOISY_SPLIT


def check_splits(data: ImageData, num_splits: int, noise: Noise) -> None:
    """Refuse splits and noise that this data does not allow."""
    if len(data.train_x) < num_splits:
        raise DataError(
            f"{data.name} has {len(data.train_x)} training examples; they cannot be split into {num_splits} sources."
        )
    if noise == "human" and data.human_labels is None:
        raise DataError(
            f"{data.name} has no human labels here. They are known for cifar10: put CIFAR-10N's into cifar-10n/labels.npz "
            "(array 'worse_label', in the order of the training files) beside the data."
        )


def make_splits(
    data: ImageData, num_splits: int, noise: Noise, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Random equal splits of the training data, as (images, labels); split 0 carries the noise, drawn once and then fixed.

    labels: every label is replaced by a uniform draw over the classes (some stay right by chance). images: every pixel is
    replaced by a uniform draw. human: labels that people gave, where the data set has them. none: nothing.
    """
    check_splits(data, num_splits, noise)
    size = len(data.train_x) // num_splits
    order = torch.randperm(len(data.train_x), generator=generator)
    parts = [order[k * size : (k + 1) * size] for k in range(num_splits)]
    splits = [(data.train_x[part], data.train_y[part]) for part in parts]
    images, labels = splits[NOISY_SPLIT]
    if noise == "labels":
        labels = torch.randint(data.num_classes, labels.shape, generator=generator)
    elif noise == "images":
        images = torch.randint(256, images.shape, generator=generator, dtype=torch.uint8)
    elif noise == "human":
        assert data.human_labels is not None
        labels = data.human_labels[parts[NOISY_SPLIT]]
    splits[NOISY_SPLIT] = images, labels
    return splits
