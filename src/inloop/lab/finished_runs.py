"""Reading finished runs back from a folder, for reports."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inloop.lab.run_folder import RunFolderError
from inloop.lab.summary import mean_and_interval


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


def read_runs(folder: Path, experiment: str, known: Collection[str]) -> list[FinishedRun]:
    """All runs of one experiment below ``folder`` that have a finished seed, in the order of their names.

    Args:
        known: The names that its settings must have.
    """
    runs = []
    for file in sorted(folder.resolve().rglob("settings.json")):
        settings = _read(file, None)
        seeds = {path: re.fullmatch(r"seed-(\d+)", path.parent.name) for path in file.parent.glob("seed-*/result.json")}
        finished = sorted((int(match[1]), path) for path, match in seeds.items() if match)
        if isinstance(settings, dict) and settings.get("experiment") == experiment and set(known) <= set(settings):
            fix = "Fix: remove it and run its seed again."
            results = [_read(path, f"{path} cannot be read as JSON. {fix}") for _, path in finished]
            runs += [FinishedRun(file.parent, settings, results)] if results else []
    return runs


def _read(path: Path, complaint: str | None) -> Any:
    """None, or an error, for what is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        if complaint is not None:
            raise RunFolderError(complaint) from None
        return None
