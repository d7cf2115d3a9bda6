"""Runs the table that decides the defaults, a run after the other, and continues where it was interrupted.

    INLOOP_DATA=FOLDER python results/settings/run.py screen|final [--worker 0/2] [--settings a,b] [--arms x,y]

Several workers may run at a time: each takes its share of the runs that are not done. A run is one line of screen.jsonl or final.jsonl.
"""

import argparse
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from arms import ARMS, ORACLES, oracle, run
from problems import SCREENED, SETTINGS

HERE = Path(__file__).parent
FIRST_SEED = {"screen": 100, "final": 0}


def planned(stage: str) -> Iterator[tuple[str, str, int]]:
    """Settings, arms and seeds, the cheap and telling first."""
    seeds = 3 if stage == "screen" else 10
    for seed in range(FIRST_SEED[stage], FIRST_SEED[stage] + seeds):
        for setting in SCREENED if stage == "screen" else SETTINGS:
            for arm in ("uniform", *ARMS):
                yield setting, arm, seed
            if not setting.startswith(("h", "i", "j", "l")):  # the others have no wrong source
                yield from ((setting, oracle(times), seed) for times in ORACLES if times < 1)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, result: dict) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("screen", "final"))
    parser.add_argument("--worker", default="0/1", help="the number of this worker, and how many there are")
    parser.add_argument("--settings", help="only settings that begin with one of these, separated by semicolons")
    parser.add_argument("--arms", help="only these arms, separated by semicolons")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, workers = map(int, options.worker.split("/"))
    path = options.out or HERE / f"{options.stage}.jsonl"
    wanted = [
        (setting, arm, seed)
        for setting, arm, seed in planned(options.stage)
        if (options.settings is None or setting.startswith(tuple(options.settings.split(";"))))
        and (options.arms is None or arm in options.arms.split(";"))
    ]
    for setting, arm, seed in wanted[number::workers]:
        if (setting, arm, seed) in {(r["setting"], r["arm"], r["seed"]) for r in read(path)}:
            continue
        result = run(setting, arm, seed, final=options.stage == "final")
        append(path, result)
        print(f"{setting}, {arm}, seed {seed}: {result['score']:.4f} in {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
