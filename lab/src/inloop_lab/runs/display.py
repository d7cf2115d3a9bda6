"""The display of a run in the terminal, on standard error."""

import sys
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from inloop_lab.runs.seed import SeedProgress

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
