"""Prints the screening runs: the mean score of each arm and setting, and the number of seeds.

python results/settings/table.py [FILE.jsonl]
"""

import statistics
import sys
from pathlib import Path

from run import read

HERE = Path(__file__).parent


def main() -> None:
    rows = read(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "screen.jsonl")
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    print(f"| | {' | '.join(settings)} |\n|---|{'---|' * len(settings)}")
    for arm in arms:
        cells = []
        for setting in settings:
            scores = [row["score"] for row in rows if (row["setting"], row["arm"]) == (setting, arm)]
            cells.append(f"{statistics.mean(scores):.4f} ({len(scores)})" if scores else "")
        print(f"| {arm} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
