"""What all experiments have in common on the command line."""

import argparse
from pathlib import Path

from inloop.errors import UsageError

DATA_HELP = (
    "default: digits. PATH: an .npz with uint8 images x [N, C, H, W] or [N, H, W, C] and labels y, perhaps test_x and test_y; or a folder "
    "with a folder of images for each class"
)


def add_run_options(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=int, default=seeds, help=f"number of runs; default: {seeds}")
    parser.add_argument("--out", type=Path, help="folder of the run; default: runs/ and a name made of the settings")
    parser.add_argument("--restart", action="store_true", help="begin anew instead of continuing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def check_seeds(options: argparse.Namespace) -> None:
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: allowed are whole numbers from 1.")
