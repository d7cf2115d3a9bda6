"""Other libraries for the same numbers; each is imported only when it is measured."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inloop_lab.bench.modes import Step, dot_with_next, sgd
from inloop_lab.bench.tasks import Task


def opacus(task: Task) -> Step:
    """Its per-sample gradients, kept until the next step's is known."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(task.model, loss_reduction="mean")
    optimizer = sgd(wrapped)
    kept: list[dict[str, Tensor]] = []

    def step() -> None:
        task.losses(wrapped(task.x)).mean().backward()
        if kept:
            dot_with_next(kept.pop(), task.model)
        kept.append({name: p.grad_sample for name, p in task.model.named_parameters()})
        for p in task.model.parameters():
            p.grad_sample = None
        optimizer.step()
        optimizer.zero_grad()

    return step


def backpack(task: Task) -> Step:
    """Its BatchGrad, kept until the next step's gradient is known."""
    from backpack import backpack as with_extensions
    from backpack import extend
    from backpack.extensions import BatchGrad

    model = extend(task.model, use_converter=not isinstance(task.model, nn.Sequential))
    loss_function = extend(nn.CrossEntropyLoss())
    optimizer = sgd(model)
    kept: list[dict[str, Tensor]] = []

    def step() -> None:
        loss = loss_function(model(task.x), task.y)
        with with_extensions(BatchGrad()):
            loss.backward()
        if kept:
            dot_with_next(kept.pop(), model)
        kept.append({name: p.grad_batch for name, p in model.named_parameters()})
        for p in model.parameters():
            del p.grad_batch
        optimizer.step()
        optimizer.zero_grad()

    return step


def _weighted(task: Task, outputs: Tensor, weights: Tensor) -> Tensor:
    return (weights * task.losses(outputs)).mean()


def higher(task: Task) -> Step:
    """The meta-gradient of example weights through one unrolled step."""
    import higher as library

    optimizer = sgd(task.model)
    weights = torch.ones(len(task.x), device=task.x.device, requires_grad=True)
    meta_optimizer = torch.optim.Adam([weights], lr=0.1)

    def step() -> None:
        inner_loop = library.innerloop_ctx(task.model, optimizer, copy_initial_weights=False)
        with (
            sdpa_kernel(SDPBackend.MATH),
            inner_loop as (unrolled, inner),
        ):  # the other kernels have no second derivative
            inner.step(_weighted(task, unrolled(task.x), weights))
            loss = task.losses(unrolled(task.x)).mean()
            (weights.grad,) = torch.autograd.grad(loss, [weights])
        meta_optimizer.step()
        task.losses(task.model(task.x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchopt(task: Task) -> Step:
    """The same with TorchOpt's differentiable SGD."""
    import torchopt as library

    inner = library.MetaSGD(task.model, lr=1e-3, momentum=0.9)
    weights = torch.ones(len(task.x), device=task.x.device, requires_grad=True)
    meta_optimizer = torch.optim.Adam([weights], lr=0.1)

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            inner.step(_weighted(task, task.model(task.x), weights))
            (weights.grad,) = torch.autograd.grad(task.losses(task.model(task.x)).mean(), [weights])
        meta_optimizer.step()
        library.stop_gradient(task.model)
        library.stop_gradient(inner)

    return step


PEERS: dict[str, tuple[str, Callable[[Task], Any]]] = {
    "higher": ("higher", higher),
    "torchopt": ("torchopt", torchopt),
    "opacus": ("opacus", opacus),
    "backpack": ("backpack", backpack),
}
