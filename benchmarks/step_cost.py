"""Time of a training step with a learner attached, as a ratio to the same step without.

    python benchmarks/step_cost.py [--repeats 30] [--json]

Both kinds of step alternate within one run, so that whatever else the machine does hits both; medians are reported.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ), torch.randn(256, 784)


def convnet() -> tuple[nn.Module, Tensor]:
    def block(channels: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    blocks = [
        block(3, 32, 1),
        block(32, 32, 1),
        block(32, 64, 2),
        block(64, 64, 1),
        block(64, 128, 2),
        block(128, 128, 1),
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(64, 3, 32, 32)


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def make_step(make_model: Callable[[], tuple[nn.Module, Tensor]], learn: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = make_model()
    y = torch.randint(0, 10, (len(x),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    learner = inloop.InLoop(model, inloop.MixturePolicy(10)) if learn else None

    def step() -> None:
        if learner is not None:
            learner.sample(len(x))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if learner is not None:
            learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(repeats: int) -> list[dict[str, object]]:
    results = []
    for make_model in (mlp, convnet):
        plain, learning = make_step(make_model, learn=False), make_step(make_model, learn=True)
        for _ in range(3):  # caches, allocator, the first step's verification
            plain(), learning()
        times = [(seconds(plain), seconds(learning)) for _ in range(repeats)]
        plain_seconds, learning_seconds = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        results.append(
            {
                "model": make_model.__name__,
                "plain_seconds": round(plain_seconds, 5),
                "learning_seconds": round(learning_seconds, 5),
                "time_ratio": round(ratio, 3),
            }
        )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments.repeats)
    if arguments.json:
        print(
            json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results}, indent=2)
        )
    else:
        for row in results:
            print(
                "{model:8s} plain {plain_seconds:.4f} s   learning {learning_seconds:.4f} s   ratio {time_ratio:.2f}".format(
                    **row
                )
            )
