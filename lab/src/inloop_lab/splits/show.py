"""The output of a finished run of the split experiment: a table, or one JSON object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inloop_lab.runs.summary import mean_and_interval, show_interval
from inloop_lab.splits.noise import noisy_split
from inloop_lab.splits.settings import SplitSettings


def summarise_splits(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object for a run: means over its seeds, and the seeds themselves under "results"."""
    first = results[0]

    def mean(name: str) -> float | None:
        return None if first[name] is None else mean_and_interval([result[name] for result in results])[0]

    return {
        "network": first["network"],
        "reward": first["reward"],
        "noisy_area": mean("noisy_area"),
        "other_area": mean("other_area"),
        "test_accuracy": mean("test_accuracy"),
        "named": sorted({source for result in results for source in result["named"]}),
        "results": list(results),
    }


def print_splits(results: Sequence[dict[str, Any]], settings: SplitSettings, out: Path) -> None:
    """Print the run's row of Table 1, the bad splits, and its folder."""
    console = Console()
    table = Table(
        title=f"{escape(settings.data)}, noise: {settings.noise}, {len(results)} seed(s), mean ± 95% interval"
    )
    uniform = (settings.sources - 1) / settings.sources
    for column in ("network", "reward", f"noisy split, area (equal: {uniform:.2f})", "other splits", "test accuracy"):
        table.add_column(column, justify="left" if column in ("network", "reward") else "right")
    values = [
        "-" if results[0][name] is None else show_interval(*mean_and_interval([result[name] for result in results]))
        for name in ("noisy_area", "other_area", "test_accuracy")
    ]
    table.add_row(settings.network, settings.reward, *values)
    console.print(table)
    if (noisy := noisy_split(settings.noise)) is not None:
        last = [result["epochs"][-1]["probabilities"][noisy] for result in results]
        console.print(
            f"share of the noisy split in the last epoch: {show_interval(*mean_and_interval(last))} (used equally: {1 / settings.sources:.3f})"
        )
    if settings.reward == "gar":
        named: dict[int, int] = {}
        for result in results:
            for split in result["named"]:
                named[split] = named.get(split, 0) + 1
        if named:
            for split, times in sorted(named.items()):
                console.print(f"split {split} is called bad, by its rewards, in {times} of {len(results)} seed(s)")
        else:
            console.print("no split is called bad by its rewards")
    console.print(f"run: {out}", soft_wrap=True, highlight=False, markup=False)
