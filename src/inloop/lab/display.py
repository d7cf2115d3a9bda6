"""What a person sees in the terminal: the live display of a run (on standard error), and its table at the end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from inloop.augment import get_space
from inloop.lab.augment_settings import AugmentSettings
from inloop.lab.seeds import Progress as SeedProgress
from inloop.lab.split_settings import SplitSettings
from inloop.lab.summary import mean_and_interval, show_interval

_BAR = 30


class RunDisplay:
    """Use as a context manager; call ``show`` with each epoch's progress."""

    def __init__(self, title: str, num_seeds: int, epochs: int) -> None:
        self.console = Console(file=sys.stderr)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task(title, total=num_seeds * epochs)
        self.epochs = epochs
        self.live = Live(self.progress, console=self.console, transient=True, refresh_per_second=8)

    def __enter__(self) -> "RunDisplay":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, now: SeedProgress) -> None:
        self.progress.update(self.task, completed=now.seed * self.epochs + now.epoch)
        if not self.console.is_terminal and now.epoch == self.epochs:
            self.console.print(f"seed {now.seed}: {self.epochs} epochs done, loss {now.loss:.3f}")
        self.live.update(Group(self.progress, _bars(now)))


def _bars(now: SeedProgress) -> Table:
    table = Table(title=f"seed {now.seed}, epoch {now.epoch}, loss {now.loss:.3f}", show_header=False, box=None)
    largest = max((bar.value for bar in now.bars), default=1.0)
    for bar in now.bars:
        length = "█" * round(_BAR * bar.value / max(largest, 1e-12))
        table.add_row(
            escape(bar.name), f"{bar.value:.3f}", f"[{'red' if bar.remark else 'cyan'}]{length}[/]", bar.remark
        )
    return table


def print_splits(results: Sequence[dict[str, Any]], settings: SplitSettings, out: Path) -> None:
    """The run's row of Table 1, which source hurts, and where the rest is."""
    console = Console()
    table = Table(
        title=f"{escape(settings.data)}, noise: {settings.noise}, {len(results)} seed(s), mean ± 95% interval"
    )
    uniform = (settings.sources - 1) / settings.sources
    for column in ("network", "reward", f"noisy split (uniform {uniform:.2f})", "other splits", "test accuracy"):
        table.add_column(column, justify="left" if column in ("network", "reward") else "right")
    values = [
        "-" if results[0][name] is None else show_interval(*mean_and_interval([result[name] for result in results]))
        for name in ("noisy_area", "other_area", "test_accuracy")
    ]
    table.add_row(settings.network, settings.reward, *values)
    console.print(table)
    if settings.reward == "gar":
        named: dict[int, int] = {}
        for result in results:
            for source in result["named"]:
                named[source] = named.get(source, 0) + 1
        if named:
            for source, times in sorted(named.items()):
                console.print(f"source {source} is called bad, by its rewards, in {times} of {len(results)} seed(s)")
        else:
            console.print("no source is called bad by its rewards")
    console.print(f"run: {out}", soft_wrap=True, highlight=False, markup=False)


def print_augment(results: Sequence[dict[str, Any]], settings: AugmentSettings, out: Path) -> None:
    """The run's accuracy, what was learned, and where the rest is."""
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
