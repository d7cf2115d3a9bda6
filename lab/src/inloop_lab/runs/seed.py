"""Trains one seed of an experiment to its end, from its last saved epoch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from inloop_lab.runs.folder import SeedFolder, as_json_numbers


@dataclass(frozen=True)
class Bar:
    """One line of a policy's display: a name, a share, a remark."""

    name: str
    value: float
    remark: str = ""


@dataclass(frozen=True)
class SeedProgress:
    """The state of a training seed, for the display."""

    seed: int
    epoch: int
    loss: float
    bars: list[Bar]


class Experiment(Protocol):
    """One seed of an experiment; ``epochs`` has a line for each finished epoch."""

    seed: int
    num_epochs: int
    epochs: list[dict[str, Any]]

    def train_epoch(self) -> None: ...
    def bars(self) -> list[Bar]: ...
    def result(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def no_display(progress: SeedProgress) -> None:
    """Show nothing."""


def train_to_end(
    make: Callable[[], Experiment], folder: SeedFolder | None = None, show: Callable[[SeedProgress], None] = no_display
) -> dict[str, Any]:
    """The result of the seed, read if it is finished; else trained, from the last epoch in ``folder``."""
    if folder is not None and (finished := folder.result()) is not None:
        return finished
    experiment = make()
    if folder is not None and (saved := folder.load()) is not None:
        state, experiment.epochs = saved
        experiment.load_state_dict(state)
    while len(experiment.epochs) < experiment.num_epochs:
        experiment.train_epoch()
        # Also without a folder: it may drop the step that waits for its reward, and saving must not change a run.
        state = experiment.state_dict()
        if folder is not None:
            folder.save(state, experiment.epochs)
        last = experiment.epochs[-1]
        show(SeedProgress(experiment.seed, last["epoch"], last["loss"], experiment.bars()))
    result: dict[str, Any] = as_json_numbers(experiment.result())
    if folder is not None:
        folder.finish(result)
    return result
