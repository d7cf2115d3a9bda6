"""Reading finished split runs back from a folder, grouped for a report."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inloop.lab.noise import NOISY_SPLIT
from inloop.lab.run_folder import RunFolderError
from inloop.lab.split_settings import SplitSettings
from inloop.lab.summary import mean_and_interval


@dataclass(frozen=True)
class SplitRun:
    """The settings of a run and the results of its finished seeds."""

    name: str
    settings: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def noisy(self) -> int | None:
        return None if self.settings["noise"] == "none" else NOISY_SPLIT

    def interval(self, quantity: str) -> tuple[float, float] | None:
        """Mean and half width of the 95% interval over seeds; None if the run has no such quantity."""
        values = [result[quantity] for result in self.results]
        return None if values[0] is None else mean_and_interval(values)


def read_runs(folder: Path) -> list[SplitRun]:
    """All split runs below ``folder`` that have a finished seed, in the order of their names."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is no folder. Fix: name the --out folder of a run, or one that holds several.")
    runs = []
    for file in sorted(folder.resolve().rglob("settings.json")):
        settings = _settings_of_a_run(file)
        seeds = {path: re.fullmatch(r"seed-(\d+)", path.parent.name) for path in file.parent.glob("seed-*/result.json")}
        finished = sorted((int(match[1]), path) for path, match in seeds.items() if match)
        if settings is not None and finished:
            runs.append(SplitRun(file.parent.name, settings, [_read(path) for _, path in finished]))
    if not runs:
        raise RunFolderError(f"{folder} holds no finished run. Fix: run `inloop run splits --out {folder}` first.")
    return runs


def experiments(runs: list[SplitRun]) -> dict[str, list[SplitRun]]:
    """Runs that differ in network and reward only, by what they share."""
    groups: dict[str, list[SplitRun]] = {}
    for run in runs:
        s = run.settings
        title = (
            f"{s['data']}, noise: {s['noise']}, {s['sources']} sources, batch {s['batch']}, {s['epochs']} epochs, {s['optimizer']}, "
            f"reference: {s['reference']}, accumulate: {s['accumulate']}, layers: {s['layers']}"
        )
        groups.setdefault(title, []).append(run)
    return groups


def _settings_of_a_run(file: Path) -> dict[str, Any] | None:
    """None for a settings.json of something else."""
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    known = set(SplitSettings().as_dict())
    return (
        settings
        if isinstance(settings, dict) and settings.get("experiment") == "splits" and known <= set(settings)
        else None
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except (OSError, ValueError):
        raise RunFolderError(f"{path} cannot be read as JSON. Fix: remove it and run its seed again.") from None
