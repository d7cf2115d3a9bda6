"""BatchNorm in training couples examples: the engine decomposes the gradient by path, and the sum still holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.alignment.oracles import align_by_loss, align_by_path
from inloop.errors import DirectionError, UsageError
from tests.alignment.exactness import random_direction, relative_error

N = 8


def fc_bn():
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(inplace=True), nn.Linear(10, 3)).double()


def cnn_bn():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)),
        *(nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
    ).double()


NETS = {"fc": (fc_bn, (6,)), "cnn": (cnn_bn, (1, 6, 6))}


@pytest.fixture(params=NETS)
def problem(request):
    make_net, shape = NETS[request.param]
    return make_net(), torch.randn(N, *shape, dtype=torch.float64), torch.randint(0, 3, (N,))


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


def test_the_two_decompositions_differ_but_have_one_sum(problem):
    model, x, y = problem
    direction = random_direction(model)
    by_path = align_by_path(model, lambda m: F.cross_entropy(m(x), y), direction)
    by_loss = align_by_loss(model, F.cross_entropy(model(x), y, reduction="none"), direction)
    torch.testing.assert_close(by_path.sum(), by_loss.sum())
    assert relative_error(by_path, by_loss) > 0.01


def test_without_coupling_the_two_oracles_agree(problem):
    model, x, y = problem
    model.eval()
    direction = random_direction(model)
    by_path = align_by_path(model, lambda m: F.cross_entropy(m(x), y, reduction="sum"), direction, reduction="sum")
    by_loss = align_by_loss(model, F.cross_entropy(model(x), y, reduction="none"), direction)
    assert relative_error(by_path, by_loss) < 1e-12


def test_batchnorms_own_parameters_are_not_needed_in_the_direction_by_default(problem):
    model, x, y = problem
    direction = random_direction(model)
    with capture(model) as tape:
        F.cross_entropy(model(x), y).backward()
    without = {name: value for name, value in direction.items() if counted(model, direction, False)[name] is not None}
    assert torch.equal(tape.align(without), tape.align(direction))


def test_the_path_oracle_leaves_the_model_alone(problem):
    model, x, y = problem
    before = {name: value.clone() for name, value in model.state_dict().items()}
    align_by_path(model, lambda m: F.cross_entropy(m(x), y), random_direction(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_path_oracle_refuses_what_it_cannot_take_apart():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3).double())
    with pytest.raises(UsageError, match="align_by_path cannot take 'parametrizations.weight'|cannot take ''"):
        align_by_path(model, lambda m: m(torch.randn(4, 6, dtype=torch.float64)).sum(), random_direction(model))


def test_the_oracles_refuse_a_name_that_does_not_exist():
    model = nn.Linear(6, 3).double()
    losses_N = model(torch.randn(4, 6, dtype=torch.float64)).sum(dim=1)
    with pytest.raises(DirectionError, match="'wieght', which is no parameter"):
        align_by_loss(model, losses_N, {"wieght": torch.zeros(3, 6)})
