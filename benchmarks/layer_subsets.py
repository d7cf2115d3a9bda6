"""How well the reward of a few layers stands for the reward of all, on real data with a fifth of it spoiled.

    python -m benchmarks.layer_subsets TEXT          TEXT: a folder with .txt files; CIFAR-10 is read as by `inloop run`

writes results/cost/layer_subsets.json, model by model. A reward is a sum over layers. So the reward of a set of layers is the reward
with a zero direction for all other layers. For each set: its correlation with the whole reward within a step, averaged over steps; the *advantage*
of spoiled examples, by how many standard deviations of a step's rewards they are below the others; its share of the tape's memory.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.kept import kept_bytes
from torch import Tensor, nn

import inloop
from inloop.alignment import Tape, gradients_of
from inloop_lab.data.images import to_input
from inloop_lab.data.named import load_data
from inloop_lab.networks.transformers import gpt, vit_tiny
from inloop_lab.networks.wide_resnet import make_wide_resnet

RESULT = Path(__file__).parents[1] / "results/cost/layer_subsets.json"
STEPS, WARM_UP, LENGTH = 120, 20, 128
Batch = tuple[Tensor, Tensor, Tensor]  # inputs, targets, and which examples are spoiled


def images(batch: int) -> Iterator[Batch]:
    """CIFAR-10; spoiled examples have a random label."""
    data = load_data("cifar10")
    while True:
        rows = torch.randint(len(data.train_x), (batch,))
        spoiled = torch.rand(batch) < 0.2
        yield (
            to_input(data.train_x[rows]),
            torch.where(spoiled, torch.randint(10, (batch,)), data.train_y[rows]),
            spoiled,
        )


def text(folder: Path, batch: int) -> Iterator[Batch]:
    """Bytes of all files; spoiled examples have them in random order."""
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.txt")))
    all_bytes = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    while True:
        starts = torch.randint(len(all_bytes) - LENGTH - 1, (batch, 1))
        rows = all_bytes[starts + torch.arange(LENGTH + 1)].long()
        spoiled = torch.rand(batch) < 0.2
        rows[spoiled] = rows[spoiled][:, torch.randperm(LENGTH + 1)]
        yield rows[:, :-1], rows[:, 1:], spoiled


def subsets(model: nn.Module, head: str) -> dict[str, list[str]]:
    """Sets of parameters by name. Blocks are the members of the model's one Sequential."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    prefix, blocks = next((name, part) for name, part in model.named_children() if isinstance(part, nn.Sequential))
    norms = {
        f"{name}." for name, part in model.named_modules() if isinstance(part, (nn.LayerNorm, nn.GroupNorm))
    }  # BatchNorm's do not count

    def of(*numbers: int) -> list[str]:
        return [name for name in names if any(name.startswith(f"{prefix}.{number}.") for number in numbers)]

    last = len(blocks) - 1
    sets = {
        "all": names,
        "head": [name for name in names if name.startswith(f"{head}.")],
        "last block": of(last),
        "middle block": of(last // 2),
        "first block": of(0),
        "first and last block": of(0, last),
        "every third block": of(*range(0, last + 1, 3)),
        "normalisation layers": [name for name in names if any(name.startswith(norm) for norm in norms)],
    }
    return {name: members for name, members in sets.items() if members}


def kept_by(tape: Tape, members: list[str]) -> int:
    """The bytes that a tape of these layers alone would keep."""
    return kept_bytes(call for call in tape.calls if set(call.parameter_names.values()) & set(members))


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], head: str
) -> list[dict[str, float | str]]:
    sets = subsets(model, head)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sets}
    shares: dict[str, float] = {}
    before: tuple[Tape, Tensor] | None = None
    for step in range(STEPS):
        x, y, spoiled = next(batches)
        with inloop.capture(model) as tape:
            logits = model(x)
            F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        gradients = gradients_of(model)
        if before is not None and step > WARM_UP:
            rewards = {
                name: before[0].align({key: g if key in members else None for key, g in gradients.items()})
                for name, members in ((name, set(members)) for name, members in sets.items())
            }
            for name, rewards_N in rewards.items():
                correlation = float(torch.corrcoef(torch.stack([rewards["all"], rewards_N]))[0, 1])
                bad_N, good_N = rewards_N[before[1]], rewards_N[~before[1]]
                found[name].append((correlation, float((bad_N.mean() - good_N.mean()) / rewards_N.std())))
        if not shares:
            whole = kept_by(tape, sets["all"])
            shares = {name: kept_by(tape, members) / whole for name, members in sets.items()}
        before = tape, spoiled
        optimizer.step()
        optimizer.zero_grad()
    return [
        {
            "layers": name,
            "correlation": statistics.mean(c for c, _ in pairs),
            "advantage_of_spoiled": statistics.mean(a for _, a in pairs if a == a),  # a step may have none
            "kept": shares[name],
        }
        for name, pairs in found.items()
    ]


def main(folder: Path) -> None:
    makers: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Batch]], str]] = {
        "wrn-16-4": (lambda: make_wide_resnet("wrn-16-4", 3, 10), lambda: images(64), "linear"),
        "wrn-16-4-gn": (lambda: make_wide_resnet("wrn-16-4-gn", 3, 10), lambda: images(64), "linear"),
        "vit-tiny": (vit_tiny, lambda: images(64), "head"),
        "gpt-6": (lambda: gpt(length=LENGTH), lambda: text(folder, 16), "head"),
    }
    results = json.loads(RESULT.read_text())["results"] if RESULT.exists() else []
    for name, (make_model, make_batches, head) in makers.items():
        if any(result["model"] == name for result in results):
            continue
        torch.manual_seed(0)
        model = make_model()
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if "wrn" in name
            else torch.optim.AdamW(model.parameters(), lr=5e-4)
        )
        rows = measure(model, optimizer, make_batches(), head)
        results.append({"model": name, "steps": STEPS, "rows": rows})
        RESULT.write_text(json.dumps({"results": results}, indent=1) + "\n")
        print(name, *rows, sep="\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    main(parser.parse_args().text)
