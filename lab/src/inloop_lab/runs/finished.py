"""Reading finished runs back from a folder, for reports."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inloop_lab.runs.folder import RunFolderError
from inloop_lab.runs.summary import mean_and_interval


@dataclass(frozen=True)
class FinishedRun:
    """The settings of a run and the results of its finished seeds."""

    path: Path
    settings: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.name

    def interval(self, quantity: str) -> tuple[float, float] | None:
        """Mean and half width of the 95% interval over seeds; None if the run has no such quantity."""
        values = [result.get(quantity) for result in self.results]
        return None if any(value is None for value in values) else mean_and_interval(values)  # type: ignore[arg-type]


def read_runs(folder: Path, experiment: str, defaults: dict[str, Any]) -> list[FinishedRun]:
    """All runs of one experiment below ``folder`` that have a finished seed, in the order of their names.

    Args:
        defaults: Values of settings that older runs do not name.
    """
    runs = []
    for file in sorted(folder.resolve().rglob("settings.json")):
        settings = _read(file, None)
        if not isinstance(settings, dict) or settings.get("experiment") != experiment or "data" not in settings:
            continue
        seeds = {path: re.fullmatch(r"seed-(\d+)", path.parent.name) for path in file.parent.glob("seed-*/result.json")}
        finished = sorted((int(match[1]), path) for path, match in seeds.items() if match)
        fix = "Fix: remove it and run its seed again."
        results = [_read(path, f"{path} is no result of a seed. {fix}") for _, path in finished]
        runs += [FinishedRun(file.parent, defaults | settings, results)] if results else []
    return runs


def comparable(runs: Iterable[FinishedRun], title: Callable[[FinishedRun], str]) -> list[tuple[str, list[FinishedRun]]]:
    """Groups of runs that have the same title and the same data, each with its title."""
    groups: dict[tuple[str, str | None], list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault((title(run), run.settings.get("data_digest")), []).append(run)
    return [(shown, group) for (shown, _), group in groups.items()]


def _read(path: Path, complaint: str | None) -> Any:
    """The content of a JSON file. A file that cannot be read gives None, or the ``complaint``; so does a result without epochs."""
    try:
        content = json.loads(path.read_text())
        if complaint is not None and not content["epochs"]:
            raise ValueError
        return content
    except (OSError, ValueError, KeyError, TypeError):
        if complaint is not None:
            raise RunFolderError(complaint) from None
        return None
