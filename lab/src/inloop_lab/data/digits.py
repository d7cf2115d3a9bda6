"""The digits that come with inloop, as train and test images."""

import torch

from inloop.datasets import digit_pixels
from inloop_lab.data.images import ImageData


def load_digits(num_test: int = 297) -> ImageData:
    """1,500 images to train with and 297 to test; the split is fixed, and independent of the order of the file (by writer)."""
    images, labels = digit_pixels()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return ImageData(
        "digits", images[num_test:], labels[num_test:], images[:num_test], labels[:num_test], num_classes=10
    )
