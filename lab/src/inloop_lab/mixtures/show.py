"""The output of a finished run on a mixture of domains: a table, or one JSON object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inloop_lab.mixtures.settings import MixtureSettings
from inloop_lab.runs.summary import mean_and_interval, show_interval


def summarise_mixture(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object for a run: means over its seeds, and the seeds themselves under "results"."""
    names = results[0]["shares"]
    targets = [result["target_loss"] for result in results]
    return {
        "mixture": results[0]["mixture"],
        "held_out_loss": mean_and_interval([result["held_out_loss"] for result in results])[0],
        "target_loss": None if targets[0] is None else mean_and_interval(targets)[0],
        "shares": {name: mean_and_interval([result["shares"][name] for result in results])[0] for name in names},
        "flagged": sorted({name for result in results for name in result["flagged"]}),
        "results": list(results),
    }


def print_mixture(results: Sequence[dict[str, Any]], settings: MixtureSettings, out: Path) -> None:
    """Print a line for each domain, the mean loss, and the run's folder."""
    console = Console()
    table = Table(title=f"{settings.mixture}, {len(results)} seed(s), mean ± 95% interval")
    for column in ("domain", "share at the end", "epochs", "held-out loss (nats a token)", "verdict"):
        table.add_column(column, justify="left" if column in ("domain", "verdict") else "right")
    for number, name in enumerate(results[0]["shares"]):
        words = sorted({result["words"].get(name, "") for result in results})
        table.add_row(
            name,
            show_interval(*mean_and_interval([result["shares"][name] for result in results])),
            f"{mean_and_interval([result['effective_epochs'][number] for result in results])[0]:.2f}",
            show_interval(*mean_and_interval([result["held_out"][name] for result in results])),
            " / ".join(filter(None, words)),
        )
    console.print(table)
    mean = show_interval(*mean_and_interval([result["held_out_loss"] for result in results]))
    console.print(f"mean held-out loss of the domains: {mean}")
    if results[0]["target_loss"] is not None:
        target = show_interval(*mean_and_interval([result["target_loss"] for result in results]))
        console.print(f"loss on the target: {target}")
    console.print(f"run: {out}", soft_wrap=True, highlight=False, markup=False)
