"""Writes the table of runs.jsonl into README.md.

python results/mixtures/table.py
"""

import json
import statistics
from pathlib import Path

from inloop_lab.page_block import with_block
from inloop_lab.runs.summary import mean_and_interval

HERE = Path(__file__).parent
GARBAGE = "garbage"


def loss_of(row: dict) -> float:
    """The mean held-out loss of the real domains."""
    return statistics.mean(loss for name, loss in row["held_out"].items() if name != GARBAGE)


def gain(rows: dict[int, dict], uniform: dict[int, dict]) -> str:
    differences = [loss_of(uniform[seed]) - loss_of(row) for seed, row in rows.items() if seed in uniform]
    mean, half = mean_and_interval(differences)
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if len(differences) > 2 else "")


def table() -> str:
    arms: dict[str, dict[int, dict]] = {}
    for row in map(json.loads, (HERE / "runs.jsonl").read_text().splitlines()):
        arms.setdefault(row["arm"], {})[row["seed"]] = row
    uniform = arms["uniform"]
    lines = [
        "| arm | seeds | loss | difference | garbage at the end | smallest real share | garbage flagged | a real one flagged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, rows in arms.items():
        shares = [row["shares"] for row in rows.values()]
        flagged = [set(row["flagged"]) for row in rows.values()]
        learns = any(row["words"] for row in rows.values())
        cells = (
            arm,
            str(len(rows)),
            f"{statistics.mean(map(loss_of, rows.values())):.3f}",
            "" if arm == "uniform" else gain(rows, uniform),
            f"{max(share[GARBAGE] for share in shares):.3f}",
            f"{min(value for share in shares for name, value in share.items() if name != GARBAGE):.3f}",
            str(sum(GARBAGE in names for names in flagged)) if learns else "",
            str(sum(bool(names - {GARBAGE}) for names in flagged)) if learns else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = HERE / "README.md"
    page.write_text(with_block(page.read_text(), "python results/mixtures/table.py", table()))
