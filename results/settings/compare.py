"""What the runs say: gains over equal shares on paired seeds, what the oracle's share of them is, who was flagged."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from arms import LOOK_EVERY
from run import has_verdict

from inloop_lab.runs.summary import mean_and_interval, t_quantile

FLAGS = "fbd"  # the letters of verdicts that flag a source: flagged, bad, different or partly wrong


def is_text(setting: str) -> bool:
    return setting.startswith(("k", "l"))


@dataclass(frozen=True)
class Gain:
    """The paired difference of an arm to equal shares, in points of accuracy or in nats; more is better."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def interval(self) -> float:
        """Half the width of the 95% interval."""
        return mean_and_interval(self.values)[1]

    def excludes_zero(self, level: float = 0.95) -> bool:
        n = len(self.values)
        if n < 2:
            return False
        error = statistics.stdev(self.values) / math.sqrt(n)
        return abs(self.mean) > t_quantile((1 + level) / 2, n - 1) * error


def differing_after_holm(gains: Mapping[str, Gain], level: float = 0.95) -> set[str]:
    """The settings whose gain differs from 0, by Holm's correction for their number."""
    left, found = dict(gains), set()
    while left:
        corrected = 1 - (1 - level) / len(left)
        differing = {setting for setting, gain in left.items() if gain.excludes_zero(corrected)}
        if not differing:
            break
        found |= differing
        left = {setting: gain for setting, gain in left.items() if setting not in differing}
    return found


class Runs:
    """All runs of one stage."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    @cached_property
    def settings(self) -> list[str]:
        return sorted({row["setting"] for row in self.rows})

    def of(self, setting: str, arm: str) -> list[Mapping[str, Any]]:
        def is_arm(name: str) -> bool:
            return name.startswith("oracle") if arm == "oracle" else name == arm

        return [row for row in self.rows if row["setting"] == setting and is_arm(row["arm"])]

    def gain(self, setting: str, arm: str, score: Any = None) -> Gain | None:
        """Over equal shares with the same seeds; None without runs. ``score`` takes a row to the number that counts."""
        score = score or (lambda row: row["score"])
        sign, unit = (-1, 1) if is_text(setting) else (1, 100)
        uniform = {row["seed"]: score(row) for row in self.of(setting, "uniform")}
        pairs = [(row, uniform[row["seed"]]) for row in self.of(setting, arm) if row["seed"] in uniform]
        return Gain([sign * unit * (score(row) - before) for row, before in pairs]) if pairs else None

    def gain_of_worst(self, setting: str, arm: str) -> Gain | None:
        """The gain on the source, or the way to look, that each model is worst at."""
        worst = max if is_text(setting) else min
        return self.gain(setting, arm, lambda row: worst(row["scores"].values()))

    def share_of_oracle(self, setting: str, arm: str) -> float | None:
        """The mean gain as a share of the oracle's; None where the oracle gains nothing that is certain."""
        own, best = self.gain(setting, arm), self.gain(setting, "oracle")
        if own is None or best is None or not best.excludes_zero() or best.mean <= 0:
            return None
        return own.mean / best.mean

    def found(self, setting: str, arm: str, letters: str) -> tuple[int, int]:
        """In how many runs the last look has one of the letters for each wrong source, and how many runs there are."""
        rows = self.of(setting, arm)
        return sum(all(row["words"][-1][k] in letters for k in row["wrong"]) for row in rows), len(rows)

    def false_alarms(self, setting: str, arm: str) -> tuple[int, int]:
        """In how many runs a good source was flagged at any look, and how many runs there are."""
        rows = self.of(setting, arm)
        alarms = [
            any(letter in FLAGS for look in row["words"] for k, letter in enumerate(look) if k not in row["wrong"])
            for row in rows
        ]
        return sum(alarms), len(rows)

    def first_flag(self, setting: str, arm: str) -> float | None:
        """The median step of the first look that flags all wrong sources, over the runs that ever do."""
        firsts = []
        for row in self.of(setting, arm):
            looks = [i for i, look in enumerate(row["words"], 1) if all(look[k] in FLAGS for k in row["wrong"])]
            firsts += [looks[0] * LOOK_EVERY] if looks else []
        return statistics.median(firsts) if firsts else None


def missed_marks(runs: Runs, arm: str) -> list[str]:
    """The marks of the table that an arm does not reach."""
    missed = []
    gains = {setting: gain for setting in runs.settings if (gain := runs.gain(setting, arm)) is not None}
    worst = {
        f"{setting}, worst": runs.gain_of_worst(setting, arm) for setting in gains if setting.startswith(("h", "l"))
    }
    compared = gains | {setting: gain for setting, gain in worst.items() if gain is not None}
    differing = differing_after_holm(compared)
    for setting, gain in compared.items():
        if gain.mean < (-0.005 if is_text(setting) else -0.3) and setting in differing:
            missed.append(f"{setting}: worse than equal shares by {-gain.mean:.3g}")
    for setting in gains:
        share = runs.share_of_oracle(setting, arm)
        if share is not None and share < 0.6:
            missed.append(f"{setting}: {share:.0%} of the oracle's gain")
        if has_verdict(setting):
            flagged, number = runs.found(setting, arm, FLAGS)
            if flagged < 0.9 * number:
                missed.append(f"{setting}: flagged in {flagged} of {number} runs")
            bad, number = runs.found(setting, arm, "b")
            if not setting.startswith("d") and "60%" not in setting and bad < 0.9 * number:
                missed.append(f"{setting}: called bad in {bad} of {number} runs")
    return missed
