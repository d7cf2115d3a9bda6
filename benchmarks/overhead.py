"""What a learner adds to a step besides arithmetic: kernels, waits for the device, and the host's time.

    python -m benchmarks.overhead [--out FILE.json] [--against FILE.json] [--names] [--code NAME=FOLDER ...] [--time]

Kernels and waits are counted on the pretend CUDA device of the tests, in a process of its own; without a compiler, kernels on the CPU. With ``--code`` the host's
time is also measured with the library of other checkouts, which take turns; ``--names`` prints each kernel.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from inloop_lab.bench.overhead import (
    count_kernels,
    find_regressions,
    host_time,
    make_loop,
    measure_overhead,
)

TURNS = 5


def in_a_process(module: str, *arguments: str, code: str | None = None) -> Any:
    """What a script prints, with the library of another checkout if ``code`` is given; None if it fails."""
    environment = dict(os.environ) if code is None else {**os.environ, "PYTHONPATH": str(Path(code) / "src")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def take_turns(checkouts: dict[str, str]) -> dict[str, dict[str, float]]:
    """The host's time with the code of each checkout, and of this one, "now": medians over turns."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ("now", *checkouts)}
    for turn in range(TURNS):
        for name in sorted(times, reverse=bool(turn % 2)):
            times[name].append(in_a_process("benchmarks.overhead", "--time", code=checkouts.get(name)))
    return {
        name: {kind: statistics.median(each[kind] for each in own) for kind in own[0]} for name, own in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--code", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--time", action="store_true", help="only the host's time")
    options = parser.parse_args()
    if options.time:
        print(json.dumps(host_time()))
        return 0
    found = measure_overhead()
    if not torch.cuda.is_available():
        found["models"] = in_a_process("benchmarks.waits") or found["models"]
    if options.code:
        found["took_turns"] = take_turns(dict(each.split("=", 1) for each in options.code))
        found |= found["took_turns"]["now"]
    for row in found["models"]:
        print(json.dumps({**row, "ratio": round(row["kernels"] / row["kernels_plain"], 2)}))
        if options.names:
            for given in (None, {}):
                print(json.dumps(count_kernels(make_loop(row["model"], given, row["told"]))))
    print(json.dumps({name: value for name, value in found.items() if name != "models"}))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    worse = find_regressions(found, json.loads(options.against.read_text())) if options.against else []
    for line in worse:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
