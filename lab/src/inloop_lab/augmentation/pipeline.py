"""The steps after the augmentation policy, batched: random crop, flip, normalisation, Cutout. Axes: N images, C, H, W.

All random numbers of a batch come from one generator in the same number and order for all images, so that two runs
with the same seed crop, flip and cut the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inloop.augment.primitives import affine

# Of CIFAR-10; the authors use them for CIFAR-100, too.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class StandardPipeline:
    """Zero padding and a random crop to the old size, flip left-right half the time, normalisation, Cutout.

    Attributes:
        padding: Pixels on each side.
        cutout: Side of the square that is set to the mean colour, 0 for none; cut at the edges, as in DARTS.
    """

    padding: int = 4
    flip: bool = True
    cutout: int = 16

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """uint8 images as normalised float32."""
        n, _, height, width = images.shape
        shift_N2 = torch.randint(2 * self.padding + 1, (n, 2), generator=generator) - self.padding
        mirrored_N = (torch.rand(n, generator=generator) < 0.5) & self.flip
        center_N2 = torch.rand(n, 2, generator=generator) * torch.tensor([width, height])
        cropped = affine(images, crop_and_flip(shift_N2, mirrored_N, width))
        return cut_out(normalise_images(cropped), center_N2.long(), self.cutout)


def crop_and_flip(shift_N2: Tensor, mirrored_N: Tensor, width: int) -> Tensor:
    """The matrix [N, 2, 3] that moves images by (x, y) pixels, then mirrors some of them."""
    x_N, y_N = shift_N2.double().unbind(dim=1)
    one = torch.ones_like(x_N)
    a_N = torch.where(mirrored_N, -1.0, one)
    c_N = torch.where(mirrored_N, width + x_N, x_N)
    return torch.stack([a_N, 0 * one, c_N, 0 * one, one, y_N], dim=1).view(-1, 2, 3)


def normalise_images(images: Tensor) -> Tensor:
    """Normalise each channel by CIFAR's mean and standard deviation; grey images by one half each."""
    mean, std = (_MEAN, _STD) if images.shape[1] == 3 else ((0.5,), (0.5,))
    mean_C11, std_C11 = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (mean, std))
    return (images.to(torch.float32) / 255 - mean_C11) / std_C11


def cut_out(images: Tensor, center_N2: Tensor, side: int) -> Tensor:
    """A square of zeros, the mean colour, around each center (x, y)."""
    if side == 0:
        return images
    before = side // 2

    def inside(center_N: Tensor, length: int) -> Tensor:
        place = torch.arange(length) - center_N.unsqueeze(1)
        return (place >= -before) & (place < side - before)

    x_NW, y_NH = inside(center_N2[:, 0], images.shape[3]), inside(center_N2[:, 1], images.shape[2])
    box = (y_NH[:, None, :, None] & x_NW[:, None, None, :]).to(images.device)
    return images * ~box
