"""``inloop report``: one self-contained page on a user's own run or on runs of the lab, with its figures as files beside it."""

import json
from importlib.metadata import entry_points
from pathlib import Path

from inloop.atomic_files import write_atomically
from inloop.errors import InloopError, UsageError
from inloop.reporting.html import html_page
from inloop.reporting.own_runs import is_records, own_sections

REPORTS = "inloop.reports"  # entry points: functions that turn the runs in a folder into sections of HTML
NEEDS_LAB = 'reporting on them needs the lab. Fix: in a clone of inloop, pip install -e ".[lab]" -e lab'


class ReportError(InloopError):
    """A folder or file without anything to report on."""


def write_report(path: Path) -> Path:
    """Write the page on ``path`` and its figures; returns the page's path.

    A folder gets ``report.html``, with the runs of the lab and the files of :class:`inloop.Records` below it. A file of records gets a
    page beside it, with the same name.
    """
    if path.is_file():
        if not is_records(path):
            raise ReportError(f"{path} has no lines of inloop.Records. Fix: name the file that inloop.Records wrote.")
        page, sections = path.with_suffix(".html"), own_sections([path], path.with_suffix(""))
    elif path.is_dir():
        page, sections = path / "report.html", _sections_of_folder(path)
    else:
        raise ReportError(
            f"{path} is no folder or file. Fix: name the file of inloop.Records, the --out folder of a run, or a folder that holds several."
        )
    write_atomically(page, lambda file: file.write(html_page("inloop: report", sections).encode()))
    return page


def _sections_of_folder(folder: Path) -> list[str]:
    reports = entry_points(group=REPORTS)
    sections = [section for report in reports for section in report.load()(folder)]
    records = [file for file in sorted(folder.rglob("*.jsonl")) if is_records(file)]
    sections += own_sections(records, folder / "report-records")
    needs_lab = not reports and _has_lab_runs(folder)
    if needs_lab and not sections:
        raise UsageError(f"{folder} holds runs of the lab; {NEEDS_LAB}.")
    if not sections:
        begun = " (a run is begun; its own command continues it)" if any(folder.rglob("seed-*/checkpoints")) else ""
        raise ReportError(
            f"{folder} holds no finished run{begun} and no file of inloop.Records. Fix: train with "
            f'callback=inloop.Records("{folder}/run.jsonl"), or run `inloop run splits --out {folder}` first.'
        )
    if needs_lab:
        sections.append(f'<p class="warning">The folder also holds runs of the lab; {NEEDS_LAB}.</p>')
    return sections


def _has_lab_runs(folder: Path) -> bool:
    return any(_names_experiment(file) for file in folder.rglob("settings.json"))


def _names_experiment(file: Path) -> bool:
    try:
        return "experiment" in json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        return False
