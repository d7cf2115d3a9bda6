"""``inloop run mixture``."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

from inloop_lab.commands.run_options import add_run_options, check_seeds, refuse_idle_options, train_seeds


def add_mixture(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from inloop_lab.mixtures.settings import MixtureName, MixtureSettings, ModelName, PriorName

    usual = MixtureSettings(data="")
    mixture = experiments.add_parser(
        "mixture",
        help="train a small language model on domains of text, and learn how often to use each",
        description="A small GPT on a mixture of text domains, whose shares are learned while it trains. The same command again continues an interrupted "
        "run.",
    )
    mixture.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="it has a .txt, .jsonl or .parquet file, or a folder of them, for each domain; a Hugging Face dataset on disk counts as a folder",
    )
    mixture.add_argument("--tokenizer", metavar="FILE.json", help="of the package tokenizers; default: bytes")
    mixture.add_argument("--model", choices=get_args(ModelName), help=f"default: {usual.model}")
    mixture.add_argument("--length", type=int, help=f"tokens of a row; default: {usual.length}")
    mixture.add_argument("--batch", type=int, help=f"default: {usual.batch}")
    mixture.add_argument("--steps", type=int, help=f"default: {usual.steps}")
    mixture.add_argument("--learning-rate", type=float, help=f"default: {usual.learning_rate:g}")
    mixture.add_argument(
        "--mixture",
        choices=get_args(MixtureName),
        metavar="NAME",
        help=f"one of {', '.join(get_args(MixtureName))}; default: {usual.mixture}",
    )
    mixture.add_argument(
        "--prior", choices=get_args(PriorName), help=f"where a learned mixture begins; default: {usual.prior}"
    )
    mixture.add_argument("--temperature", type=float, help=f"of tempered shares; default: {usual.temperature:g}")
    mixture.add_argument("--floor", type=float, help="the least share of each domain in a learned mixture; default: 0")
    mixture.add_argument("--bad", metavar="NAME,...", help="domains that the oracle leaves out")
    mixture.add_argument("--target", metavar="FILE", help="text that judges instead of the training data")
    mixture.add_argument(
        "--held-out", type=int, help=f"rows at the end of each domain for testing; default: {usual.held_out}"
    )
    mixture.add_argument("--part", type=float, help="the share of each batch that is rewarded; default: 1")
    mixture.add_argument("--bfloat16", action="store_true", default=None, help="train under autocast in bfloat16")
    mixture.add_argument("--cache", type=Path, help="a folder for tokens; default: runs/tokens")
    add_run_options(mixture, seeds=1)
    mixture.set_defaults(run=_run_mixture)


def _run_mixture(options: argparse.Namespace) -> int:
    from inloop_lab.mixtures.domains import load_domains
    from inloop_lab.mixtures.experiment import MixtureExperiment, num_periods
    from inloop_lab.mixtures.settings import ONLY_FOR, MixtureSettings
    from inloop_lab.mixtures.show import print_mixture, summarise_mixture
    from inloop_lab.runs.folder import RunFolder

    check_seeds(options)
    given = {field.name: getattr(options, field.name) for field in fields(MixtureSettings)}
    settings = MixtureSettings(**{name: value for name, value in given.items() if value is not None})
    refuse_idle_options("mixture", settings.mixture, given, ONLY_FOR)
    domains = load_domains(settings, options.cache or Path("runs") / "tokens")
    out = options.out or Path("runs") / settings.folder_name()
    folder = RunFolder(out, "mixture", settings.as_dict() | {"data_digest": domains.digest}, options.restart)
    results = train_seeds(
        lambda seed: MixtureExperiment(settings, domains, seed),
        folder,
        f"{settings.model} {settings.mixture}",
        options.seeds,
        num_periods(settings),
    )
    if options.json:
        print(json.dumps(summarise_mixture(results), allow_nan=False))
    else:
        print_mixture(results, settings, out)
    return 0
