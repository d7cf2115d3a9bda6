"""The lab's sections on the page of ``inloop report``: one for each group of comparable runs."""

from pathlib import Path

from inloop_lab.augmentation.report import augment_sections
from inloop_lab.splits.report import split_sections


def report_sections(folder: Path) -> list[str]:
    """HTML on the finished runs below ``folder``; writes the figures to ``folder``."""
    return split_sections(folder) + augment_sections(folder)
