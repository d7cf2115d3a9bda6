"""The two micro-batches of a step judge each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy
from inloop.errors import UsageError
from inloop.rewards import GradientAlignment

N = 6


class Keeps(GradientAlignment):
    def __call__(self, step, judge):
        self.rewards_N = super().__call__(step, judge)
        return self.rewards_N


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def dot(first, second):
    return sum(float((a * b).sum()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("knows_optimizer", [False, True])
def test_each_half_is_judged_by_the_other(knows_optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reward = Keeps()
    given = optimizer if knows_optimizer else None
    learner = InLoop(model, MixturePolicy(2), reward=reward, reference="other half", optimizer=given)
    for step in range(3):
        halves = [(torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))) for _ in range(2)]
        of_halves = [gradients(model, F.cross_entropy(model(x), y) / 2) for x, y in halves]
        expected = []
        for (x, y), other in zip(halves, reversed(of_halves), strict=True):
            examples = [gradients(model, F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])) for i in range(N)]
            expected += [dot(example, other) for example in examples]
        for x, y in halves:
            learner.sample(N)
            (F.cross_entropy(model(x), y) / 2).backward()
        report = learner.step(1.0)
        factor = (
            0.1 if knows_optimizer and step else 1.0
        )  # before the first step of the optimizer its derivative is not known
        torch.testing.assert_close(reward.rewards_N, factor * torch.tensor(expected, dtype=torch.float64))
        assert report.rewarded
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_needs_two_micro_batches():
    model = nn.Linear(4, 3)
    learner = InLoop(model, MixturePolicy(2), reference="other half")
    learner.sample(N)
    F.cross_entropy(model(torch.randn(N, 4)), torch.randint(3, (N,))).backward()
    with pytest.raises(UsageError, match="needs steps of two micro-batches; this one has 1"):
        learner.step(1.0)
    with pytest.raises(UsageError, match="OtherHalf is a gradient, of which NextStepLoss makes no use"):
        InLoop(model, MixturePolicy(2), reward="nslr", reference="other half")
