"""The command ``inloop``: run experiments, report on them, measure what a step costs, check a model.

Exit codes: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C (what goes to a folder or a file is saved).
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from inloop import __version__
from inloop.cli.augment import add_augment
from inloop.cli.bench import add_bench
from inloop.cli.check import add_check
from inloop.cli.splits import add_splits
from inloop.errors import InloopError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, do what they say, return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _require(options.needs)
        code: int = options.run(options)
    except KeyboardInterrupt:
        saved = getattr(options, "out", None) is not None or hasattr(options, "restart")
        promise = "; what is finished is saved, the same command continues" if saved else ""
        print(f"inloop: interrupted{promise}", file=sys.stderr)
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
    parser.set_defaults(needs=("matplotlib", "rich"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run an experiment").add_subparsers(required=True, metavar="EXPERIMENT")
    add_splits(run)
    add_augment(run)
    add_bench(commands)
    add_check(commands)
    report = commands.add_parser("report", help="write a page on the runs in a folder")
    report.add_argument("folder", type=Path, metavar="DIR", help="a folder with one or more runs")
    report.set_defaults(run=_report)
    return parser


def _report(options: argparse.Namespace) -> int:
    from inloop.lab.report_page import write_report

    print(write_report(options.folder))
    return 0


def _require(packages: Sequence[str]) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UsageError(f"This command needs {' and '.join(missing)}. Fix: pip install {' '.join(missing)}.")
