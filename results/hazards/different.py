"""Sources that are different, not bad: their shares under a learner, and the effect on the model.

    python results/hazards/different.py digits
    python results/hazards/different.py text FOLDER      a .txt file for each source

writes digits.json or text.json beside this file, run by run; runs in it are not repeated.

Digits: ten sources with right labels, three of them turned by ninety degrees; or one digit in each source; or three sources
that contradict the others (labels moved by one), so that no model can serve both. Text: a language model on bytes; each file
is a source, and one more source holds the bytes of the first in random order. Uniform sampling is the arm to compare with:
it uses all sources alike.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop
from inloop.atomic_files import write_atomically
from inloop.datasets import digits
from inloop.policies import Shares
from inloop_lab.networks.transformers import Transformer

HERE = Path(__file__).parent
ARMS = ("uniform", "gar", "gar, softmax", "gar, softmax, floor", "gar, held-out")
Source = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Sources to draw from, held-out examples of each, and how to train on them."""

    names: list[str]
    sources: list[Source]
    held_out: list[Source]
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    batch: int
    judges: range  # sources whose held-out examples are the held-out reference


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def make_policy(arm: str, num_sources: int) -> inloop.Policy:
    if arm == "uniform":
        return Shares.uniform(num_sources)
    form = "softmax" if "softmax" in arm else "inverted"
    return inloop.MixturePolicy(num_sources, form=form, floor=0.05 if "floor" in arm else 0.0)


def train(problem: Problem, arm: str, seed: int) -> dict:
    """One run: shares at the end, the sources called bad, and the held-out loss and accuracy on each source."""
    torch.manual_seed(seed)
    model = problem.make_model()
    optimizer = problem.make_optimizer(model)
    mixture, policy = inloop.Mixture(problem.sources), make_policy(arm, len(problem.sources))
    share = max(1, problem.batch // len(problem.sources))

    def held_out_loss() -> Tensor:
        """The loss on equally many held-out examples of each judging source, drawn anew each time."""
        sets = [problem.held_out[k] for k in problem.judges]
        rows = [torch.randint(len(x), (share,)) for x, _ in sets]
        x, y = (torch.cat([s[i][r] for s, r in zip(sets, rows, strict=True)]) for i in (0, 1))
        return loss_of(model, x, y)

    reference = held_out_loss if "held-out" in arm else "next"
    learner = inloop.InLoop(
        model, policy, reference=reference, update=False if arm == "uniform" else inloop.Reinforce()
    )
    for _ in range(problem.steps):
        x, y = mixture.draw(learner.sample(problem.batch))
        loss = loss_of(model, x, y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for x, y in problem.held_out]
        right = [float((model(x).argmax(dim=-1) == y).float().mean()) for x, y in problem.held_out]
    return {
        "shares": policy.probabilities().tolist(),
        "named": learner.statistics.flagged(),
        "advantages": [verdict.advantage for verdict in learner.statistics.verdicts()],
        "held_out_loss": losses,
        "held_out_accuracy": right,
    }


def digits_problem(kind: str) -> Problem:
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    odd = range(7, 10)
    if kind == "one digit each":
        parts = [(images[labels == k], labels[labels == k]) for k in range(10)]
    else:
        parts = list(zip(images.chunk(10), labels.chunk(10), strict=True))
    if kind == "three turned":
        parts = [(x.rot90(1, (-2, -1)) if k in odd else x, y) for k, (x, y) in enumerate(parts)]
    if kind == "three contradict":
        parts = [(x, (y + 1) % 10 if k in odd else y) for k, (x, y) in enumerate(parts)]
    return Problem(
        names=[f"{k}" for k in range(10)],
        sources=[(x[:-40], y[:-40]) for x, y in parts],
        held_out=[(x[-40:], y[-40:]) for x, y in parts],
        make_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=600,
        batch=250,
        judges=range(10),
    )


def text_problem(folder: Path, length: int = 64) -> Problem:
    """Next byte after up to ``length`` others; the last tenth of each file is held out."""
    names, sources, held_out = [], [], []

    def add(name: str, text: Tensor) -> None:
        rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
        cut = len(rows) * 9 // 10
        names.append(name)
        sources.append((rows[:cut, :-1], rows[:cut, 1:]))
        held_out.append((rows[cut : cut + 500, :-1], rows[cut : cut + 500, 1:]))

    for path in sorted(folder.glob("*.txt")):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        if not names:
            add("bytes in random order", text[torch.randperm(len(text), generator=torch.Generator().manual_seed(0))])
        add(path.stem, text)
    return Problem(
        *(names, sources, held_out),
        make_model=lambda: Transformer(nn.Embedding(256, 96), length, 96, depth=2, heads=4, classes=256, causal=True),
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        steps=1000,
        batch=72,
        judges=range(1, len(names)),  # not the bytes in random order
    )


def problems(data: str, folder: Path | None) -> Iterator[tuple[str, Problem]]:
    if data == "digits":
        for kind in ("three turned", "one digit each", "three contradict"):
            yield kind, digits_problem(kind)
    elif folder is None:
        raise SystemExit("text needs a folder with a .txt file for each source")
    else:
        yield "text", text_problem(folder)


def main(data: str, folder: Path | None, seeds: int) -> None:
    path = HERE / f"{data}.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    done = {(result["kind"], result["arm"], result["seed"]) for result in results}
    for kind, problem in problems(data, folder):
        for seed in range(seeds):
            for arm in ARMS:
                if (kind, arm, seed) in done:
                    continue
                run = {"kind": kind, "arm": arm, "seed": seed, "names": problem.names, **train(problem, arm, seed)}
                results.append(run)
                print(kind, arm, seed, [round(share, 2) for share in run["shares"]], flush=True)
                write_atomically(path, lambda file: file.write(json.dumps({"results": results}, indent=1).encode()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("digits", "text"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
