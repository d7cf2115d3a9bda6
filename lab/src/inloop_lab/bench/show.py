"""The results of the benchmark as a table in the terminal and as a figure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from inloop.atomic_files import write_atomically
from inloop.errors import UsageError
from inloop.reporting.html import as_svg
from inloop_lab.bench.devices import device_of

_OURS, _OTHERS = "#0b6e99", "#b0b0b0"
_WIDE = 20  # a ratio above which a linear axis hides all others


def describe(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['mode']}{_where(row)}"
    if "error" in row:
        return f"{name}: {row['error']}"
    return f"{name}: {row['time_ratio']:.2f} x time, {row['memory_ratio']:.2f} x memory"


def _where(row: dict[str, Any]) -> str:
    """The device, unless it is the usual one."""
    device = device_of(row)
    return "" if device == "cpu" else f" on {device}"


def as_json(rows: Sequence[dict[str, Any]], overhead: dict[str, Any] | None = None) -> str:
    """Measured rows under "results", rows with an error under "skipped", and what :func:`measure_overhead` returns under "overhead"."""
    parts: dict[str, Any] = {
        "results": [row for row in rows if "error" not in row],
        "skipped": [row for row in rows if "error" in row],
    }
    return json.dumps(parts if overhead is None else parts | {"overhead": overhead}, indent=1)


def read_bench(path: Path) -> list[dict[str, Any]]:
    try:
        parts = json.loads(path.read_text())
        return [*parts["results"], *parts.get("skipped", [])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no results of `inloop bench --json` ({type(error).__name__}: {error}).") from None


def write_bench(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write((as_json(rows) + "\n").encode()))


def print_bench(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="one training step, as a ratio to plain training")
    for column in ("model", "batch", "device", "mode", "time", "memory", "seconds", "peak MB"):
        table.add_column(column, justify="left" if column in ("model", "device", "mode") else "right", no_wrap=True)
    for row in rows:
        if "error" not in row:
            ratios = f"{row['time_ratio']:.2f}", f"{row['memory_ratio']:.2f}"
            absolute = f"{row['seconds']:.3f}", f"{row['peak_bytes'] / 1e6:.0f}"
            table.add_row(row["model"], str(row["batch"]), device_of(row), row["mode"], *ratios, *absolute)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"skipped: {describe(row)}", highlight=False, markup=False)


def bench_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and memory ratios of every mode, a row of panels for each model on each device."""
    measured = [row for row in rows if "error" not in row]
    models = list(dict.fromkeys((row["model"], _where(row)) for row in measured))
    heights = [sum((row["model"], _where(row)) == model for row in measured) for model in models]
    figure = Figure(figsize=(10, 1 + 0.3 * sum(heights) + 0.6 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), 2, squeeze=False, height_ratios=heights)
    for line, (model, where) in zip(axes, models, strict=True):
        of_model = [row for row in measured if (row["model"], _where(row)) == (model, where)]
        of_model.sort(key=lambda row: (not row["mode"].startswith("gar"), row["mode"]))
        labels = [row["mode"] for row in of_model]
        colours = [_OURS if label.startswith("gar") else _OTHERS for label in labels]
        for axis, quantity in zip(line, ("time_ratio", "memory_ratio"), strict=True):
            ratios = [row[quantity] for row in of_model]
            bars = axis.barh(labels, ratios, color=colours)
            axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
            if max(ratios) > _WIDE:
                axis.set_xscale("log")
                axis.set_xlim(0.5, 4 * max(ratios))
            else:
                axis.set_xlim(0, 1.15 * max(ratios))
            axis.axvline(1, color="black", linewidth=0.6, linestyle=":")
            axis.invert_yaxis()
            axis.set_title(f"{model}{where}, batch {of_model[0]['batch']}: {quantity.partition('_')[0]}", fontsize=9)
    return figure


def write_bench_figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    svg = as_svg(bench_figure(rows))
    write_atomically(path, lambda file: file.write(svg.encode()))
