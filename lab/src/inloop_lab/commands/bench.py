"""``inloop bench``."""

import argparse
from pathlib import Path

from inloop.errors import UsageError


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="time and memory of a training step, against plain training and other libraries",
        description="Each mode runs in a process of its own and takes turns with one that trains plainly; ratios are medians.",
    )
    bench.add_argument(
        "--models",
        default="wrn-16-4,gpt-6,vit-tiny,mlp",
        help="separated by commas; default: %(default)s; also any wrn-DEPTH-WIDTH[-gn] and gpt-DEPTH[@SEQUENCE]; with +bf16 at the end under autocast",
    )
    bench.add_argument("--modes", help="separated by commas; default: all")
    bench.add_argument("--batch", type=int, help="default: the model's usual one")
    bench.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:N for one of several GPUs; default: cpu")
    bench.add_argument("--repeats", type=int, default=10, help="default: 10")
    bench.add_argument("--figure", type=Path, metavar="FILE.svg", help="also draw the ratios")
    bench.add_argument(
        "--out", type=Path, metavar="FILE.json", help="keep the results here; results in it are not measured again"
    )
    bench.add_argument(
        "--against",
        type=Path,
        metavar="FILE.json",
        help="fail if a ratio is worse than in these results, by more than its noise",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.add_argument(
        "--overhead",
        action="store_true",
        help="with --json: also the kernels, waits and host time that a learner adds to three small models of its own; "
        "takes a quarter of a minute on a quiet machine",
    )
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from rich.console import Console

    from inloop_lab.bench.devices import refuse_unavailable_device
    from inloop_lab.bench.measure import measure
    from inloop_lab.bench.overhead import measure_overhead
    from inloop_lab.bench.regression import find_regressions
    from inloop_lab.bench.show import as_json, describe, print_bench, read_bench, write_bench, write_bench_figure
    from inloop_lab.bench.tasks import refuse_unknown_model
    from inloop_lab.bench.worker import ALL_MODES

    models, modes = options.models.split(","), (options.modes or ",".join(ALL_MODES)).split(",")
    for name in models:
        refuse_unknown_model(name)
    if unknown := [name for name in modes if name not in ALL_MODES]:
        raise UsageError(f"--modes {unknown[0]}: allowed are {', '.join(ALL_MODES)}.")
    if options.overhead and not options.json:
        raise UsageError("--overhead is part of what --json prints. Fix: give both.")
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: allowed are whole numbers from 1.")
    if options.batch is not None and options.batch < 2:
        raise UsageError(f"--batch {options.batch}: allowed are whole numbers from 2.")
    refuse_unavailable_device(options.device)
    before = read_bench(options.against) if options.against is not None else []
    log = Console(stderr=True)
    rows = read_bench(options.out) if options.out is not None and options.out.exists() else []
    for row in measure(models, modes, options.batch, options.repeats, rows, options.device):
        rows.append(row)
        log.print(describe(row), highlight=False, markup=False)
        if options.out is not None:
            write_bench(rows, options.out)
    if options.figure is not None:
        write_bench_figure(rows, options.figure)
    if options.json:
        print(as_json(rows, measure_overhead() if options.overhead else None))
    else:
        print_bench(rows, Console())
    worse = find_regressions(rows, before)
    for line in worse:
        log.print(f"worse: {line}", highlight=False, markup=False)
    return 1 if worse else 0
