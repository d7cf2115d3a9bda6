"""The three small networks of the paper's split experiment, and other readings of the third."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from inloop.errors import UsageError

NETWORKS = (
    "fc",
    "fc-bn",
    "cnn-bn",
    "cnn-bn-literal",
    "cnn-bn-stride2",
    "cnn-bn-stride3",
    "cnn-bn-maxpool",
    "cnn-bn-detached",
)


class DetachedBatchNorm(nn.BatchNorm2d):
    """BatchNorm of one channel, without scale and shift, whose statistics count as constants in the backward pass."""

    def __init__(self) -> None:
        super().__init__(1, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            super().forward(x)  # moves the running statistics
            variance, mean = torch.var_mean(x, correction=0)
        return (x - mean) / (variance + self.eps).sqrt()


def make_network(name: str, shape: Sequence[int], num_classes: int) -> nn.Module:
    """``fc`` and ``fc-bn`` have one hidden layer of 200 units; ``cnn-bn`` one 3 x 3 convolution to a single channel.

    Args:
        shape: Of one image, (channels, height, width).
    """
    channels, height, width = shape
    features = channels * height * width
    if name == "fc":
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 200), nn.ReLU(), nn.Linear(200, num_classes))
    if name == "fc-bn":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(features, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, num_classes)
        )
    if name in NETWORKS:
        return _cnn_bn(name.removeprefix("cnn-bn").removeprefix("-"), channels, height, width, num_classes)
    raise UsageError(f"network={name!r}: allowed are {', '.join(NETWORKS)}.")


def _cnn_bn(reading: str, channels: int, height: int, width: int, num_classes: int) -> nn.Module:
    """Convolution, BatchNorm, ReLU, linear layer, in one of several readings of the paper's sentence.

    Read literally, a map of the image's own size feeds the linear layer: a thousand positive features, too steep for the
    paper's learning rate. ``cnn-bn`` averages the map over 2 x 2 pixels; the others shrink it in other ways, or not.
    ``detached`` averages, too, and gradients do not flow through its batch statistics.
    """
    stride = {"stride2": 2, "stride3": 3}.get(reading, 1)
    pool: dict[str, nn.Module] = {"": nn.AvgPool2d(2), "detached": nn.AvgPool2d(2), "maxpool": nn.MaxPool2d(2)}
    shrink = 2 if reading in pool else 1
    rows, columns = ((-(-side // stride)) // shrink for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 1, 3, stride=stride, padding=1),
        DetachedBatchNorm() if reading == "detached" else nn.BatchNorm2d(1),
        nn.ReLU(),
        pool.get(reading, nn.Identity()),
        nn.Flatten(),
        nn.Linear(rows * columns, num_classes),
    )
