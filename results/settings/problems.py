"""The settings of the table: sources, a judge, evaluations, a network and its optimizer, all on real data.

CIFAR-10's training images are divided once: the first 40,000 are trained on, the next 5,000 judge (the held-out arm alone sees them), the last
5,000 are for choosing (the screening of candidates, the oracle's share). Test images are only looked at by the final runs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inloop.datasets
from inloop_lab.data.images import ImageData, to_input
from inloop_lab.data.named import load_data
from inloop_lab.networks.small import make_network
from inloop_lab.networks.transformers import Transformer

Examples = tuple[Tensor, Tensor]
K = 10
TRAINED, JUDGES = 40_000, 45_000


@dataclass(frozen=True)
class Problem:
    """One setting with one seed.

    Attributes:
        sources: To draw from: images (uint8) or bytes, and labels.
        judges: Held-out examples with right labels, for the arm that is judged by them; one set or one for each good source.
        tests: What the model is evaluated on, by name; the score is the mean over them.
        wrong: The sources with wrong labels or garbage.
    """

    names: Sequence[str]
    sources: Sequence[Examples]
    judges: Sequence[Examples]
    tests: dict[str, Examples]
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    batch: int
    wrong: Sequence[int] = field(default_factory=tuple)
    is_text: bool = False


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each example."""
    return losses_from(model(inputs(x)), y)


def inputs(x: Tensor) -> Tensor:
    """Images as the network takes them; bytes as they are."""
    return to_input(x) if x.dtype == torch.uint8 else x


def losses_from(scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each example: for text the mean over its bytes."""
    if scores.dim() == 2:
        return F.cross_entropy(scores, y, reduction="none")
    return F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(len(y), -1).mean(dim=1)


# ---------------------------------------------------------------- networks


def conv(norm: Callable[[int], nn.Module], classes: int = 10) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, stride=2, padding=1), norm(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), norm(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, classes)),
    )


def conv_gn() -> nn.Module:
    return conv(lambda channels: nn.GroupNorm(8, channels))


def conv_bn() -> nn.Module:
    return conv(nn.BatchNorm2d)


def paper_network(name: str) -> Callable[[], nn.Module]:
    return lambda: make_network(name, (3, 32, 32), 10)


def gpt() -> nn.Module:
    return Transformer(nn.Embedding(256, 96), 64, 96, depth=2, heads=4, classes=256, causal=True)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def papers_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


@dataclass(frozen=True)
class Training:
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    steps: int


PAPER = {name: Training(paper_network(name), papers_sgd, 1000, 500) for name in ("fc-bn", "fc", "cnn-bn")}
GROUP_NORM = Training(conv_gn, adamw, 128, 600)
BATCH_NORM = Training(conv_bn, adamw, 128, 600)
DIGITS = Training(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), adamw, 128, 600)
TEXT = Training(gpt, lambda model: adamw(model, 2e-3), 72, 600)

# ---------------------------------------------------------------- images


@cache
def cifar() -> ImageData:
    return load_data("cifar10")


def held_apart(final: bool) -> tuple[Examples, Examples]:
    """The judge's examples, and those to evaluate on."""
    data = cifar()
    judge = data.train_x[TRAINED:JUDGES], data.train_y[TRAINED:JUDGES]
    test = (data.test_x, data.test_y) if final else (data.train_x[JUDGES:], data.train_y[JUDGES:])
    return judge, test


def splits(generator: torch.Generator) -> tuple[list[Tensor], list[Examples]]:
    """Ten random equal splits of the images that are trained on: their rows, and the examples."""
    data = cifar()
    rows = list(torch.randperm(TRAINED, generator=generator).chunk(K))
    return rows, [(data.train_x[r], data.train_y[r]) for r in rows]


def image_problem(
    training: Training,
    sources: Sequence[Examples],
    final: bool,
    wrong: Sequence[int] = (),
    views: Sequence[Callable[[Tensor], Tensor]] | None = None,
    names: Sequence[str] | None = None,
) -> Problem:
    """Sources of CIFAR-10. ``views``: the ways in which images of the sources look, for evaluating and judging on each."""
    judge, test = held_apart(final)
    views = views or [lambda x: x]
    return Problem(
        names=names or [f"split {k}" for k in range(len(sources))],
        sources=sources,
        judges=[(view(judge[0]), judge[1]) for view in views],
        tests={f"view {v}" if len(views) > 1 else "test": (view(test[0]), test[1]) for v, view in enumerate(views)},
        make_model=training.make_model,
        make_optimizer=training.make_optimizer,
        steps=training.steps,
        batch=training.batch,
        wrong=wrong,
    )


def random_labels(training: Training, num_wrong: int) -> Callable[[int, bool], Problem]:
    def make(seed: int, final: bool) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        _, parts = splits(generator)
        for k in range(num_wrong):
            parts[k] = parts[k][0], torch.randint(10, parts[k][1].shape, generator=generator)
        return image_problem(training, parts, final, wrong=range(num_wrong))

    return make


def human_labels(num_wrong: int) -> Callable[[int, bool], Problem]:
    def make(seed: int, final: bool) -> Problem:
        rows, parts = splits(torch.Generator().manual_seed(seed))
        human = cifar().human_labels
        assert human is not None
        for k in range(num_wrong):
            parts[k] = parts[k][0], human[rows[k]]
        return image_problem(GROUP_NORM, parts, final, wrong=range(num_wrong))

    return make


def two_sources(share_wrong: float) -> Callable[[int, bool], Problem]:
    """The larger of two sources has a share of its labels drawn at random."""

    def make(seed: int, final: bool) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        data = cifar()
        order = torch.randperm(TRAINED, generator=generator)[:20_000]
        x, y = data.train_x[order], data.train_y[order]
        is_wrong = torch.rand(len(y), generator=generator) < share_wrong
        noisy = torch.where(is_wrong, torch.randint(10, y.shape, generator=generator), y)
        sources = [(x[:5_000], y[:5_000]), (x[5_000:], noisy[5_000:])]
        return image_problem(GROUP_NORM, sources, final, wrong=(1,), names=("right", "partly wrong"))

    return make


def noise_images(seed: int, final: bool) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    _, parts = splits(generator)
    x, y = parts[0]
    parts[0] = torch.randint(256, x.shape, generator=generator, dtype=torch.uint8), y
    return image_problem(GROUP_NORM, parts, final, wrong=(0,))


def shifted_labels(seed: int, final: bool) -> Problem:
    _, parts = splits(torch.Generator().manual_seed(seed))
    parts[0] = parts[0][0], (parts[0][1] + 1) % 10
    return image_problem(GROUP_NORM, parts, final, wrong=(0,))


def turned(x: Tensor) -> Tensor:
    return x.rot90(1, (-2, -1))


def blurred(x: Tensor) -> Tensor:
    """The mean over 5 x 5 pixels."""
    some = [F.avg_pool2d(part.float(), 5, stride=1, padding=2, count_include_pad=False) for part in x.split(5_000)]
    return torch.cat(some).to(torch.uint8)


def grey(x: Tensor) -> Tensor:
    return x.float().mean(dim=1, keepdim=True).expand_as(x).to(torch.uint8)


def same(x: Tensor) -> Tensor:
    return x


def different(view: Callable[[Tensor], Tensor]) -> Callable[[int, bool], Problem]:
    """Three of ten sources look different; all labels are right."""

    def make(seed: int, final: bool) -> Problem:
        _, parts = splits(torch.Generator().manual_seed(seed))
        parts = [(view(x) if k < 3 else x, y) for k, (x, y) in enumerate(parts)]
        return image_problem(GROUP_NORM, parts, final, views=(same, view))

    return make


def one_class_each(seed: int, final: bool) -> Problem:
    data = cifar()
    x, y = data.train_x[:TRAINED], data.train_y[:TRAINED]
    problem = image_problem(GROUP_NORM, [(x[y == k], y[y == k]) for k in range(10)], final)
    (test_x, test_y) = problem.tests["test"]
    tests = {f"class {k}": (test_x[test_y == k], test_y[test_y == k]) for k in range(10)}
    return Problem(**{**vars(problem), "tests": tests, "names": [f"class {k}" for k in range(10)]})


def equal(training: Training, batch: int) -> Callable[[int, bool], Problem]:
    def make(seed: int, final: bool) -> Problem:
        _, parts = splits(torch.Generator().manual_seed(seed))
        problem = image_problem(training, parts, final)
        return Problem(**{**vars(problem), "batch": batch})

    return make


def duplicates(seed: int, final: bool) -> Problem:
    _, parts = splits(torch.Generator().manual_seed(seed))
    x, y = parts[0]
    parts[0] = x[:500].repeat(8, 1, 1, 1), y[:500].repeat(8)
    return image_problem(GROUP_NORM, parts, final)


def five_named(seed: int, final: bool) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    data = cifar()
    rows = torch.randperm(TRAINED, generator=generator).chunk(5)
    parts = [(data.train_x[r], data.train_y[r]) for r in rows]
    x, y = parts[1]
    parts[1] = (
        x,
        torch.where(torch.rand(len(y), generator=generator) < 0.5, torch.randint(10, y.shape, generator=generator), y),
    )
    parts[2] = blurred(parts[2][0]), parts[2][1]
    x, y = parts[3]
    kept = torch.rand(len(y), generator=generator) < 0.6 ** y.float()  # class 9 is a hundred times rarer than class 0
    parts[3] = x[kept], y[kept]
    x, y = parts[4]
    parts[4] = x[:500].repeat(16, 1, 1, 1), y[:500].repeat(16)
    names = ("clean", "half wrong", "blurred", "imbalanced", "duplicates")
    return image_problem(GROUP_NORM, parts, final, wrong=(1,), views=(same, blurred), names=names)


def equal_digits(batch: int) -> Callable[[int, bool], Problem]:
    """Ten equal splits of the embedded digits, for counting false alarms over many short runs."""

    def make(seed: int, final: bool) -> Problem:
        x, y = inloop.datasets.digits()
        x = x.flatten(1)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        sources = [(x[rows], y[rows]) for rows in order[:1500].chunk(K)]
        rest = x[order[1500:]], y[order[1500:]]
        names = [f"split {k}" for k in range(K)]
        return Problem(names, sources, [rest], {"test": rest}, DIGITS.make_model, adamw, DIGITS.steps, batch)

    return make


# ---------------------------------------------------------------- text

LENGTH = 64


@cache
def domains() -> dict[str, Tensor]:
    """Rows of LENGTH + 1 bytes of each domain."""
    folder = Path(os.environ["INLOOP_DATA"]) / "text"
    texts = {}
    for path in sorted(folder.glob("*.txt")):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        texts[path.stem] = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return texts


def text(with_garbage: bool) -> Callable[[int, bool], Problem]:
    """Eight domains, and the bytes of the first in random order. The last tenths of the domains judge, are for choosing, and test."""

    def make(seed: int, final: bool) -> Problem:
        names, sources, judges, tests = [], [], [], {}
        for name, rows in domains().items():
            tenth = len(rows) // 10
            names.append(name)
            sources.append((rows[: 7 * tenth, :-1], rows[: 7 * tenth, 1:]))
            judges.append((rows[7 * tenth : 8 * tenth, :-1], rows[7 * tenth : 8 * tenth, 1:]))
            start = (9 if final else 8) * tenth
            tests[name] = rows[start : start + 500, :-1], rows[start : start + 500, 1:]
        if with_garbage:
            first = next(iter(domains().values()))[: len(sources[0][0])]
            order = torch.randperm(first.numel(), generator=torch.Generator().manual_seed(seed))
            garbage = first.flatten()[order].view_as(first)
            names, sources = ["garbage", *names], [(garbage[:, :-1], garbage[:, 1:]), *sources]
        wrong = (0,) if with_garbage else ()
        return Problem(
            *(names, sources, judges, tests, TEXT.make_model, TEXT.make_optimizer, TEXT.steps, TEXT.batch, wrong), True
        )

    return make


SETTINGS: dict[str, Callable[[int, bool], Problem]] = {
    **{f"a {name}": random_labels(training, 1) for name, training in PAPER.items()},
    "b group norm": random_labels(GROUP_NORM, 1),
    "b batch norm": random_labels(BATCH_NORM, 1),
    "c three of ten": random_labels(GROUP_NORM, 3),
    "d human, one": human_labels(1),
    "d human, three": human_labels(3),
    **{f"e two sources, {share:.0%}": two_sources(share) for share in (0.3, 0.6, 1.0)},
    "f noise images": noise_images,
    "g shifted labels": shifted_labels,
    "h turned": different(turned),
    "h one class each": one_class_each,
    "h blurred": different(blurred),
    "h grey": different(grey),
    "i equal, batch 8": equal(GROUP_NORM, 8),
    "i equal, batch 32": equal(GROUP_NORM, 32),
    "i equal, batch 128": equal(GROUP_NORM, 128),
    "i equal, batch 1000": equal(PAPER["fc-bn"], 1000),
    **{f"i digits, batch {batch}": equal_digits(batch) for batch in (8, 32, 128, 1000)},
    "j duplicates": duplicates,
    "k text and garbage": text(with_garbage=True),
    "l text": text(with_garbage=False),
    "m five named": five_named,
}
SCREENED = (
    "a fc-bn",
    "b group norm",
    "c three of ten",
    "d human, three",
    "e two sources, 30%",
    "e two sources, 60%",
    "f noise images",
    "h turned",
    "h one class each",
    "i equal, batch 128",
    "k text and garbage",
    "m five named",
)
