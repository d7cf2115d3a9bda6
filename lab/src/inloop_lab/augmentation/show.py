"""The output of a finished run of the augmentation experiment: a table, or one JSON object."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inloop.augment import get_space
from inloop_lab.augmentation.settings import AugmentSettings
from inloop_lab.runs.summary import mean_and_interval, show_interval


def summarise_augment(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object for a run of the augmentation experiment: mean and half width over its seeds, and the seeds themselves."""
    first = results[0]
    judged = "test_accuracy" if first["test_accuracy"] is not None else "validation_accuracy"
    mean, half_width = mean_and_interval([result[judged] for result in results])
    summary = {name: first[name] for name in ("data", "network", "augment", "space", "test_accuracy")}
    return {
        **summary,
        judged: mean,
        "interval": None if math.isnan(half_width) else half_width,
        "results": list(results),
    }


def print_augment(results: Sequence[dict[str, Any]], settings: AugmentSettings, out: Path) -> None:
    """Print the run's accuracy, its learned policy, and its folder."""
    console = Console()
    judged = "validation_accuracy" if settings.validation else "test_accuracy"
    table = Table(title=f"{escape(settings.data)}, {len(results)} seed(s), mean ± 95% interval")
    for column in ("network", "augmentation", "space", judged.replace("_", " ")):
        table.add_column(column, justify="right" if "accuracy" in column else "left")
    accuracy = show_interval(*mean_and_interval([result[judged] for result in results]))
    table.add_row(settings.network, settings.augment, results[0]["space"] or "-", accuracy)
    console.print(table)
    if settings.augment == "ola":
        learned = Table(title="learned policy, mean over seeds at the end")
        for column in ("operation", "kept with probability", "mean strength of 0..30"):
            learned.add_column(column, justify="left" if column == "operation" else "right")
        last = [result["epochs"][-1] for result in results]
        for a, name in enumerate(results[0]["operations"]):
            keep, strength = (sum(e[what][a] for e in last) / len(last) for what in ("keep", "mean_strength"))
            has_strength = len(set(get_space(settings.space).magnitudes.get(name, ()))) > 1
            learned.add_row(escape(name), f"{keep:.3f}", f"{strength:.1f}" if has_strength else "-")
        console.print(learned)
    console.print(f"run: {out}", soft_wrap=True, highlight=False, markup=False)
