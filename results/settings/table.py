"""Writes the screening runs into README.md: the mean score of each arm and setting, and the number of seeds.

python results/settings/table.py
"""

import statistics
from pathlib import Path

from run import read

from inloop_lab.page_block import with_block

COMMAND = "python results/settings/table.py"
HERE = Path(__file__).parent


def table() -> str:
    rows = read(HERE / "screen.jsonl")
    settings, arms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("setting", "arm"))
    lines = [f"| | {' | '.join(settings)} |", f"|---|{'---|' * len(settings)}"]
    for arm in arms:
        cells = []
        for setting in settings:
            scores = [row["score"] for row in rows if (row["setting"], row["arm"]) == (setting, arm)]
            cells.append(f"{statistics.mean(scores):.3f} ({len(scores)})" if scores else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    page = HERE / "README.md"
    return {page: with_block(page.read_text(), COMMAND, table())}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
