"""``inloop run splits``."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

from inloop_lab.commands.run_options import DATA_HELP, add_run_options, check_seeds, refuse_idle_options, train_seeds


def add_splits(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from inloop_lab.networks.small import NETWORKS
    from inloop_lab.splits.noise import Noise
    from inloop_lab.splits.settings import OptimizerName, ReferenceName, RewardName

    splits = experiments.add_parser(
        "splits",
        help="find the bad one of several splits of a data set while training",
        description="The paper's split experiment: equal splits of a data set, the first one noisy; a policy learns how often to use each. "
        "The same command again continues an interrupted run.",
    )
    splits.add_argument("--data", default="digits", metavar="digits|cifar10|cifar100|PATH", help=DATA_HELP)
    splits.add_argument(
        "--network", choices=NETWORKS, metavar="NETWORK", help=f"one of {', '.join(NETWORKS)}; default: fc-bn"
    )
    splits.add_argument("--reward", choices=get_args(RewardName), help="default: gar")
    splits.add_argument("--noise", choices=get_args(Noise), help="the noise of split 0; default: labels")
    splits.add_argument("--sources", type=int, help="number of splits; default: 10")
    splits.add_argument("--batch", type=int, help="default: 1000; with less than 20,000 examples a sixth of them")
    splits.add_argument("--epochs", type=int, help="default: 10; with less than 20,000 examples 40")
    splits.add_argument(
        "--optimizer", choices=get_args(OptimizerName), help="default: nesterov; with less than 20,000 examples sgd"
    )
    splits.add_argument("--reference", choices=get_args(ReferenceName), help="default: next")
    splits.add_argument("--accumulate", type=int, help="rewarded steps for each update of the policy; default: 10")
    splits.add_argument("--layers", choices=("all", "linear"), help="layers that count for the reward; default: all")
    add_run_options(splits, seeds=10)
    splits.set_defaults(run=_run_splits)


def _run_splits(options: argparse.Namespace) -> int:
    from inloop_lab.data.named import load_data
    from inloop_lab.runs.folder import RunFolder
    from inloop_lab.splits.experiment import SplitExperiment
    from inloop_lab.splits.noise import check_splits
    from inloop_lab.splits.settings import ONLY_FOR, SplitSettings, with_defaults
    from inloop_lab.splits.show import print_splits, summarise_splits

    check_seeds(options)
    data = load_data(options.data)
    given = {field.name: getattr(options, field.name) for field in fields(SplitSettings) if field.name != "data"}
    settings = with_defaults(options.data, len(data.train_x), **given)
    refuse_idle_options("reward", settings.reward, given, ONLY_FOR)
    check_splits(data, settings.sources, settings.noise)
    usual = with_defaults(options.data, len(data.train_x))
    out = options.out or Path("runs") / settings.folder_name(usual)
    folder = RunFolder(
        out, "splits", settings.as_dict() | {"data_digest": data.digest()}, options.restart, SplitSettings().as_dict()
    )
    title = f"{settings.network} {settings.reward}"
    results = train_seeds(
        lambda seed: SplitExperiment(settings, data, seed), folder, title, options.seeds, settings.epochs
    )
    if options.json:
        print(json.dumps(summarise_splits(results), allow_nan=False))
    else:
        print_splits(results, settings, out)
    return 0
