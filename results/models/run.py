"""Runs `inloop.check` and a short training with a learner on one small model of every family, and continues where it was interrupted.

    python results/models/run.py [--workers N] [--library transformers|timm] [--only FAMILY ...] [--again STATUS ...]

A family is one line of models.jsonl, the last one counts. Each is tried in a process of its own, with a limit of time, so that one that is killed does
not end the run. Without models.jsonl all are tried.
"""

import argparse
import json
import logging
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch
from processes import Send, results
from torch import nn
from trial import (
    SECONDS,
    Inputs,
    Skipped,
    checked,
    examples_interact,
    part,
    plain_step,
    time_limit,
    tried_with_a_learner,
    without_dropout,
)

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations only; a family that looks for weights fails at once
_OPERATIONS = torch.library.Library(
    "torchvision", "DEF"
)  # torchvision for CUDA has none with a CPU torch, and cannot be imported
for _name in ("nms", "qnms"):
    _OPERATIONS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402
import timm_families  # noqa: E402
import transformers  # noqa: E402
import transformers_families  # noqa: E402

import inloop  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "models.jsonl"
LIBRARIES = {"transformers": transformers_families, "timm": timm_families}
VERSIONS = {
    "inloop": inloop.__version__,
    "revision": subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "timm": timm.__version__,
}
SECONDS_OF_A_FAMILY = 240  # of the processor
KILLED = {"status": "not built", "message": "killed while it was built"}  # unless it has told more


def built(library: str, family: str) -> tuple[int, nn.Module, Inputs, str]:
    """The model of the family, and the inputs, that train the most parameters without inloop, and their number.

    Raises:
        Skipped: If nothing trains, with all reasons.
    """
    best: tuple[int, nn.Module, Inputs, str] | None = None
    reasons: list[str] = []
    for attempts in LIBRARIES[library].attempts(family):
        for label, build in attempts:
            try:
                model, ways = build()
                without_dropout(model)
            except Exception as error:
                reasons.append(reason(label, error))
                continue
            for inputs in ways:
                try:
                    torch.manual_seed(0)
                    reached = plain_step(model, inputs)
                except Exception as error:
                    reasons.append(reason(f"{label}, {inputs}", error))
                else:
                    if best is None or reached > best[0]:
                        best = reached, model, inputs, f"{label}, {inputs}"
        if best is not None:
            return best
    raise Skipped(" | ".join(dict.fromkeys(reasons)) or "nothing to build")


def reason(what: str, error: Exception) -> str:
    """Why something cannot be built; a timeout is none and ends the search."""
    if isinstance(error, TimeoutError):
        raise error
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def trial(library: str, family: str, send: Send) -> None:
    """Try one family, and send the parts of its result as they are known."""
    torch.manual_seed(0)
    try:
        with time_limit(2 * SECONDS):
            reached, model, inputs, label = built(library, family)
    except Exception as error:
        send({"status": "not built", "message": f"{error}"[:1500]})
        return
    send(
        {
            "status": "crash",
            "message": "killed while it was checked",
            "class": type(model).__name__,
            "built": label,
            "reached": reached,
            "trainable": sum(p.requires_grad for p in model.parameters()),
            "parameters": sum(p.numel() for p in model.parameters()),
            "inputs": {name: list(value.shape) for name, value in inputs(0).items() if isinstance(value, torch.Tensor)},
        }
    )
    interaction = part(
        "interaction", lambda: dict(zip(("interacts", "random"), examples_interact(model, inputs), strict=True))
    )
    send({name: interaction["interaction"].get(name) for name in ("interacts", "random")})
    result = part("check", lambda: checked(model, inputs), 4 * SECONDS)["check"]  # brute force is slow
    send({"message": "", "learner": {"status": "crash", "message": "killed in training"}} | result)
    send(part("learner", lambda: tried_with_a_learner(model, inputs)))


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each family."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {(row["library"], row["family"]): row for row in rows}


def todo(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The families to try, of their libraries."""
    done = read()
    everything = [
        (library, family)
        for library in ([options.library] if options.library else LIBRARIES)
        for family in LIBRARIES[library].families()
    ]
    if options.only:
        return [task for task in everything if task[1] in options.only]
    return [task for task in everything if task not in done or done[task]["status"] in options.again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="only these families, done or not")
    parser.add_argument(
        "--again", nargs="+", metavar="STATUS", default=[], help="also families whose line has one of these statuses"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="how many at a time (one for each core)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    tasks = todo(options)
    for (library, family), found in results(
        tasks, lambda task, send: trial(*task, send), options.workers, SECONDS_OF_A_FAMILY
    ):
        row = {"library": library, "family": family, **KILLED, **found, "versions": VERSIONS}
        with RESULTS.open("ab", buffering=0) as file:  # a line is one write, so another run may append, too
            file.write(f"{json.dumps(row)}\n".encode())
        learner = row.get("learner", {}).get("status", "")
        print(
            f"{library} {family}: {row['status']}, learner {learner}, {row['total_seconds']} s; {row['message'][:150]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
