"""The command ``inloop``: check a model, report on runs; with the lab, also run experiments and measure the cost of a step.

Other packages add commands by entry points of the group ``inloop.commands``: functions that add a parser to the given subparsers.

Exit codes: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C (a run with a folder or a file is saved).
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from inloop import __version__
from inloop.cli.check import add_check
from inloop.cli.report import add_report
from inloop.errors import InloopError, UsageError

COMMANDS = "inloop.commands"
LAB_COMMANDS = {"run": "run an experiment", "bench": "time and memory of a training step"}
_DISTRIBUTIONS = {"PIL": "pillow"}  # distributions that have another name than their module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _require(options.needs)
        code: int = options.run(options)
    except KeyboardInterrupt:
        saved = getattr(options, "out", None) is not None or hasattr(options, "restart")
        promise = "; finished work is saved, the same command continues" if saved else ""
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
    parser.set_defaults(needs=("matplotlib", "rich", "PIL"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_check(commands)
    add_report(commands)
    for command in entry_points(group=COMMANDS):
        command.load()(commands)
    for name, what in LAB_COMMANDS.items():
        if name not in commands.choices:
            _add_absent(commands, name, what)
    return parser


def _add_absent(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str) -> None:
    """Add a command that takes any arguments and says what to install: no character begins an option."""
    text = f'{what}; part of the lab: in a clone of inloop, pip install -e ".[lab]" -e lab'
    absent = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")
    absent.add_argument("anything", nargs="*")
    absent.set_defaults(run=_say_what_to_install, needs=(), absent=name)


def _say_what_to_install(options: argparse.Namespace) -> int:
    raise UsageError(
        f'`inloop {options.absent}` is part of the lab. Fix: in a clone of inloop, pip install -e ".[lab]" -e lab'
    )


def _require(modules: Sequence[str]) -> None:
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        names = " and ".join(_DISTRIBUTIONS.get(name, name) for name in missing)
        raise UsageError(f'This command needs {names}. Fix: pip install "inloop[cli]"')
