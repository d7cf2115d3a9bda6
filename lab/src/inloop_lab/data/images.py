"""Labelled images in memory, whichever data set they come from. Axes: N images, C channels, H x W pixels."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.errors import InloopError


class DataError(InloopError):
    """Data that is missing, damaged or of another form than expected."""


@dataclass(frozen=True)
class ImageData:
    """Train and test images as uint8 [N, C, H, W] with labels [N].

    Attributes:
        human_labels: Another label for each training image, by annotators who erred; None if there are none.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    human_labels: Tensor | None = None

    def digest(self) -> str:
        """A short digest of the training data, so that a run is not continued on other data."""
        sample = self.train_x[:: max(1, len(self.train_x) // 500)]
        content = hashlib.sha256(f"{tuple(self.train_x.shape)}".encode())
        for part in (self.train_y, sample):
            content.update(part.contiguous().numpy().tobytes())
        return content.hexdigest()[:16]


def to_input(images: Tensor) -> Tensor:
    """Pixels 0..255 as float32 in [-1, 1].

    With per-channel mean and standard deviation instead, plain FC diverges for some seeds at the paper's learning rate.
    """
    return images.to(torch.float32).div_(127.5).sub_(1.0)
