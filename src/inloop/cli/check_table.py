"""The result of ``inloop check`` in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inloop.brute_force import Row
from inloop.checking import Check


def print_check(check: Check, console: Console) -> None:
    if check.rows:
        console.print(_table(check, longest_name=max(16, console.width - 48)))
    for text in check.problems:
        console.print(f"[red]{'wrong' if check.rows else 'refused'}[/] {escape(text)}", highlight=False)
    for text in check.warnings:
        console.print(f"[yellow]note[/] {escape(text)}", highlight=False)
    if check.ok:
        kept = sum(row.bytes_per_example for row in check.rows)
        console.print(
            f"[green]exact[/] {_counted(check)} parameters, {check.num_examples} examples in {check.dtype}: largest relative error "
            f"{check.max_relative_error:.0e}; {_bytes(kept)} kept of each example",
            highlight=False,
        )


def _counted(check: Check) -> int:
    return sum(row.relative_error is not None for row in check.rows)


def _table(check: Check, longest_name: int) -> Table:
    table = Table(title="every parameter against brute force", title_justify="left", box=None, pad_edge=False)
    for column in ("parameter", "shape", "aligned as", "error", "kept", "cost"):
        right = column in ("error", "kept", "cost")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column != "aligned as")
    for row in check.rows:
        table.add_row(
            escape(_shortened(row.parameter, longest_name)),
            "x".join(map(str, row.shape)) or "scalar",
            escape(row.rule or row.note),
            _error(row),
            _bytes(row.bytes_per_example) if row.rule else "",
            f"{row.cost:.0%}" if row.rule else "",
            style="" if row.rule else "dim",
        )
    return table


def _shortened(name: str, length: int) -> str:
    """The name without its middle, if it is too long."""
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[:half]}…{name[-half:]}"


def _error(row: Row) -> str:
    if row.relative_error is None:
        return ""
    colour = "green" if row.exact else "red"
    return f"[{colour}]{row.relative_error:.0e}[/]"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
