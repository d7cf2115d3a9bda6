"""``inloop check``."""

import argparse
import importlib
import json
import sys
from typing import Any

from inloop.errors import UsageError


def add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser(
        "check",
        help="compare the rewards of your model with brute force, parameter by parameter",
        description="FUNCTION takes nothing and returns (model, batch, losses); losses(model, batch) gives one loss for each example.",
    )
    check.add_argument(
        "target", metavar="MODULE:FUNCTION", help="as in my_project.models:make; imported from this folder"
    )
    check.add_argument("--examples", type=int, default=4, help="examples of the batch to use; default: 4")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=_check, needs=("rich",))


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from inloop.checking import check
    from inloop.cli.check_table import print_check

    try:
        made = _function(options.target)()
    except TypeError as error:
        raise UsageError(f"{options.target} cannot be called without arguments ({error}).") from None
    if not isinstance(made, tuple) or len(made) != 3:
        raise UsageError(f"{options.target} returned a {type(made).__name__}; (model, batch, losses) is needed.")
    report = check(*made, num_examples=options.examples)
    if options.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print_check(report, Console())
    return 0 if report.ok else 1


def _function(target: str) -> Any:
    module, colon, name = target.partition(":")
    if not colon or not module or not name or module.endswith(".py"):
        raise UsageError(f"{target!r}: MODULE:FUNCTION is needed, as in my_project.models:make.")
    sys.path.insert(0, "")
    try:
        function: Any = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target}: there is no module {error.name!r} here.") from None
    if not callable(function) or hasattr(function, "named_parameters"):
        raise UsageError(f"{target}: module {module!r} has no function {name!r}.")
    return function
