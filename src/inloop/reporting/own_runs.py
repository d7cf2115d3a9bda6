"""The report on a user's own run, from the file that :class:`inloop.Records` wrote."""

import json
from collections.abc import Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from inloop.records import read_records
from inloop.report import describe_collapse, is_collapsing
from inloop.reporting.html import html_figure, html_table, note

_MOST_LABELS = 20  # figures with more lines have no legend

Record = dict[str, Any]


def is_records(path: Path) -> bool:
    """Whether one of the first lines is a step of :class:`inloop.Records`."""
    try:
        with path.open() as file:
            return any(_is_record(line) for line in islice(file, 3))
    except (OSError, ValueError):
        return False


def _is_record(line: str) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and {"step", "dropped", "num_dropped"} <= record.keys()


def own_sections(paths: Sequence[Path], figure_path: Path) -> list[str]:
    """A section for each file of records; writes its figures beside ``figure_path``, under names that begin with it."""
    return [
        _section(path, figure_path if len(paths) == 1 else figure_path.with_name(f"{figure_path.name}-{number}"))
        for number, path in enumerate(paths, start=1)
    ]


def _section(path: Path, figure_path: Path) -> str:
    records = read_records(path)
    dropped = int(records[-1]["num_dropped"])
    parts = [
        f"<h1>{escape(path.name)}</h1>",
        f"<p>Steps {records[0]['step']} to {records[-1]['step']}, {len(records)} of them recorded; {dropped} dropped.</p>",
    ]
    groups = _groups(records)
    for number, (group, choices) in enumerate(groups.items(), start=1):
        title = group.replace("/", ", ") or "Shares"
        name = f"{figure_path.name}-shares" + (f"-{number}" if len(groups) > 1 else "")
        figure = _shares_over_steps(records, group, choices)
        parts += [f"<h2>{escape(title)}</h2>", html_figure(figure, figure_path.with_name(name))]
        parts += [_table(records, group, choices), _warning(records, group, choices)]
    if not groups:
        parts.append(note("The policy has no shares to show: its choices depend on each other."))
    return "".join(parts)


def _groups(records: Sequence[Record]) -> dict[str, list[str]]:
    """The choices of each distribution, by its name: "" if the policy has only one, else the name of a product's factor."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        kind, _, choice = name.partition("/")
        if kind == "probability":
            group, _, last = choice.rpartition("/")
            groups.setdefault(group, []).append(last)
    return groups


def _name(kind: str, group: str, choice: str) -> str:
    return "/".join(part for part in (kind, group, choice) if part)


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


def _shares_over_steps(records: Sequence[Record], group: str, choices: Sequence[str]) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["tab10" if len(choices) <= 10 else "tab20"]
    for number, choice in enumerate(choices):
        name = _name("probability", group, choice)
        steps = [record["step"] for record in records if name in record]
        axis.plot(steps, _values(records, name), color=colours(number % 20), linewidth=1.5, label=choice)
    axis.axhline(1 / len(choices), color="black", linewidth=0.6, linestyle=":")
    axis.set(xlabel="step", ylabel="share", ylim=(0, None))
    if len(choices) <= _MOST_LABELS:
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _table(records: Sequence[Record], group: str, choices: Sequence[str]) -> str:
    rows = []
    for choice in choices:
        shares = _values(records, _name("probability", group, choice))
        rewards = _values(records, _name("reward", group, choice))
        seen = _values(records, f"effective_epochs/{choice}") if group in ("", "source") else []
        row = [escape(choice), f"{shares[0]:.3f}", f"{shares[-1]:.3f}", f"{sum(shares) / len(shares):.3f}"]
        row.append(f"{sum(rewards) / len(rewards):+.3g}" if rewards else "")
        rows.append([*row, str(len(rewards)), f"{seen[-1]:.1f}" if seen else ""])
    head = ["choice", "first share", "final share", "mean share", "mean reward", "steps rewarded", "effective epochs"]
    text = (
        "Mean reward: over the recorded steps that rewarded this choice. Rewards of early steps are larger, as gradients are; "
        "print(learner) says which source pulls against the others."
    )
    return html_table(head, rows) + note(text)


def _warning(records: Sequence[Record], group: str, choices: Sequence[str]) -> str:
    """A warning if the policy has collapsed; shares that never moved are fixed on purpose."""
    shares = [_values(records, _name("probability", group, choice)) for choice in choices]
    last = [of_choice[-1] for of_choice in shares]
    if last == [of_choice[0] for of_choice in shares] or group not in ("", "source") or not is_collapsing(last):
        return ""
    return f'<p class="warning">{escape(describe_collapse(last))}</p>'
