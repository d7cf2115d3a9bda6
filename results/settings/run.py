"""Runs the table that decides the defaults, a run after the other, and continues where it was interrupted.

    INLOOP_DATA=FOLDER python results/settings/run.py screen|final [--settings "a;b"] [--arms "x;y"]

Start it once for each core: each process takes the next run that is not done and that no other has taken. A run is one line of screen.jsonl or final.jsonl.
Screening runs choose the learner and the oracle's share, and are evaluated on kept-apart data. Final runs are evaluated on the test data.
"""

import argparse
import fcntl
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from arms import ARMS, CANDIDATES, ORACLES, oracle, run
from problems import SCREENED, SETTINGS
from unseen import UNSEEN

HERE = Path(__file__).parent
SCREEN_SEEDS, ORACLE_SEEDS = range(100, 103), range(100, 102)
OTHER_SEEDS = 3  # of arms that no mark is about
FALSE_ALARMS, FALSE_ALARM_SEEDS = "i digits", 50  # settings that only count false alarms of the default


def has_wrong_source(setting: str) -> bool:
    return not setting.startswith(("h", "i", "j", "l")) and setting not in ("n inverted", "n covered")


def has_verdict(setting: str) -> bool:
    """Whether the outcome of a setting is a verdict, for which ten seeds are run."""
    return setting.startswith(("a", "b", "c", "d", "k")) or setting in ("e two sources, 60%", "e two sources, 100%")


def screening() -> Iterator[tuple[str, str, int]]:
    """Settings, arms and seeds that choose the oracle's share, and the learner."""
    for seed in ORACLE_SEEDS:
        for setting in filter(has_wrong_source, SETTINGS):
            yield from ((setting, arm, seed) for arm in ("uniform", *(oracle(t) for t in ORACLES if t < 1)))
    for seed in SCREEN_SEEDS:
        for setting in SCREENED:
            yield from ((setting, arm, seed) for arm in ("uniform", "default", "told nothing", *CANDIDATES))


def final() -> Iterator[tuple[str, str, int]]:
    """Settings, arms and seeds of the table."""
    for seed in range(FALSE_ALARM_SEEDS):
        for setting in SETTINGS:
            if setting.startswith(FALSE_ALARMS):
                yield setting, "default", seed
            elif seed < (10 if has_verdict(setting) else 5):
                yield from (
                    (setting, arm, seed) for arm in ("uniform", *(ARMS if seed < OTHER_SEEDS else ("default",)))
                )
                if has_wrong_source(setting) and best_oracle(setting) < 1:
                    yield setting, oracle(best_oracle(setting)), seed
    for seed in range(5):
        for setting in UNSEEN:
            yield from ((setting, arm, seed) for arm in ("uniform", "default"))
            if has_wrong_source(setting):
                yield setting, oracle(0.0), seed


def best_oracle(setting: str) -> float:
    """The share of the wrong sources, in times an equal share, with the best mean score on kept-apart data."""
    rows = [row for row in read(HERE / "screen.jsonl") if row["setting"] == setting and row["seed"] in ORACLE_SEEDS]
    means = {}
    for times in ORACLES:
        scores = [row["score"] for row in rows if row["arm"] == ("uniform" if times == 1 else oracle(times))]
        if len(scores) < len(ORACLE_SEEDS):
            raise SystemExit(f"{setting}: the oracle's share is not chosen yet. Fix: finish the screening first.")
        means[times] = statistics.mean(scores)
    best = min if setting.startswith("k") else max  # losses of text, else accuracies
    return best(means, key=lambda times: means[times])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, result: dict) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(result) + "\n")


@contextmanager
def taken(path: Path, *key: object) -> Iterator[bool]:
    """Take a run, unless another process has it. It is given back when the process ends, however it ends."""
    name = hashlib.sha256(repr((str(path.resolve()), *key)).encode()).hexdigest()
    with (Path(tempfile.gettempdir()) / f"inloop-settings-{name[:16]}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("screen", "final"))
    parser.add_argument("--settings", help="only settings that begin with one of these, separated by semicolons")
    parser.add_argument("--arms", help="only these arms, separated by semicolons")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out or HERE / f"{options.stage}.jsonl"
    wanted = [
        (setting, arm, seed)
        for setting, arm, seed in dict.fromkeys(screening() if options.stage == "screen" else final())
        if (options.settings is None or setting.startswith(tuple(options.settings.split(";"))))
        and (options.arms is None or arm in options.arms.split(";"))
    ]
    for setting, arm, seed in wanted:
        with taken(path, setting, arm, seed) as is_mine:
            if not is_mine or (setting, arm, seed) in {(r["setting"], r["arm"], r["seed"]) for r in read(path)}:
                continue
            result = run(setting, arm, seed, final=options.stage == "final")
            append(path, result)
        print(f"{setting}, {arm}, seed {seed}: {result['score']:.4f} in {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
