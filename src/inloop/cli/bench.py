"""``inloop bench``."""

import argparse
import json
from pathlib import Path

from inloop.errors import UsageError


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
