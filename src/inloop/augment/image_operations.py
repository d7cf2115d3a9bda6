"""The image operations: each prepares its primitive's arguments, from its images and magnitudes.

A *magnitude* is the operation's own argument: degrees, pixels, bits, a blending factor (see ``spaces`` for how strengths
become magnitudes); a *center* is a point (x, y) in pixels. The result of a function here stands after ``images`` in the call
of its primitive.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from inloop.augment.primitives import affine, blend, erase, grey, histogram, lookup, replace, ring_sum, window_sum
from inloop.augment.registry import operation


@lru_cache(maxsize=16)
def _all_values(device: torch.device) -> Tensor:
    return torch.arange(256, device=device)


def _values(images: Tensor) -> Tensor:
    return _all_values(images.device)


def _same_for_all_channels(images: Tensor, table_N256: Tensor) -> Tensor:
    return table_N256.to(torch.uint8).unsqueeze(1).expand(-1, images.shape[1], -1)


# ------------------------------------------------------------------ lookups


@operation(lookup)
def solarize(images: Tensor, threshold_N: Tensor, center_N2: Tensor) -> Tensor:
    """Values from the threshold on are inverted."""
    i = _values(images)
    return _same_for_all_channels(images, torch.where(i < threshold_N.unsqueeze(1), i, 255 - i))


@operation(lookup)
def posterize(images: Tensor, bits_N: Tensor, center_N2: Tensor) -> Tensor:
    """Only the highest bits are kept."""
    dropped_N1 = (8 - bits_N.long()).unsqueeze(1)
    return _same_for_all_channels(images, _values(images) >> dropped_N1 << dropped_N1)


@operation(lookup)
def invert(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    return _same_for_all_channels(images, (255 - _values(images)).expand(len(magnitude_N), -1))


@operation(lookup, needs_pixels=True)
def auto_contrast(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    """Each channel stretched to 0..255."""
    pixels = images.flatten(2)
    low, high = pixels.amin(dim=2, keepdim=True).double(), pixels.amax(dim=2, keepdim=True).double()
    scale = torch.full_like(high, 255.0) / (high - low)  # a number divided by a tensor would be rounded twice
    i = _values(images)
    stretched = (i * scale).add_(-low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, i).to(torch.uint8)


@operation(lookup, needs_pixels=True)
def equalize(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    """Each channel's values spread so that all occur about equally often."""
    counts = histogram(images)
    brightest = images.flatten(2).amax(dim=2, keepdim=True).long()
    step = ((images[0, 0].numel() - counts.gather(2, brightest)) / 255).floor_()
    below = counts.cumsum(dim=2).sub_(counts)
    spread = below.add_(step / 2).div_(step).clamp_(max=255)
    return torch.where(step > 0, spread, _values(images)).to(torch.uint8)


# ------------------------------------------------------------------ blends


@operation(blend, needs_pixels=True)
def brightness(images: Tensor, factor_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(images), factor_N


@operation(blend, needs_pixels=True)
def color(images: Tensor, factor_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    return grey(images).to(torch.uint8).expand_as(images), factor_N


@operation(blend, needs_pixels=True)
def contrast(images: Tensor, factor_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    luma = grey(images).flatten(1)
    mean_N = (luma.sum(dim=1, dtype=torch.float64) / luma.shape[1] + 0.5).to(torch.uint8)
    return mean_N.view(-1, 1, 1, 1).expand_as(images), factor_N


@operation(blend, needs_pixels=True)
def sharpness(images: Tensor, factor_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    """Against the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13. The border, where the window does not fit, stays."""
    smooth = images.clone()
    if min(images.shape[2:]) >= 3:
        weighted = window_sum(images).add_(images[:, :, 1:-1, 1:-1], alpha=4)
        # Sums of 13ths are never near a half, so float32 rounds them right.
        smooth[:, :, 1:-1, 1:-1] = weighted.to(torch.float32).div_(13).add_(0.5)
    return smooth, factor_N


# ------------------------------------------------------------------ affine maps


def _matrix(like_N: Tensor, **entries: Tensor | float) -> Tensor:
    """[N, 2, 3]: the identity except for the named entries of a b c, d e f."""
    matrix_N6 = like_N.new_zeros(len(like_N), 6)
    matrix_N6[:, ::4] = 1  # a and e
    for name, entry in entries.items():
        matrix_N6[:, "abcdef".index(name)] = entry
    return matrix_N6.view(-1, 2, 3)


@operation(affine, signed=True)
def rotate(images: Tensor, degrees_N: Tensor, center_N2: Tensor) -> Tensor:
    """Counter-clockwise about the middle."""
    distinct, which_N = torch.unique(degrees_N, return_inverse=True)
    cosine_N, sine_N = torch.tensor(
        [_cosine_and_sine(d) for d in distinct.tolist()], dtype=torch.float64, device=images.device
    )[which_N].unbind(dim=1)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    c_N = cosine_N * -x + sine_N * -y + x
    f_N = -sine_N * -x + cosine_N * -y + y
    return torch.stack([cosine_N, sine_N, c_N, -sine_N, cosine_N, f_N], dim=1).view(-1, 2, 3)


@lru_cache(maxsize=1024)
def _cosine_and_sine(degrees: float) -> tuple[float, float]:
    """As in Pillow: of the negative angle, rounded to 15 digits."""
    angle = -math.radians(degrees % 360.0)
    return round(math.cos(angle), 15), round(math.sin(angle), 15)


@operation(affine, signed=True)
def shear_x(images: Tensor, shear_N: Tensor, center_N2: Tensor) -> Tensor:
    return _matrix(shear_N, b=shear_N)


@operation(affine, signed=True)
def shear_y(images: Tensor, shear_N: Tensor, center_N2: Tensor) -> Tensor:
    return _matrix(shear_N, d=shear_N)


@operation(affine, signed=True)
def translate_x(images: Tensor, pixels_N: Tensor, center_N2: Tensor) -> Tensor:
    """The content moves left by ``pixels_N``; fractions of a pixel are rounded."""
    return _matrix(pixels_N, c=(pixels_N + 0.5).floor())


@operation(affine, signed=True)
def translate_y(images: Tensor, pixels_N: Tensor, center_N2: Tensor) -> Tensor:
    return _matrix(pixels_N, f=(pixels_N + 0.5).floor())


@operation(affine)
def flip_lr(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    return _matrix(magnitude_N, a=-1, c=images.shape[3])


@operation(affine)
def flip_ud(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    return _matrix(magnitude_N, e=-1, f=images.shape[2])


# ------------------------------------------------------------------ filter, box, nothing


@operation(replace, needs_pixels=True)
def blur(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    """The mean of the 16 pixels at distance two. The border, where the ring does not fit, stays."""
    blurred = images.clone()
    if min(images.shape[2:]) >= 5:
        blurred[:, :, 2:-2, 2:-2] = ring_sum(images).add_(8).bitwise_right_shift_(4)
    return blurred


@operation(erase)
def cutout(images: Tensor, share_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    """A black box, its side a share of the width, rounded down, and one pixel more.

    The extra pixel is Pillow's: the last corner of its rectangles is included. At the left and upper edge the box is moved into
    the image, at the others it is cut. A side of 0 is no box.
    """
    side_N = (share_N * images.shape[3] + 1e-9).floor()
    return _moved_box(side_N, side_N, center_N2), _colour(share_N, (0, 0, 0))


@operation(erase)
def cutout_grey(images: Tensor, share_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    """Fast AutoAugment's cutout: in grey, and the side is not rounded before the box is placed."""
    side_N = share_N * images.shape[3]
    return _moved_box(side_N, (side_N + 1e-9).floor(), center_N2), _colour(share_N, (125, 123, 114))


@operation(erase)
def cutout_centered(images: Tensor, share_N: Tensor, center_N2: Tensor) -> tuple[Tensor, Tensor]:
    """PBA's cutout: a grey box of an even side around a pixel, cut at all edges."""
    reach_N1 = (share_N * images.shape[3] / 2 + 1e-9).floor().unsqueeze(1)
    pixel_N2 = center_N2.floor()
    return torch.cat([pixel_N2 - reach_N1, pixel_N2 + reach_N1 - 1], dim=1), _colour(share_N, (125, 122, 113))


def _moved_box(side_N: Tensor, whole_side_N: Tensor, center_N2: Tensor) -> Tensor:
    start_N2 = (center_N2 - side_N.unsqueeze(1) / 2).clamp_min(0).floor()
    return torch.cat([start_N2, torch.where(side_N.unsqueeze(1) > 0, start_N2 + whole_side_N.unsqueeze(1), -1)], dim=1)


def _colour(like_N: Tensor, colour: tuple[int, int, int]) -> Tensor:
    return torch.tensor(colour, dtype=torch.uint8, device=like_N.device).expand(len(like_N), -1)


@operation(replace, needs_pixels=True)
def identity(images: Tensor, magnitude_N: Tensor, center_N2: Tensor) -> Tensor:
    return images
