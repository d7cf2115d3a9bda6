"""The one exactness check that the tests share, the engine against one backward pass for each example; and small problems for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from inloop.alignment import capture
from inloop.alignment.oracles import align_by_loss
from inloop.alignment.plan import make_plan


def random_direction(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}


def per_example_losses(out: Tensor) -> Tensor:
    """A loss that gives every element of an example's output a gradient of its own."""
    flat = out.flatten(start_dim=1) if out.dim() > 1 else out.unsqueeze(1)
    weights = torch.linspace(-1, 1, flat.shape[1], dtype=out.dtype)
    return (flat * weights + 0.5 * flat.square()).sum(dim=1)


def relative_error(rewards_N: Tensor, oracle_N: Tensor) -> float:
    assert rewards_N.shape == oracle_N.shape
    return float((rewards_N - oracle_N).abs().max() / oracle_N.abs().max())


def rewards_and_oracle(
    model: nn.Module,
    *inputs: Any,
    reduction: str = "mean",
    forward: Callable[[nn.Module], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Rewards of a random direction, from the engine and from one backward pass an example through the same graph."""
    direction = random_direction(model)
    model.zero_grad()
    with capture(model, reduction=reduction, verify=True, **options) as tape:
        out = forward(model) if forward else model(*inputs)
        losses_N = per_example_losses(out)
        (losses_N.mean() if reduction == "mean" else losses_N.sum()).backward(retain_graph=True)
    # As between two steps: the optimizer changes the weights before the direction is known.
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
    rewards_N = tape.align(direction)
    for name, parameter in model.named_parameters():
        parameter.data = saved[name]
    return rewards_N, align_by_loss(model, losses_N, direction)


def assert_exact(model: nn.Module, *inputs: Any, **options: Any) -> None:
    """In float64 the two agree to 1e-9 of the largest reward, for mean and for sum losses."""
    rewards_N, oracle_N = rewards_and_oracle(model, *inputs, **options)
    assert float(oracle_N.abs().max()) > 1e-6, "a test whose rewards are all zero cannot fail"
    assert relative_error(rewards_N, oracle_N) < 1e-9


def rule_names(model: nn.Module) -> dict[str, str]:
    """How each recorded module is aligned: the name of its rule's function."""
    sites = make_plan(model, batchnorm_affine=True).sites
    return {site.name: site.rule.align.__name__ if site.rule else "run again" for site in sites}


# ------------------------------------------------------------------ small problems

N = 6


def x(*shape: int) -> Tensor:
    return torch.randn(N, *shape, dtype=torch.float64)


def labels(n: int = N) -> Tensor:
    return torch.randint(0, 3, (n,))


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).double()


def fc_bn() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(inplace=True), nn.Linear(10, 3)).double()


def cnn_bn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)),
        *(nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    ).double()


BATCHNORM_NETS = {"fc": (fc_bn, (6,)), "cnn": (cnn_bn, (1, 6, 6))}


def batchnorm_problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose examples depend on each other, and a batch for it."""
    make_net, shape = BATCHNORM_NETS[name]
    return make_net(), torch.randn(8, *shape, dtype=torch.float64), torch.randint(0, 3, (8,))
