"""The command line options of all experiments."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inloop.errors import UsageError

if TYPE_CHECKING:  # a command imports only the modules of the lab that it needs
    from inloop_lab.runs.folder import RunFolder
    from inloop_lab.runs.seed import Experiment

DATA_HELP = (
    "default: digits. PATH: an .npz with uint8 images x [N, C, H, W] or [N, H, W, C] and labels y, perhaps test_x and test_y; or a folder "
    "with a folder of images for each class"
)


def add_run_options(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=int, default=seeds, help=f"how many, from 0 on; default: {seeds}")
    parser.add_argument("--out", type=Path, help="folder of the run; default: runs/ and a name made of the settings")
    parser.add_argument("--restart", action="store_true", help="begin anew instead of continuing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def refuse_idle_options(
    option: str, chosen: str, given: Mapping[str, object], only_for: Mapping[str, Sequence[str]]
) -> None:
    """Refuse given options that do nothing with the chosen value of ``option``."""
    for name, value in given.items():
        if value is not None and chosen not in (meant_for := only_for.get(name, (chosen,))):
            raise UsageError(
                f"--{name.replace('_', '-')} does nothing with --{option} {chosen}; it is for {', '.join(meant_for)}."
            )


def check_seeds(options: argparse.Namespace) -> None:
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: allowed are whole numbers from 1.")


def train_seeds(
    make: "Callable[[int], Experiment]", folder: "RunFolder", title: str, num_seeds: int, epochs: int
) -> list[dict[str, Any]]:
    """The result of each seed, with a live display of the training."""
    from inloop_lab.runs.display import RunDisplay
    from inloop_lab.runs.seed import train_to_end

    with RunDisplay(title, num_seeds, epochs) as display:
        return [train_to_end(partial(make, seed), folder.seed(seed), display.show) for seed in range(num_seeds)]
