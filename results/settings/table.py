"""Writes the screening runs into README.md.

python results/settings/table.py
"""

import statistics
from pathlib import Path

from run import read

from inloop_lab.page_block import with_block

COMMAND = "python results/settings/table.py"
HERE = Path(__file__).parent


def table() -> str:
    """The score of equal shares, and the mean paired difference of each arm to it, with the number of seeds that both have."""
    scores = {(row["setting"], row["arm"], row["seed"]): row["score"] for row in read(HERE / "screen.jsonl")}
    settings, arms = (list(dict.fromkeys(key[place] for key in scores)) for place in (0, 1))
    lines = [f"| | {' | '.join(settings)} |", f"|---|{'---|' * len(settings)}"]
    for arm in arms:
        cells = []
        for setting in settings:
            uniform = {seed: score for (s, a, seed), score in scores.items() if (s, a) == (setting, "uniform")}
            own = {
                seed: score for (s, a, seed), score in scores.items() if (s, a) == (setting, arm) and seed in uniform
            }
            differences = [score - uniform[seed] for seed, score in own.items()]
            if arm == "uniform":
                cells.append(f"{statistics.mean(uniform.values()):.3f} ({len(uniform)})" if uniform else "")
            else:
                cells.append(f"{statistics.mean(differences):+.3f} ({len(differences)})" if differences else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    page = HERE / "README.md"
    return {page: with_block(page.read_text(), COMMAND, table())}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
