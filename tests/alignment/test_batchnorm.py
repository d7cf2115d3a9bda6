"""BatchNorm in training couples examples: the engine decomposes the gradient by path, and the sum still holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment.oracles import align_by_path
from tests.alignment.exactness import BATCHNORM_NETS, batchnorm_problem, random_direction, relative_error


@pytest.fixture(params=BATCHNORM_NETS)
def problem(request):
    return batchnorm_problem(request.param)


def counted(model, direction, batchnorm_affine):
    """The direction, with BatchNorm's own parameters set to zero unless they count."""
    own = {name for name, m in model.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))}
    return {n: None if n.rpartition(".")[0] in own and not batchnorm_affine else d for n, d in direction.items()}


@pytest.mark.parametrize("batchnorm_affine", [False, True])
def test_rewards_are_those_of_the_path_oracle(problem, batchnorm_affine):
    model, x, y = problem
    direction = random_direction(model)
    with capture(model, batchnorm_affine=batchnorm_affine, verify=True) as tape:
        F.cross_entropy(model(x), y).backward()
    oracle_N = align_by_path(model, lambda m: F.cross_entropy(m(x), y), counted(model, direction, batchnorm_affine))
    assert relative_error(tape.align(direction), oracle_N) < 1e-9


@pytest.mark.parametrize("batchnorm_affine", [False, True])
def test_contributions_add_up_to_the_product_of_two_steps_gradients(problem, batchnorm_affine):
    """sum_i c_i = <g_t, g_{t+1}>, over the parameters that count."""
    model, x, y = problem
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, batchnorm_affine=batchnorm_affine) as tape:
        F.cross_entropy(model(x), y).backward()
    g_t = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn_like(x)), y).backward()
    g_next = counted(model, {name: p.grad for name, p in model.named_parameters()}, batchnorm_affine)
    product = sum((g_t[name] * g).sum() for name, g in g_next.items() if g is not None)
    torch.testing.assert_close(tape.contributions(g_next).sum(), product, rtol=1e-12, atol=1e-15)


def test_batchnorms_own_parameters_are_not_needed_in_the_direction_by_default(problem):
    model, x, y = problem
    direction = random_direction(model)
    with capture(model) as tape:
        F.cross_entropy(model(x), y).backward()
    without = {name: value for name, value in direction.items() if counted(model, direction, False)[name] is not None}
    assert torch.equal(tape.align(without), tape.align(direction))
