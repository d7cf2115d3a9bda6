"""Runs the arms of the table on mixtures of text domains, a seed after the other, and continues where it was interrupted.

    INLOOP_DATA=FOLDER python results/mixtures/run.py [--runs FOLDER]

FOLDER/text has a .txt file for each domain. Start it once for each core: each process takes the next arm that no other one runs. A finished seed of an arm is one
line of runs.jsonl.
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "runs.jsonl"
SEEDS = 5
GARBAGE = "garbage"
TRAINING = ("--steps", "1000", "--length", "128", "--batch", "32", "--held-out", "100")
ARMS = {
    "uniform": ("--mixture", "uniform"),
    "learned": ("--mixture", "learned"),
    "oracle": ("--mixture", "oracle", "--bad", GARBAGE),
    "loss": ("--mixture", "loss"),
    "exp3": ("--mixture", "exp3"),
    "trail": ("--mixture", "trail"),
    "proportional": ("--mixture", "proportional"),
}


def prepare(text: Path, folder: Path) -> Path:
    """A folder with the domains, and the bytes of the first one in random order."""
    folder.mkdir(parents=True, exist_ok=True)
    domains = sorted(text.glob("*.txt"))
    for path in domains:
        link = folder / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
    garbage = folder / f"{GARBAGE}.txt"
    if not garbage.exists():
        content = bytearray(domains[0].read_bytes())
        random.Random(0).shuffle(content)
        temporary = garbage.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(garbage)
    return folder


def done() -> set[tuple[str, int]]:
    rows = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(row["arm"], row["seed"]) for row in map(json.loads, rows)}


def run(arm: str, seed: int, data: Path, runs: Path) -> bool:
    """Train the arm up to this seed; False if another process has it."""
    command = [sys.executable, "-m", "inloop.cli", "run", "mixture", "--data", str(data), *TRAINING, *ARMS[arm]]
    command += ["--seeds", str(seed + 1), "--out", str(runs / arm), "--cache", str(runs / "tokens"), "--json"]
    began = time.monotonic()
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if found.returncode and "is in use by another run" in found.stderr:
        return False
    if found.returncode:
        raise SystemExit(found.stderr)
    result = json.loads(found.stdout)["results"][seed]
    kept = {name: result[name] for name in ("held_out", "shares", "flagged", "words", "effective_epochs")}
    row = {"arm": arm, "seed": seed, **kept, "seconds": round(time.monotonic() - began)}
    with RESULTS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if (arm, seed) not in done():
            file.write(json.dumps(row) + "\n")
    print(f"{arm}, seed {seed}: {row['seconds']} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "mixtures", help="a folder for what is not kept")
    options = parser.parse_args()
    runs = options.runs.resolve()
    data = prepare(Path(os.environ["INLOOP_DATA"]) / "text", runs / "garbage and domains")
    for seed in range(SEEDS):
        while missing := [arm for arm in ARMS if (arm, seed) not in done()]:
            if not any(run(arm, seed, data, runs) for arm in missing):
                time.sleep(5)  # others run all that is left of this seed


if __name__ == "__main__":
    main()
