"""Wide residual networks as the paper's authors build them.

Pre-activation; (depth - 4) / 6 blocks in each of three stages of width 16k, 32k, 64k; in a block the second convolution has the
stride; the shortcut is a 1 x 1 convolution of the block's input where shapes change; all convolutions have a bias; torch's
own initialisation.
"""

import re
from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError


class Block(nn.Module):
    """BatchNorm, ReLU, convolution, twice, around a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1 = norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = norm(channels_out)
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
        group_norm: GroupNorm, 8 channels a group, in place of BatchNorm.
    """

    def __init__(
        self, depth: int, width: int, channels: int, num_classes: int, stem_stride: int = 1, group_norm: bool = False
    ) -> None:
        super().__init__()
        blocks, widths = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        norm: Callable[[int], nn.Module] = _groups_of_8 if group_norm else nn.BatchNorm2d
        self.stem = nn.Conv2d(channels, widths[0], 3, stride=stem_stride, padding=1)
        self.stages = nn.Sequential(
            *(
                Block(
                    widths[stage] if first else widths[stage + 1],
                    widths[stage + 1],
                    2 if first and stage > 0 else 1,
                    norm,
                )
                for stage in range(3)
                for first in [True] + [False] * (blocks - 1)
            )
        )
        self.norm = norm(widths[3])
        self.linear = nn.Linear(widths[3], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.stages(self.stem(x))))
        return cast(Tensor, self.linear(out.mean(dim=(2, 3))))


def _groups_of_8(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 8, channels)


def parse_wide_resnet(name: str) -> dict[str, Any]:
    """The arguments of ``WideResNet`` that a name stands for."""
    match = re.fullmatch(r"wrn-(\d+)-(\d+)(-gn)?(-s2)?", name)
    if match is None or (int(match[1]) - 4) % 6 or int(match[1]) < 10 or int(match[2]) < 1:
        raise UsageError(
            f"network={name!r}: allowed are wrn-DEPTH-WIDTH with DEPTH 10, 16, 22, 28, 34, 40, ..., such as wrn-28-10; -gn behind it for "
            "GroupNorm, and -s2 for a stride of 2 in the first convolution."
        )
    return {
        "depth": int(match[1]),
        "width": int(match[2]),
        "group_norm": bool(match[3]),
        "stem_stride": 2 if match[4] else 1,
    }


def make_wide_resnet(name: str, channels: int, num_classes: int) -> WideResNet:
    """``wrn-28-10`` and the like; with ``-gn`` for GroupNorm, with ``-s2`` for a first convolution with a stride of 2."""
    return WideResNet(channels=channels, num_classes=num_classes, **parse_wide_resnet(name))
