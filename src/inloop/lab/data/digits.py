"""The 1,797 handwritten digits that come with the package, 8 x 8 pixels, 10 classes.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998
(https://doi.org/10.24432/C50P49), the test part, as distributed with scikit-learn; licence CC BY 4.0.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from inloop.lab.data.images import ImageData, to_input


def load_digits() -> tuple[Tensor, Tensor]:
    """Images as float32 in [-1, 1], shape [N, 1, 8, 8], and labels, shape [N], in the order of the file."""
    images, labels = _read()
    return to_input(images), labels


def digit_sources(num_sources: int, bad: int) -> list[tuple[Tensor, Tensor]]:
    """The digits in so many parts, one of which has random labels, the same each time."""
    images, labels = load_digits()
    sources = list(zip(images.chunk(num_sources), labels.chunk(num_sources), strict=True))
    x, y = sources[bad]
    sources[bad] = x, torch.randint(10, y.shape, generator=torch.Generator().manual_seed(0))
    return sources


def digits(num_test: int = 297) -> ImageData:
    """The same as train and test images; which are which is fixed, and independent of the order of the file (by writer)."""
    images, labels = _read()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return ImageData(
        "digits", images[num_test:], labels[num_test:], images[:num_test], labels[:num_test], num_classes=10
    )


def _read() -> tuple[Tensor, Tensor]:
    with (files("inloop.lab.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        levels_NHW, labels_N = torch.from_numpy(arrays["images_NHW"]), torch.from_numpy(arrays["labels_N"])
    return (levels_NHW.float() * 255 / 16).round().to(torch.uint8).unsqueeze(1), labels_N.long()
