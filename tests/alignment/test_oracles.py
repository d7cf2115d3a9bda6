"""The two oracles: where they differ, where they agree, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop.alignment.oracles import align_by_loss, align_by_path
from inloop.errors import DirectionError, UsageError
from tests.alignment.exactness import BATCHNORM_NETS, batchnorm_problem, random_direction, relative_error


@pytest.fixture(params=BATCHNORM_NETS)
def problem(request):
    return batchnorm_problem(request.param)


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
