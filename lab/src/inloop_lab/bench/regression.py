"""Compares a bench with earlier results: has a ratio become worse by more than its noise?"""

from collections.abc import Sequence
from typing import Any

from inloop_lab.bench.devices import device_of

MEMORY_SLACK = 0.01  # memory is counted, not timed: the same code has the same peak
TIME_SLACK = 0.05  # beyond the quartiles of both measurements, as machines differ from day to day


def find_regressions(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each ratio that has become worse.

    A time ratio is worse if its lower quartile exceeds the earlier upper quartile by more than ``TIME_SLACK``.
    """
    then = {_key(row): row for row in before if "error" not in row}
    worse = []
    for row in rows:
        old = then.get(_key(row))
        name = f"{row['model']} {row['mode']}, batch {row['batch']}"
        if old is None:
            continue
        if "error" in row:
            worse.append(f"{name}: does not work any more: {row['error']}")
            continue
        if row["time_ratio_quartiles"][0] > old["time_ratio_quartiles"][1] + TIME_SLACK:
            worse.append(f"{name}: {row['time_ratio']:.2f} x time, was {old['time_ratio']:.2f}")
        if row["memory_ratio"] > old["memory_ratio"] * (1 + MEMORY_SLACK):
            worse.append(f"{name}: {row['memory_ratio']:.3f} x memory, was {old['memory_ratio']:.3f}")
    return worse


def _key(row: dict[str, Any]) -> tuple[str, str, int, str]:
    return row["model"], row["mode"], row["batch"], device_of(row)
