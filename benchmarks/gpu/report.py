"""The findings as one table, and as a file that can be published: versions, names of GPUs, results, and nothing else."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.findings import Finding
from rich.console import Console
from rich.table import Table

import inloop
from inloop.atomic_files import write_atomically

_LEAST_WIDTH = 140  # of a table that is not shown in a terminal


def versions() -> dict[str, str]:
    """What the results depend on."""
    cudnn = torch.backends.cudnn.version()
    return {
        "inloop": inloop.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def is_well(findings: Sequence[Finding]) -> bool:
    return all(finding.verdict != "WRONG" for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    rows = [finding.as_json() for finding in findings]
    return {"versions": versions(), "gpus": gpus(), "ok": is_well(findings), "findings": rows}


def write_report(findings: Sequence[Finding], path: Path) -> None:
    text = json.dumps(as_json(findings), indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def print_table(findings: Sequence[Finding]) -> None:
    """All findings, and a last line that says what to do."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _LEAST_WIDTH))
    about = versions()
    title = f"inloop {about['inloop']} on {', '.join(gpus())}; torch {about['torch']}, CUDA {about['cuda']}"
    table = Table(title=title)
    for column in ("section", "case", "found", "limit", ""):
        table.add_column(column, overflow="fold")
    for before, finding in zip([None, *findings], findings, strict=False):
        if before is not None and before.section != finding.section:
            table.add_section()
        style = {"ok": "", "WRONG": "bold red", "skipped": "dim"}[finding.verdict]
        cells = (finding.section, finding.case, finding.found, finding.limit, finding.verdict)
        table.add_row(*(cell.replace("[", "\\[") for cell in cells), style=style)
    console.print(table)
