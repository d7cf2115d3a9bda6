"""The few batched primitives that all image operations are made of, equal to Pillow pixel for pixel.

Axes: N images, C channels (1 or 3), H x W pixels, all uint8. Where Pillow computes in float32, float64 or fixed point, so do
these, in the same order of operations: its results are truncated, and a last bit decides a pixel.
"""

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
    return (start + factor * (images.to(torch.float32) - start)).clamp_(0, 255).to(torch.uint8)


def affine(images: Tensor, matrix_N6: Tensor) -> Tensor:
    """The pixel at (x, y) comes from (ax + by + c, dx + ey + f), the nearest one; black outside.

    Coordinates are those of pixel centres in Pillow's 16 bit fixed point. The matrix is float64.
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = matrix_N6.unbind(dim=1)
    at_origin = torch.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5])
    fixed = (at_origin * (1 << FIXED_POINT) + 0.5).floor_().to(torch.int32)
    a, b, c, d, e, f = fixed[:, :, None, None]
    x = torch.arange(width, device=images.device, dtype=torch.int32)
    y = torch.arange(height, device=images.device, dtype=torch.int32).unsqueeze(1)
    # Coordinates outside are moved onto a black frame, one pixel wide.
    from_x = (a * x + (b * y + c)).bitwise_right_shift_(FIXED_POINT).clamp_(-1, width)
    from_y = (d * x + (e * y + f)).bitwise_right_shift_(FIXED_POINT).clamp_(-1, height)
    index = torch.add(from_x, from_y, alpha=width + 2).add_(width + 3).long().flatten(1).unsqueeze(1)
    framed = F.pad(images, (1, 1, 1, 1)).flatten(2)
    return framed.gather(2, index.expand(-1, images.shape[1], -1)).view_as(images)


def erase(images: Tensor, box_N4: Tensor, colour_N3: Tensor) -> Tensor:
    """One colour from (x0, y0) to (x1, y1), both included; nothing where x1 < x0. Grey images take the colour's luma."""
    height, width = images.shape[2:]
    x0, y0, x1, y1 = box_N4.to(torch.int32)[:, :, None, None].unbind(dim=1)
    x = torch.arange(width, device=images.device, dtype=torch.int32)
    y = torch.arange(height, device=images.device, dtype=torch.int32).unsqueeze(1)
    inside = (((x >= x0) & (x <= x1)) & ((y >= y0) & (y <= y1))).unsqueeze(1)
    colour = colour_N3[:, :, None, None]
    return torch.where(inside, grey(colour).to(torch.uint8) if images.shape[1] == 1 else colour, images)


def replace(images: Tensor, others: Tensor) -> Tensor:
    """The other images: for operations that are none of the above."""
    return others


def grey(images: Tensor) -> Tensor:
    """Luma of each pixel, int32 [N, 1, H, W], as Pillow makes L of RGB."""
    if images.shape[1] == 1:
        return images.to(torch.int32)
    red, green, blue = images.to(torch.int32)[:, :, None].unbind(dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def histogram(images: Tensor) -> Tensor:
    """How often each value occurs, int64 [N, C, 256]."""
    values = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], 256, dtype=torch.long, device=images.device)
    return counts.scatter_add_(2, values, torch.ones_like(values))


def window_sum(images: Tensor, side: int) -> Tensor:
    """Sum over every side x side window that lies inside the image, int16 [N, C, H - side + 1, W - side + 1]."""
    height, width = images.shape[2:]
    # On flattened images the inner loops are long; sums that run over a line's end are cut off below.
    pixels = images.flatten(2).to(torch.int16)
    columns = _shifted_sum(pixels, [i * width for i in range(side)])
    windows = _shifted_sum(columns, list(range(side)))
    return F.pad(windows, (0, side - 1)).view(*images.shape[:2], height - side + 1, width)[..., : width - side + 1]


def _shifted_sum(values: Tensor, shifts: list[int]) -> Tensor:
    length = values.shape[-1] - shifts[-1]
    total = values[..., :length].clone()
    for shift in shifts[1:]:
        total += values[..., shift : shift + length]
    return total
