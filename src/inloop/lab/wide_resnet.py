"""Wide residual networks as the paper's authors build them.

Pre-activation; (depth - 4) / 6 blocks in each of three stages of width 16k, 32k, 64k; in a block the second convolution has the
stride; the shortcut is a 1 x 1 convolution of the block's input where shapes change; all convolutions have a bias; torch's
own initialisation.
"""

import re
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError


class Block(nn.Module):
    """BatchNorm, ReLU, convolution, twice, around a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, stride=stride, padding=1)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x)))
        out = self.conv2(F.relu(self.norm2(out))) + self.shortcut(x)
        return cast(Tensor, out)


class WideResNet(nn.Module):
    """WRN-depth-width.

    Args:
        stem_stride: Of the first convolution; 2 quarters the cost of everything after it.
    """

    def __init__(self, depth: int, width: int, channels: int, num_classes: int, stem_stride: int = 1) -> None:
        super().__init__()
        blocks, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(channels, widths[0], 3, stride=stem_stride, padding=1)
        self.stages = nn.Sequential(
            *(
                Block(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage > 0 else 1)
                for stage in range(3)
                for first in [True] + [False] * (blocks - 1)
            )
        )
        self.norm = nn.BatchNorm2d(widths[3])
        self.linear = nn.Linear(widths[3], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.stages(self.stem(x))))
        return cast(Tensor, self.linear(out.mean(dim=(2, 3))))


def parse_wide_resnet(name: str) -> tuple[int, int, int]:
    """Depth, width and the first convolution's stride."""
    match = re.fullmatch(r"wrn-(\d+)-(\d+)(-s2)?", name)
    if match is None or (int(match[1]) - 4) % 6 or int(match[1]) < 10 or int(match[2]) < 1:
        raise UsageError(
            f"network={name!r}: allowed are wrn-DEPTH-WIDTH with DEPTH 10, 16, 22, 28, 34, 40, ..., such as wrn-28-10, and the same with "
            "-s2 at the end (first convolution with stride 2)."
        )
    return int(match[1]), int(match[2]), 2 if match[3] else 1


def make_wide_resnet(name: str, channels: int, num_classes: int) -> WideResNet:
    """``wrn-28-10`` and the like; ``-s2`` at the end gives the first convolution a stride of 2."""
    depth, width, stem_stride = parse_wide_resnet(name)
    return WideResNet(depth, width, channels, num_classes, stem_stride)
