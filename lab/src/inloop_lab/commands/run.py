"""``inloop run``: the experiments."""

import argparse

from inloop_lab.commands.augment import add_augment
from inloop_lab.commands.mixture import add_mixture
from inloop_lab.commands.splits import add_splits


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run an experiment").add_subparsers(required=True, metavar="EXPERIMENT")
    add_splits(run)
    add_augment(run)
    add_mixture(run)
