"""``inloop run augment``."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

from inloop_lab.commands.run_options import DATA_HELP, add_run_options, check_seeds, refuse_idle_options, train_seeds

_AUGMENT_HELP = (
    "ola: learned in the run; ua: UniformAugment; ra: RandAugment; ta: TrivialAugment; aa: AutoAugment; fast-aa: Fast AutoAugment; pba: "
    "Population Based Augmentation; none: crop, flip and Cutout only; default: ola"
)


def add_augment(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from inloop.augment import SPACES
    from inloop_lab.augmentation.settings import PRESETS, AugmentName

    augment = experiments.add_parser(
        "augment",
        help="train with learned, or with fixed, image augmentation",
        description="The paper's augmentation experiment: the training run itself learns the augmentation policy (ola), or the policy is fixed. "
        "The same command again continues an interrupted run.",
    )
    augment.add_argument("--data", metavar="digits|cifar10|cifar100|PATH", help=DATA_HELP)
    augment.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="PRESET",
        help=f"the paper's full recipe, other options still count: {', '.join(PRESETS)}",
    )
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
        help="training images to hold out; their accuracy is reported instead of the test images'",
    )
    augment.add_argument("--learning-rate", type=float, help="default: 0.1")
    augment.add_argument("--warmup", type=int, help="epochs; default: a fortieth, at least 1")
    augment.add_argument("--padding", type=int, help="of the random crop; default: 4, for small images less")
    augment.add_argument(
        "--flip", action=argparse.BooleanOptionalAction, help="left-right, half the time; default: yes, for digits no"
    )
    augment.add_argument(
        "--cutout", type=int, help="side of the final Cutout; default: 16, for small images less, for digits 0"
    )
    augment.add_argument("--accumulate", type=int, help="ola: rewarded steps for each update of the policy; default: 1")
    augment.add_argument("--policy-learning-rate", type=float, help="ola: the policy's, of Adam; default: 0.1")
    augment.add_argument("--normalisation", choices=("step", "center"), help="ola: of rewards; default: step")
    augment.add_argument("--start", type=int, help="ola: epochs before the policy first moves; default: 0")
    augment.add_argument(
        "--layers", choices=("all", "linear"), help="ola: layers that count for the reward; default: all"
    )
    augment.add_argument(
        "--interleave",
        action=argparse.BooleanOptionalAction,
        help="ola: every second step without operations; default: yes",
    )
    augment.add_argument("--reference", choices=("next", "heldout"), help="ola: the judge of its steps; default: next")
    augment.add_argument("--ra-operations", type=int, help="ra: its N; default: 2")
    augment.add_argument("--ra-strength", type=int, help="ra: its M, of 0..30; default: 14")
    add_run_options(augment, seeds=5)
    augment.set_defaults(run=_run_augment)


def _run_augment(options: argparse.Namespace) -> int:
    from inloop_lab.augmentation.experiment import AugmentExperiment, choose_images
    from inloop_lab.augmentation.settings import ONLY_FOR, PRESETS, AugmentSettings, with_augment_defaults
    from inloop_lab.augmentation.show import print_augment, summarise_augment
    from inloop_lab.data.named import load_data
    from inloop_lab.runs.folder import RunFolder

    check_seeds(options)
    given = {field.name: getattr(options, field.name, None) for field in fields(AugmentSettings)}
    chosen = PRESETS.get(options.preset, {}) | {name: value for name, value in given.items() if value is not None}
    name = chosen.pop("data", "digits")
    data = load_data(name)
    side = min(data.train_x.shape[2:])
    settings = with_augment_defaults(name, side=side, **chosen)
    refuse_idle_options("augment", settings.augment, given, ONLY_FOR)
    choose_images(data, settings)  # refuses settings that do not fit before anything is written
    out = options.out or Path("runs") / settings.folder_name(with_augment_defaults(name, side=side))
    folder = RunFolder(
        out,
        "augment",
        settings.as_dict() | {"data_digest": data.digest()},
        options.restart,
        AugmentSettings().as_dict(),
    )
    folder.keep_samples(data.train_x[:8])
    title = f"{settings.network} {settings.augment}"
    results = train_seeds(
        lambda seed: AugmentExperiment(settings, data, seed), folder, title, options.seeds, settings.epochs
    )
    if options.json:
        print(json.dumps(summarise_augment(results), allow_nan=False))
    else:
        print_augment(results, settings, out)
    return 0
