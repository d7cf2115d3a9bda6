"""The 1,797 handwritten digits that come with the package, 8 x 8 pixels, 10 classes: to try things with.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998
(https://doi.org/10.24432/C50P49), the test set, as distributed with scikit-learn; licence CC BY 4.0.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """Images as float32 in [-1, 1], shape [1797, 1, 8, 8], and labels, shape [1797], in the order of the file.

    Example:
        >>> images, labels = digits()
        >>> labels[:5]
        tensor([0, 1, 2, 3, 4])
    """
    pixels, labels = digit_pixels()
    return pixels.float().div_(127.5).sub_(1.0), labels


def digit_pixels() -> tuple[Tensor, Tensor]:
    """The same with images as uint8 in 0..255, for augmentation."""
    with (files("inloop.datasets") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        levels_NHW, labels_N = torch.from_numpy(arrays["images_NHW"]), torch.from_numpy(arrays["labels_N"])
    return (levels_NHW.float() * 255 / 16).round().to(torch.uint8).unsqueeze(1), labels_N.long()


def digit_sources(num_sources: int, bad: int) -> list[tuple[Tensor, Tensor]]:
    """The digits as sources of a :class:`inloop.Mixture`; the source ``bad`` has random labels, the same each time."""
    images, labels = digits()
    sources = list(zip(images.chunk(num_sources), labels.chunk(num_sources), strict=True))
    x, y = sources[bad]
    sources[bad] = x, torch.randint(10, y.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return sources
