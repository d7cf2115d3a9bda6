"""The command ``inloop``: run experiments, report on them.

Exit codes: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C (with everything saved).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_args

from inloop import __version__
from inloop.errors import InloopError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, do what they say, return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _require_extras()
        code: int = options.run(options)
    except KeyboardInterrupt:
        print("inloop: interrupted; what is finished is saved, the same command continues", file=sys.stderr)
        return 130
    except UsageError as error:
        print(f"inloop: {error}", file=sys.stderr)
        return 2
    except (InloopError, OSError) as error:
        print(f"inloop: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inloop", description="Learn the data distribution while the model trains.")
    parser.add_argument("--version", action="version", version=f"inloop {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run an experiment").add_subparsers(required=True, metavar="EXPERIMENT")
    _add_splits(run)
    _add_augment(run)
    _add_bench(commands)
    report = commands.add_parser("report", help="write a page on the runs in a folder")
    report.add_argument("folder", type=Path, metavar="DIR", help="a folder with one or more runs")
    report.set_defaults(run=_report)
    return parser


_DATA_HELP = (
    "default: digits. PATH: an .npz with uint8 images x [N, C, H, W] or [N, H, W, C] and labels y, perhaps test_x and test_y; or a folder "
    "with a folder of images for each class"
)
_AUGMENT_HELP = (
    "ola: learned in the run; ua: UniformAugment; ra: RandAugment; ta: TrivialAugment; aa: AutoAugment; fast-aa: Fast AutoAugment; pba: "
    "Population Based Augmentation; none: crop and flip only; default: ola"
)


def _add_splits(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from inloop.lab.networks import NETWORKS
    from inloop.lab.noise import Noise
    from inloop.lab.split_settings import OptimizerName, ReferenceName, RewardName

    splits = experiments.add_parser(
        "splits",
        help="find the bad one of several splits of a data set while training",
        description="The paper's section 5.1: equal splits of a data set, the first one noisy; which are learned from is learned. "
        "The same command again continues an interrupted run.",
    )
    splits.add_argument("--data", default="digits", metavar="digits|cifar10|cifar100|PATH", help=_DATA_HELP)
    splits.add_argument("--network", choices=NETWORKS, help="default: fc-bn")
    splits.add_argument("--reward", choices=get_args(RewardName), help="default: gar")
    splits.add_argument("--noise", choices=get_args(Noise), help="what is wrong with split 0; default: labels")
    splits.add_argument("--sources", type=int, help="number of splits; default: 10")
    splits.add_argument("--batch", type=int, help="default: 1000, for digits 250")
    splits.add_argument("--epochs", type=int, help="default: 10, for digits 40")
    splits.add_argument("--optimizer", choices=get_args(OptimizerName), help="default: nesterov, for digits sgd")
    splits.add_argument("--reference", choices=get_args(ReferenceName), help="default: next")
    splits.add_argument("--accumulate", type=int, help="paid steps for each update of the policy; default: 10")
    splits.add_argument("--layers", choices=("all", "linear"), help="layers that count for the reward; default: all")
    _add_run_options(splits, seeds=10)
    splits.set_defaults(run=_run_splits)


def _add_augment(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from inloop.augment import SPACES
    from inloop.lab.augment_settings import PRESETS, AugmentName

    augment = experiments.add_parser(
        "augment",
        help="train with learned, or with fixed, image augmentation",
        description="The paper's section 5.2: the augmentation policy is learned in the training run itself (ola), or is a fixed one. "
        "The same command again continues an interrupted run.",
    )
    augment.add_argument("--data", metavar="digits|cifar10|cifar100|PATH", help=_DATA_HELP)
    augment.add_argument("--preset", choices=PRESETS, help="the paper's full recipe; other options still count")
    augment.add_argument(
        "--network",
        help="wrn-DEPTH-WIDTH, as wrn-28-10, and behind it -gn for GroupNorm, -s2 for a first stride of 2; default: wrn-28-10, for digits wrn-10-1",
    )
    augment.add_argument("--augment", choices=get_args(AugmentName), help=_AUGMENT_HELP)
    augment.add_argument("--space", choices=SPACES, help="operations and ranges of ola, ua, ra, ta; default: wl")
    augment.add_argument("--batch", type=int, help="default: 256, for digits 250")
    augment.add_argument("--epochs", type=int, help="default: 200, for digits 40")
    augment.add_argument("--examples", type=int, help="training images used; default: all")
    augment.add_argument(
        "--validation",
        type=int,
        help="training images, not trained on, whose accuracy is reported instead of that of the test images",
    )
    augment.add_argument("--learning-rate", type=float, help="default: 0.1")
    augment.add_argument("--warmup", type=int, help="epochs; default: a fortieth, at least 1")
    augment.add_argument("--padding", type=int, help="of the random crop; default: 4, for small images less")
    augment.add_argument(
        "--flip", action=argparse.BooleanOptionalAction, help="left-right, half the time; default: yes, for digits no"
    )
    augment.add_argument("--cutout", type=int, help="side of the final Cutout; default: 16, for digits 0")
    augment.add_argument("--accumulate", type=int, help="ola: paid steps for each update of the policy; default: 1")
    augment.add_argument("--policy-learning-rate", type=float, help="ola: of its Adam; default: 0.1")
    augment.add_argument("--normalisation", choices=("step", "center"), help="ola: of rewards; default: step")
    augment.add_argument("--start", type=int, help="ola: epochs before the policy first moves; default: 0")
    augment.add_argument("--layers", choices=("all", "linear"), help="ola: layers that count; default: all")
    augment.add_argument(
        "--interleave",
        action=argparse.BooleanOptionalAction,
        help="ola: every second step without operations; default: yes",
    )
    augment.add_argument(
        "--reference", choices=("next", "heldout"), help="ola: what its steps are judged by; default: next"
    )
    augment.add_argument("--ra-operations", type=int, help="ra: its N; default: 2")
    augment.add_argument("--ra-strength", type=int, help="ra: its M, of 0..30; default: 14")
    _add_run_options(augment, seeds=5)
    augment.set_defaults(run=_run_augment)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="time and memory of a training step, against plain training and other libraries",
        description="Each mode runs in a process of its own and takes turns with one that trains plainly; ratios are medians.",
    )
    bench.add_argument(
        "--models", default="wrn-16-4,gpt-6,vit-tiny,mlp", help="separated by commas; default: %(default)s"
    )
    bench.add_argument("--modes", help="separated by commas; default: all")
    bench.add_argument("--batch", type=int, help="default: what is usual for the model")
    bench.add_argument("--repeats", type=int, default=10, help="default: 10")
    bench.add_argument("--figure", type=Path, metavar="FILE.svg", help="also draw the ratios")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from rich.console import Console

    from inloop.lab.bench.measure import measure
    from inloop.lab.bench.show import print_bench, write_bench_figure
    from inloop.lab.bench.tasks import MODELS
    from inloop.lab.bench.worker import ALL_MODES

    chosen = {"models": options.models.split(","), "modes": (options.modes or ",".join(ALL_MODES)).split(",")}
    for what, allowed in (("models", MODELS), ("modes", ALL_MODES)):
        if unknown := [name for name in chosen[what] if name not in allowed]:
            raise UsageError(f"--{what} {unknown[0]}: allowed are {', '.join(allowed)}.")
    if options.repeats < 1 or (options.batch or 2) < 2:
        raise UsageError("--repeats must be at least 1, --batch at least 2.")
    log = Console(stderr=True)

    def show(row: dict[str, object]) -> None:
        ratio = (
            f"{row['time_ratio']:.2f} x time, {row['memory_ratio']:.2f} x memory"
            if "error" not in row
            else row["error"]
        )
        log.print(f"{row['model']} {row['mode']}: {ratio}", highlight=False, markup=False)

    rows = measure(chosen["models"], chosen["modes"], options.batch, options.repeats, show)
    if options.figure is not None:
        write_bench_figure(rows, options.figure)
    if options.json:
        print(
            json.dumps(
                {
                    "results": [row for row in rows if "error" not in row],
                    "skipped": [row for row in rows if "error" in row],
                }
            )
        )
    else:
        print_bench(rows, Console())
    return 0


def _add_run_options(parser: argparse.ArgumentParser, seeds: int) -> None:
    parser.add_argument("--seeds", type=int, default=seeds, help=f"number of runs; default: {seeds}")
    parser.add_argument("--out", type=Path, help="folder of the run; default: runs/ and a name made of the settings")
    parser.add_argument("--restart", action="store_true", help="begin anew instead of continuing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_augment(options: argparse.Namespace) -> int:
    from inloop.lab.augment_settings import PRESETS, AugmentSettings, refuse_idle_options, with_augment_defaults
    from inloop.lab.augmentation import AugmentExperiment, choose_images
    from inloop.lab.datasets import load_data
    from inloop.lab.display import RunDisplay, print_augment
    from inloop.lab.run_folder import RunFolder
    from inloop.lab.seeds import train_to_end
    from inloop.lab.summary import summarise_augment

    _check_seeds(options)
    given = {field.name: getattr(options, field.name, None) for field in fields(AugmentSettings)}
    chosen = PRESETS.get(options.preset, {}) | {name: value for name, value in given.items() if value is not None}
    name = chosen.pop("data", "digits")
    data = load_data(name)
    settings = with_augment_defaults(name, side=min(data.train_x.shape[2:]), **chosen)
    refuse_idle_options(settings.augment, [name for name, value in given.items() if value is not None])
    choose_images(data, settings)  # refuses what does not fit before anything is written
    out = options.out or Path("runs") / settings.folder_name()
    folder = RunFolder(
        out,
        "augment",
        settings.as_dict() | {"data_digest": data.digest()},
        options.restart,
        AugmentSettings().as_dict(),
    )
    folder.keep_samples(data.train_x[:8])
    with RunDisplay(f"{settings.network} {settings.augment}", options.seeds, settings.epochs) as display:
        results = [
            train_to_end(lambda seed=seed: AugmentExperiment(settings, data, seed), folder.seed(seed), display.show)  # type: ignore[misc]
            for seed in range(options.seeds)
        ]
    if options.json:
        print(json.dumps(summarise_augment(results), allow_nan=False))
    else:
        print_augment(results, settings, out)
    return 0


def _run_splits(options: argparse.Namespace) -> int:
    from inloop.lab.datasets import load_data
    from inloop.lab.display import RunDisplay, print_splits
    from inloop.lab.noise import check_splits
    from inloop.lab.run_folder import RunFolder
    from inloop.lab.split_settings import SplitSettings, with_defaults
    from inloop.lab.splits import run_seed
    from inloop.lab.summary import summarise_seeds

    _check_seeds(options)
    data = load_data(options.data)
    given = {field.name: getattr(options, field.name) for field in fields(SplitSettings) if field.name != "data"}
    settings = with_defaults(options.data, len(data.train_x), **given)
    check_splits(data, settings.sources, settings.noise)
    out = options.out or Path("runs") / settings.folder_name()
    folder = RunFolder(
        out, "splits", settings.as_dict() | {"data_digest": data.digest()}, options.restart, SplitSettings().as_dict()
    )
    with RunDisplay(f"{settings.network} {settings.reward}", options.seeds, settings.epochs) as display:
        results = [run_seed(settings, data, seed, folder.seed(seed), display.show) for seed in range(options.seeds)]
    if options.json:
        print(json.dumps(summarise_seeds(results), allow_nan=False))
    else:
        print_splits(results, settings, out)
    return 0


def _check_seeds(options: argparse.Namespace) -> None:
    if options.seeds < 1:
        raise UsageError(f"--seeds {options.seeds}: allowed are whole numbers from 1.")


def _report(options: argparse.Namespace) -> int:
    from inloop.lab.report_page import write_report

    print(write_report(options.folder))
    return 0


def _require_extras() -> None:
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise UsageError(f"The command line needs {error.name}. Fix: pip install 'inloop[cli]'.") from None


if __name__ == "__main__":
    sys.exit(main())
