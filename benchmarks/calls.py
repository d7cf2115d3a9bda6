"""How much code one training step goes through, and how many lines each package has.

    python -m benchmarks.calls          a table; --json prints one JSON object

A *call* is a profile event whose code lies in the package: step 10 of a two-layer perceptron with the paper's settings, after the steps
that are verified: sample, draw, forward, backward, learner.step.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import inloop

ROOT = Path(inloop.__file__).parent
STEP = 10


def count_calls() -> Counter[tuple[str, str]]:
    """By file and function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sources = [(torch.randn(100, 20), torch.randint(0, 10, (100,))) for _ in range(10)]
    mixture = inloop.Mixture(sources)
    learner = inloop.InLoop(model, inloop.MixturePolicy(10))
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents:
            calls[str(path.relative_to(ROOT)), frame.f_code.co_name] += 1

    for step in range(STEP + 1):
        sys.setprofile(note if step == STEP else None)
        x, y = mixture.draw(learner.sample(64))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        learner.step(loss)
        sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()
    return calls


def count_lines() -> dict[str, dict[str, int]]:
    """Files and lines of each package, and of the modules beside them."""
    sizes: dict[str, dict[str, int]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        package = sizes.setdefault(parts[0] if len(parts) > 1 else "modules", {"files": 0, "lines": 0})
        package["files"] += 1
        package["lines"] += len(path.read_text().splitlines())
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    calls, sizes = count_calls(), count_lines()
    by_file: Counter[str] = Counter()
    for (path, _), count in calls.items():
        by_file[path] += count
    if options.json:
        step = {"calls": calls.total(), "functions": len(calls), "files": dict(by_file.most_common())}
        print(json.dumps({"step": step, "packages": sizes}))
        return
    print(f"one step: {calls.total()} calls of {len(calls)} functions in {len(by_file)} files")
    for path, count in by_file.most_common():
        print(f"  {count:4}  {path}")
    for package, size in sizes.items():
        print(f"{package:12} {size['files']:3} files {size['lines']:6} lines")


if __name__ == "__main__":
    main()
