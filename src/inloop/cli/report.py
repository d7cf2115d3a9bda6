"""``inloop report``."""

import argparse
from pathlib import Path


def add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = commands.add_parser(
        "report",
        help="write a page on a run of yours, or on the runs of a folder",
        description="A page with tables and figures: shares over steps and rewards by source, from the file that inloop.Records "
        "wrote in a run of yours; the paper's tables and figures, for runs of `inloop run`.",
    )
    report.add_argument(
        "path", type=Path, metavar="PATH", help="a file of inloop.Records, or a folder with one or more runs"
    )
    report.set_defaults(run=_report, needs=("matplotlib",))


def _report(options: argparse.Namespace) -> int:
    from inloop.reporting.page import write_report

    print(write_report(options.path))
    return 0
