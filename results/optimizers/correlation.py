"""How well rewards predict what an example did to the next loss, under the optimizers that people use.

    python results/optimizers/correlation.py       writes correlation.json, correlation.svg and the tables of README.md and docs/how-it-works.md; 40 seconds

The truth is a finite difference, in float64, of the loss on another batch after the real optimizer's step, by the weight of one example in that step.
It is correlated, over the examples of a batch, with three rewards: the plain product of gradients (the paper's), and the product through
the optimizer's step with the second moment held fixed or moving. A perceptron with one hidden layer learns the digits of `inloop.datasets`.
"""

import copy
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.datasets import digits
from inloop.optimizers import StepDerivative
from inloop_lab.page_block import with_block

HERE = Path(__file__).parent
COMMAND = "python results/optimizers/correlation.py"
N, REFERENCE = 32, 256  # examples of a step, and of the loss that it is judged by
STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200)
SEEDS = range(5)
REWARDS = ("plain", "fixed", "moving")
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
CLIPPED = ("SGD, Nesterov", "AdamW")
CLIP_AT = (1.0, 0.5, 0.1)  # times the norm of the step's gradient


class Training:
    """A model, its optimizer and its data; the norm of gradients may be clipped."""

    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        x, y = digits()
        self.x, self.y = x.flatten(1).double(), y
        self.model: nn.Module = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).double()
        self.optimizer = make(self.model.parameters())

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.y), (n,))
        return self.x[rows], self.y[rows]

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")

    def step(self, batch: tuple[Tensor, Tensor], weights: Tensor | None = None, clip: float | None = None) -> None:
        self.optimizer.zero_grad()
        losses = self.losses(batch)
        (losses if weights is None else losses * weights).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()

    def copied(self) -> "Training":
        other = copy.copy(self)
        other.model, other.optimizer = copy.deepcopy((self.model, self.optimizer))
        return other


def truth(training: Training, batch: Any, judge: Any, clip: float | None, h: float = 1e-4) -> Tensor:
    """``-dL_judge / dw_i`` of the step that the real optimizer takes."""

    def loss(i: int, change: float) -> float:
        weights, other = torch.ones(N, dtype=torch.float64), training.copied()
        weights[i] += change
        other.step(batch, weights, clip)
        return float(other.losses(judge).mean().detach())

    return torch.tensor([-(loss(i, h) - loss(i, -h)) / (2 * h) for i in range(N)])


def rewards(training: Training, batch: Any, judge: Any, clip: float | None) -> dict[str, Tensor]:
    """The three rewards of each example, [N] each. The training goes on by the step."""
    parameters = dict(training.model.named_parameters())
    every = list(parameters.values())
    rows = [torch.autograd.grad(loss, every, retain_graph=True) for loss in training.losses(batch)]
    derivatives = {
        form: StepDerivative(training.model, training.optimizer, form) for form in REWARDS if form != "plain"
    }
    for derivative in derivatives.values():
        derivative.attach()
    training.step(batch, clip=clip)
    gradients = torch.autograd.grad(training.losses(judge).mean(), every)
    found = {}
    for form in REWARDS:
        directions = gradients
        if form != "plain":
            directions = derivatives[form].of_last_step(dict(zip(parameters, gradients, strict=True))).values()
            derivatives[form].detach()
        found[form] = torch.stack([sum((g * d).sum() for g, d in zip(row, directions, strict=True)) for row in rows])
    return found


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def measure(name: str, seed: int, steps: Iterable[int], clip_at: float | None = None) -> dict[str, dict[int, float]]:
    """Correlations with the truth at each of the steps, by reward."""
    training, found = Training(OPTIMIZERS[name], seed), {form: {} for form in REWARDS}
    for step in range(1, max(steps) + 1):
        batch, clip = training.batch(N), None
        if clip_at is not None:
            gradients = torch.autograd.grad(training.losses(batch).mean(), list(training.model.parameters()))
            clip = clip_at * float(torch.stack([g.norm() for g in gradients]).norm())
        if step not in steps:
            training.step(batch, clip=clip)
            continue
        judge = training.batch(REFERENCE)
        expected = truth(training, batch, judge, clip)
        for form, values in rewards(training, batch, judge, clip).items():
            found[form][step] = correlation(values, expected)
    return found


def mean_over_seeds(runs: list[dict[str, dict[int, float]]]) -> dict[str, dict[str, float]]:
    return {
        form: {str(step): round(statistics.mean(run[form][step] for run in runs), 4) for step in runs[0][form]}
        for form in REWARDS
    }


def table_over_steps(results: dict[str, Any], names: Iterable[str] = tuple(OPTIMIZERS)) -> str:
    shown = [str(step) for step in STEPS]
    lines = [f"| optimizer | reward | {' | '.join(f'step {s}' for s in shown)} |", f"|---|---|{'---|' * len(shown)}"]
    for name in names:
        for form, values in results["optimizers"][name].items():
            lines.append(f"| {name} | {form} | {' | '.join(f'{values[s]:.3f}' for s in shown)} |")
    return "\n".join(lines)


def table_of_clipping(results: dict[str, Any]) -> str:
    lines = ["| optimizer | norm clipped to | plain | fixed | moving |", "|---|---|---|---|---|"]
    for name, by_clip in results["clipping"].items():
        for clip, forms in by_clip.items():
            cells = " | ".join(f"{forms[form]['200']:.3f}" for form in REWARDS)
            lines.append(f"| {name} | {clip} of itself | {cells} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    figure, axes = plt.subplots(2, 4, figsize=(11, 5), sharex=True, sharey=True)
    colours = {"plain": "#c0392b", "fixed": "#2471a3", "moving": "#7d8a93"}
    for axis, (name, forms) in zip(axes.flat, results["optimizers"].items(), strict=True):
        for form, values in forms.items():
            axis.plot([int(s) for s in values], list(values.values()), marker="o", ms=3, c=colours[form], label=form)
        axis.set_title(name, fontsize=10)
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("correlation")
    axes[0, 0].legend(title="reward", fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "correlation.svg", metadata={"Date": None})


def pages() -> dict[Path, str]:
    results, page = json.loads((HERE / "correlation.json").read_text()), HERE / "README.md"
    text = with_block(page.read_text(), COMMAND, table_over_steps(results))
    docs = HERE.parent.parent / "docs/how-it-works.md"
    return {
        page: with_block(text, f"{COMMAND}, clipping", table_of_clipping(results)),
        docs: with_block(docs.read_text(), f"{COMMAND}, AdamW", table_over_steps(results, ["AdamW"])),
    }


def main() -> None:
    torch.set_num_threads(1)
    results = {
        "seeds": len(SEEDS),
        "optimizers": {n: mean_over_seeds([measure(n, s, STEPS) for s in SEEDS]) for n in OPTIMIZERS},
        "clipping": {
            name: {
                f"{clip:g}": mean_over_seeds([measure(name, s, (200,), clip_at=clip) for s in SEEDS])
                for clip in CLIP_AT
            }
            for name in CLIPPED
        },
    }
    (HERE / "correlation.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results)
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
