"""Means over seeds with their 95% confidence intervals, SEM times t(0.975, n - 1)."""

import math
from collections.abc import Sequence
from statistics import NormalDist

# t(0.975, df) for df = 1, 2, ...
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95% interval; nan for the latter with a single value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    quantile = _T[n - 2] if n - 2 < len(_T) else t_quantile(0.975, n - 1)
    return mean, quantile * math.sqrt(variance / n)


def show_interval(mean: float, half_width: float, digits: int = 3) -> str:
    return f"{mean:.{digits}f}" if math.isnan(half_width) else f"{mean:.{digits}f} ± {half_width:.{digits}f}"


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t, by Cornish and Fisher's expansion; within 4% from 4 degrees of freedom on, up to probability 0.999."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
