"""Modes of training: plain, and ways to get each example's alignment with the next step's gradient.

A mode turns a task into a function that does one whole training step: forward, backward, its own additions, the optimizer. All
use SGD with momentum. These modes need torch alone; other libraries are in ``peers``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from inloop.alignment import Recording
from inloop.learner import InLoop
from inloop.metagradient import MetaGradient
from inloop.policies import MixturePolicy
from inloop_lab.bench.tasks import Task

Step = Callable[[], None]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def plain(task: Task) -> Step:
    optimizer = sgd(task.model)

    def step() -> None:
        task.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradient_alignment(task: Task, **options: Any) -> Step:
    optimizer = sgd(task.model)
    learner = InLoop(task.model, MixturePolicy(10), **options)

    def step() -> None:
        learner.sample(len(task.x))
        loss = task.loss()
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleaved(task: Task) -> Step:
    return gradient_alignment(task, interleave=True)


def a_quarter(task: Task) -> Step:
    return gradient_alignment(task, part=0.25)


def trail(task: Task) -> Step:
    return gradient_alignment(task, reference="trail")


def half(task: Task) -> Step:
    return gradient_alignment(task, record=Recording(retain="half"))


def recompute(task: Task) -> Step:
    return gradient_alignment(task, record=Recording(retain="recompute"))


class _ExampleWeights(nn.Module):
    """φ: a weight for each example of the batch."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(n))


def metagradient(task: Task, computation: Any = "reuse") -> Step:
    optimizer = sgd(task.model)
    learner = MetaGradient(
        task.model, _ExampleWeights(len(task.x)).to(task.x.device), optimizer, computation=computation
    )

    def loss(meta: nn.Module | None) -> Tensor:
        assert isinstance(meta, _ExampleWeights)
        return (meta.weights * task.losses(task.model(task.x))).mean()

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def unrolled(task: Task) -> Step:
    return metagradient(task, "unroll")


def dot_with_next(kept: dict[str, Tensor], model: nn.Module) -> Tensor:
    """The product of each kept gradient [N, ...] with the model's present gradient."""
    parts = [
        g.flatten(1) @ p.grad.flatten()
        for (name, p), g in zip(model.named_parameters(), kept.values(), strict=True)
        if p.grad is not None
    ]
    return torch.stack(parts).sum(dim=0)


def per_example_gradients(task: Task) -> Step:
    """torch.func: keeps the gradient of every example until the next step's is known. It does not work with BatchNorm."""
    optimizer = sgd(task.model)
    kept: list[dict[str, Tensor]] = []

    def loss_of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(task.model, parameters, (x.unsqueeze(0),))
        return Task(task.model, x, y.unsqueeze(0)).losses(outputs).squeeze(0)

    all_gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))

    def step() -> None:
        parameters = {name: p.detach() for name, p in task.model.named_parameters()}
        gradients = all_gradients(parameters, task.x, task.y)
        for name, p in task.model.named_parameters():
            p.grad = gradients[name].mean(dim=0)
        if kept:
            dot_with_next(kept.pop(), task.model)
        kept.append(gradients)
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_mode(task: Task) -> Step:
    """Keeps the parameters of step t; then one jvp of all losses along the next step's gradient."""
    optimizer = sgd(task.model)
    kept: list[dict[str, Tensor]] = []

    def step() -> None:
        task.losses(task.model(task.x)).mean().backward()
        if kept:
            buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), dual_level():  # the other kernels have no forward mode
                named = zip(task.model.parameters(), kept.pop().items(), strict=True)
                duals = {name: make_dual(value, p.grad) for p, (name, value) in named}
                losses = task.losses(functional_call(task.model, duals | buffers, (task.x,)))
                unpack_dual(losses)
        kept.append({name: p.detach().clone() for name, p in task.model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()

    return step


MODES: dict[str, Callable[[Task], Step]] = {
    "plain": plain,
    "gar": gradient_alignment,
    "gar-interleaved": interleaved,
    "gar-trail": trail,
    "gar-half": half,
    "gar-recompute": recompute,
    "gar-part": a_quarter,
    "metagradient": metagradient,
    "metagradient-unrolled": unrolled,
    "vmap": per_example_gradients,
    "jvp": forward_mode,
}
