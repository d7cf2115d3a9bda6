"""``inloop report``: one self-contained page on the runs in a folder, and its figures as files beside it."""

from pathlib import Path

from inloop.atomic_files import write_atomically
from inloop.lab.augmentation.report import augment_sections
from inloop.lab.html import html_page
from inloop.lab.runs.folder import RunFolderError
from inloop.lab.splits.report import split_sections


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` and the figures; returns the page's path."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is no folder. Fix: name the --out folder of a run, or one that holds several.")
    sections = split_sections(folder) + augment_sections(folder)
    if not sections:
        begun = " (one is begun; its own command continues it)" if any(folder.rglob("seed-*/checkpoints")) else ""
        raise RunFolderError(
            f"{folder} holds no finished run{begun}. Fix: run `inloop run splits` or `inloop run augment` with --out {folder} first."
        )
    target = folder / "report.html"
    write_atomically(target, lambda file: file.write(html_page("inloop: report", sections).encode()))
    return target
