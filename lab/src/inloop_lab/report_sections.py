"""What the lab adds to the page of ``inloop report``: a section for each group of runs that can be compared."""

from pathlib import Path

from inloop_lab.augmentation.report import augment_sections
from inloop_lab.splits.report import split_sections


def report_sections(folder: Path) -> list[str]:
    """HTML on the finished runs below ``folder``; figures are written to ``folder``."""
    return split_sections(folder) + augment_sections(folder)
