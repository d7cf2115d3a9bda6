"""The batched primitives of all image operations, equal to Pillow pixel for pixel.

Axes: N images, C channels (1 or 3), H x W pixels, all uint8. Where Pillow computes in float32, float64 or fixed point, so do
these, in the same order of operations: its results are truncated, and a last bit decides a pixel.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

FIXED_POINT = 16  # bits after the point in Pillow's affine transforms


def lookup(images: Tensor, table_NC256: Tensor) -> Tensor:
    """Each pixel's new value from a table for its image and channel."""
    return table_NC256.gather(2, images.flatten(2).long()).view_as(images)


def blend(images: Tensor, degenerate: Tensor, factor_N: Tensor) -> Tensor:
    """``d + f (x - d)`` with a degenerate image d, cut to 0..255: f = 0 gives d, 1 the image, 2 goes past it."""
    factor = factor_N.to(torch.float32).view(-1, 1, 1, 1)
    start = degenerate.to(torch.float32)
    return (images - start).mul_(factor).add_(start).clamp_(0, 255).to(torch.uint8)


def affine(images: Tensor, matrix_N23: Tensor) -> Tensor:
    """The pixel at (x, y) comes from (ax + by + c, dx + ey + f), the nearest one; black outside.

    Coordinates are pixel centres in Pillow's 16 bit fixed point. The matrix (a b c, d e f) is float64.
    """
    n, channels, height, width = images.shape
    at_center = matrix_N23[..., 2] + matrix_N23[..., 0] * 0.5 + matrix_N23[..., 1] * 0.5
    fixed = torch.cat([matrix_N23[..., :2], at_center.unsqueeze(2)], dim=2)
    fixed = fixed.mul_(1 << FIXED_POINT).add_(0.5).floor_().to(torch.int32)
    fixed[..., 2] += 1 << FIXED_POINT  # outside lies a black frame of one pixel, and coordinates count from its corner
    by_x, by_y, offset = fixed[..., None, None].unbind(dim=2)
    x, y, last = _grid(height, width, images.device)
    place_N2HW = (by_x * x + (by_y * y + offset)).bitwise_right_shift_(FIXED_POINT)
    from_x, from_y = place_N2HW.clamp_(min=0).minimum(last).unbind(dim=1)
    index = from_x.add_(from_y, alpha=width + 2).long().view(n, 1, -1)
    framed = F.pad(images, (1, 1, 1, 1)).flatten(2)
    return framed.gather(2, index.expand(-1, channels, -1)).view_as(images)


@lru_cache(maxsize=16)
def _grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [W], rows [H, 1], and the last place of each on the frame [2, 1, 1]; int32."""
    x = torch.arange(width, dtype=torch.int32, device=device)
    y = torch.arange(height, dtype=torch.int32, device=device).unsqueeze(1)
    return x, y, torch.tensor([width + 1, height + 1], dtype=torch.int32, device=device).view(2, 1, 1)


def erase(images: Tensor, box_N4: Tensor, colour_N3: Tensor) -> Tensor:
    """One colour from (x0, y0) to (x1, y1), both included; nothing where x1 < x0. Grey images take the colour's luma."""
    x, y, _ = _grid(*images.shape[2:], images.device)
    x0, y0, x1, y1 = box_N4[:, :, None, None, None].unbind(dim=1)
    inside = ((x >= x0) & (x <= x1)) & ((y >= y0) & (y <= y1))
    colour = colour_N3[:, :, None, None]
    return torch.where(inside, grey(colour).to(torch.uint8) if images.shape[1] == 1 else colour, images)


def replace(images: Tensor, others: Tensor) -> Tensor:
    """The other images: for operations that are none of the above."""
    return others


def grey(images: Tensor) -> Tensor:
    """Luma of each pixel, int32 [N, 1, H, W], as Pillow converts RGB to L."""
    if images.shape[1] == 1:
        return images.to(torch.int32)
    red, green, blue = images.to(torch.int32)[:, :, None].unbind(dim=1)
    weighted = red.mul_(19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(0x8000)
    return weighted.bitwise_right_shift_(16)


def histogram(images: Tensor) -> Tensor:
    """How often each value occurs, [N, C, 256]: whole numbers in float64, where division is fast and exact."""
    values = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], 256, dtype=torch.float64, device=images.device)
    return counts.scatter_add_(2, values, counts.new_ones(()).expand_as(values))


def window_sum(images: Tensor) -> Tensor:
    """Sum over every 3 x 3 window that lies inside the image, int16."""
    values = images.to(torch.int16)
    columns = (values[:, :, :-2] + values[:, :, 1:-1]).add_(values[:, :, 2:])
    return (columns[..., :-2] + columns[..., 1:-1]).add_(columns[..., 2:])


def ring_sum(images: Tensor) -> Tensor:
    """Sum over the 16 pixels on the border of every 5 x 5 window that lies inside the image, int16."""
    values = images.to(torch.int16)
    pairs = values[:, :, :-4] + values[:, :, 4:]  # upper and lower edge: five of these side by side
    twos = pairs[..., :-1] + pairs[..., 1:]
    edges = (twos[..., :-3] + twos[..., 2:-1]).add_(pairs[..., 4:])
    pairs = values[..., :-4] + values[..., 4:]  # left and right edge: three of these below each other
    return edges.add_(pairs[:, :, 1:-3]).add_(pairs[:, :, 2:-2]).add_(pairs[:, :, 3:-1])
