"""One mode of one model in a process of its own: does steps on request, and reports the time of each.

    python -m inloop_lab.bench.worker MODEL MODE BATCH [DEVICE]

Reads lines from standard input, "time" or, as the last one, "memory", and answers each with a line of JSON.
"""

import gc
import importlib.util
import json
import logging
import math
import sys
import time
import warnings
from functools import partial
from typing import Any

from inloop.errors import UsageError
from inloop_lab.bench.devices import peak_bytes, wait_for
from inloop_lab.bench.modes import MODES, Step
from inloop_lab.bench.peers import PEERS
from inloop_lab.bench.tasks import MIXED, make_task

ALL_MODES = (*MODES, *PEERS)
STEPS = 2  # timed together: in some modes every second step differs
LEAST_SECONDS = 0.3  # of one timing, if steps are short


def make_step(model: str, mode: str, batch: int | None, device: str = "cpu") -> Step:
    if mode in PEERS and importlib.util.find_spec(PEERS[mode][0]) is None:
        raise ModuleNotFoundError(f"{PEERS[mode][0]} is not installed")
    if model.endswith(MIXED) and mode != "plain" and not mode.startswith("gar"):
        raise UsageError(f"{mode} is not measured under autocast")
    build = MODES[mode] if mode in MODES else PEERS[mode][1]
    step: Step = build(make_task(model, batch, device))
    return step


def _seconds(step: Step, times: int, device: str) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(times):
        step()
    wait_for(device)
    return time.perf_counter() - started


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    warnings.simplefilter("ignore")
    logging.disable()
    model, mode, batch, device = (*sys.argv[1:], "cpu")[:4]
    make = partial(make_step, model, mode, int(batch) or None, device)
    try:
        step: Step | None = make()
        assert step is not None
        for _ in range(STEPS):  # the first steps differ: allocations, checks, nothing to reward yet
            step()
        timed = STEPS * max(1, math.ceil(LEAST_SECONDS / _seconds(step, STEPS, device)))
        _seconds(step, timed - STEPS, device)
    except Exception as error:  # the answer is the error that keeps a library from this model
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        _say({"error": f"{type(error).__name__}: {first}"})
        return
    _say({"ready": True})
    for line in sys.stdin:
        if line.strip() == "memory":
            step = None  # frees its memory: what is measured is made anew
            gc.collect()
            _say({"peak_bytes": peak_bytes(make, 2 * STEPS, STEPS, device)})
            break
        assert step is not None
        _say({"seconds": _seconds(step, timed, device) / timed})


if __name__ == "__main__":
    main()
