"""A run's records: every report as named numbers, in a file of JSON lines and in trackers.

learner = inloop.InLoop(model, policy, callback=inloop.Records("run.jsonl", TensorBoard("runs"), mixture=mixture))
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from inloop.distributed import rank
from inloop.errors import UsageError
from inloop.policies import RewardSummary
from inloop.report import StepReport

if TYPE_CHECKING:
    from inloop.mixture import Mixture


class Tracker(Protocol):
    """A place to write numbers to."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the named numbers of ``step``; all are finite."""

    def close(self) -> None:
        """End the log."""


class Records:
    """A learner's callback that writes every report. Of several processes only the first writes.

    Args:
        path: A file; each report adds a line of JSON.
        trackers: Further places to write to; see :mod:`inloop.integrations.trackers`.
        mixture: A mixture whose effective epochs to write, too.
        names: Names of the sources; by default their numbers.
        every: Write only each ``every``-th step.
    """

    def __init__(
        self,
        path: str | Path,
        *trackers: Tracker,
        mixture: "Mixture | None" = None,
        names: Sequence[str] | None = None,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise UsageError(f"every={every}: allowed are whole numbers from 1.")
        self.path = Path(path)
        self.trackers = trackers
        self.mixture = mixture
        self.names = names
        self.every = every
        if rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
                with self.path.open("a") as file:  # the run was killed within a line
                    file.write("\n")

    def __call__(self, report: StepReport) -> None:
        if rank() != 0 or report.step % self.every:
            return
        numbers = numbers_of(report, self.names)
        if self.mixture is not None:
            numbers |= _by_choice("effective_epochs", self.mixture.effective_epochs(), self.names)
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": report.step, "dropped": report.dropped} | numbers) + "\n")
        for tracker in self.trackers:
            tracker.log(report.step, numbers)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self.trackers:
            tracker.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file of :class:`Records`, one for each step.

    A run that was killed and continued wrote some steps twice; the last line counts. Incomplete lines are left out.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def numbers_of(report: StepReport, names: Sequence[str] | None = None) -> dict[str, float]:
    """A report as named numbers: probabilities and mean rewards by choice, lag and dropped steps.

    Choices that depend on each other are left out: their tables have hundreds of entries.
    """
    numbers = {
        "lag": float(report.lag),
        "num_dropped": float(report.num_dropped),
        "reward/mean": report.reward_mean,
        "reward/std": report.reward_std,
    }
    return (
        numbers | dict(_flat("probability", report.probabilities, names)) | dict(_flat("reward", report.rewards, names))
    )


def _flat(prefix: str, tree: object, names: Sequence[str] | None) -> Iterator[tuple[str, float]]:
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from _flat(f"{prefix}/{name}", part, names if name == "source" else None)
    elif isinstance(tree, RewardSummary):
        yield from _by_choice(prefix, tree.mean_K, names).items()
    elif isinstance(tree, Tensor) and tree.dim() == 1:
        yield from _by_choice(prefix, tree, names).items()


def _by_choice(prefix: str, values_K: Tensor, names: Sequence[str] | None) -> dict[str, float]:
    if names is not None and len(names) != len(values_K):
        raise UsageError(f"Got {len(names)} names for {len(values_K)} sources. Fix: give one name for each source.")
    labels = names if names is not None else [str(number) for number in range(len(values_K))]
    return {f"{prefix}/{label}": value for label, value in zip(labels, values_K.tolist(), strict=True)}
