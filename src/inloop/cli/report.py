"""``inloop report``."""

import argparse
from pathlib import Path


def add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = commands.add_parser(
        "report",
        help="write a page on your run, or on the runs of a folder",
        description="Writes a page with tables and figures: for a file of inloop.Records, shares over steps and rewards by source; "
        "for runs of `inloop run`, the paper's tables and figures.",
    )
    report.add_argument(
        "path", type=Path, metavar="PATH", help="a file of inloop.Records, or a folder with one or more runs"
    )
    report.set_defaults(run=_report, needs=("matplotlib",))


def _report(options: argparse.Namespace) -> int:
    from inloop.reporting.page import write_report

    print(write_report(options.path))
    return 0
