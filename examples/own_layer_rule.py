"""A layer of one's own, aligned by a rule of one's own: exact with and without, cheaper with it.

The layer is a circular convolution, computed by Fourier transforms. It is linear in its kernel, so
the rule is one line: run the layer with the direction in place of its kernel. Without a rule the
engine has to run it again.

    python examples/own_layer_rule.py
"""

import statistics
import time

import torch
from torch import Tensor, nn

import inloop
from inloop.alignment import linear_in_parameters


class CircularConvolution(nn.Module):
    """``out = x ⊛ kernel``, along the last axis."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(features) / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.fft.rfft(self.kernel)
        out: Tensor = torch.fft.irfft(spectrum, n=x.shape[-1])
        return out


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """One for each example."""
    return torch.tanh(model(x)).sum(dim=1).square()


def time_to_align(features: int = 1024) -> float:
    """Milliseconds for a step of 256 examples, and for their rewards in some direction."""
    layer = CircularConvolution(features)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        with inloop.capture(layer, reduction="sum") as tape:
            layer(torch.randn(256, features)).square().sum().backward()
        tape.align({"kernel": torch.ones(features)})
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> list[inloop.Check]:
    torch.manual_seed(0)
    model = nn.Sequential(CircularConvolution(64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(8, 64)
    without, milliseconds = inloop.check(model, x, losses), [time_to_align()]
    inloop.alignment_rule(CircularConvolution, parameters=("kernel",))(linear_in_parameters)
    with_rule = inloop.check(model, x, losses)
    milliseconds.append(time_to_align())
    for report, ms in zip((without, with_rule), milliseconds, strict=True):
        kernel = report.rows[0]
        print(
            f"{kernel.rule:32} exact: {kernel.exact}, error {kernel.relative_error:.0e}, "
            f"{ms:.2f} ms for 256 examples"
        )
    return [without, with_rule]


if __name__ == "__main__":
    main()
