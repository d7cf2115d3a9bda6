"""REINFORCE: normalisation, accumulation, and the gradient at the parameters that drew."""

import copy

import pytest
import torch

from inloop import MixturePolicy, Reinforce
from inloop.errors import UsageError
from inloop.policies import Shares
from inloop.rewards import GradientAlignment, NextStepLoss
from inloop.step import Draw
from inloop.updates.reinforce import normalise


def draw(policy, n, seed=0):
    return Draw(policy.sample(n, torch.Generator().manual_seed(seed)), (n,), copy.deepcopy(policy), version=0)


def policy_gradient(policy, draw, weights_N):
    """∇_φ sum_i w_i log p(a_i), written out."""
    (gradient,) = torch.autograd.grad((weights_N * policy.log_prob(draw.actions)).sum(), [policy.scores])
    return gradient


def sgd(policy):
    """An optimizer whose step is the gradient itself."""
    return torch.optim.SGD(policy.parameters(), lr=1.0)


def attached(policy, **options):
    reinforce = Reinforce(sgd(policy), **options)
    reinforce.attach(policy, GradientAlignment())
    return reinforce


def test_normalise():
    rewards_N = torch.tensor([1.0, 2.0, 6.0])
    torch.testing.assert_close(normalise(rewards_N), (rewards_N - 3) / rewards_N.std())
    assert normalise(torch.tensor([4.0])).tolist() == [0.0]
    assert normalise(torch.tensor([4.0, 4.0])).tolist() == [0.0, 0.0]
    assert normalise(torch.zeros(0)).shape == (0,)


def test_equal_rewards_are_normalised_to_zero():
    for number in range(2, 40):
        assert not normalise(
            torch.full((number,), -1.0 / 3, dtype=torch.float64)
        ).any()  # a mean may be off by rounding


@pytest.mark.parametrize("normalisation", ["step", "center", "none"])
def test_one_update_climbs_the_accumulated_gradient(normalisation):
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=2, normalisation=normalisation)
    draws = [draw(policy, 8, seed) for seed in range(2)]
    rewards = [torch.randn(8), torch.randn(8)]
    before = copy.deepcopy(policy)
    assert not reinforce.add([draws[0]], rewards[0])
    assert torch.equal(policy.scores, before.scores)
    assert reinforce.add([draws[1]], rewards[1])
    weigh = {"step": normalise, "center": lambda r: r - r.mean(), "none": lambda r: r}[normalisation]
    weights = [weigh(r) for r in rewards]
    expected = sum(policy_gradient(before, d, w) for d, w in zip(draws, weights, strict=True))
    torch.testing.assert_close(policy.scores - before.scores, expected)
    assert reinforce.version == 1


def test_micro_batches_are_normalised_together():
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=1, normalisation="step")
    draws, rewards_N = [draw(policy, 5, 0), draw(policy, 3, 1)], torch.randn(8)
    before = copy.deepcopy(policy)
    reinforce.add(draws, rewards_N)
    weights_N = normalise(rewards_N)
    expected = policy_gradient(before, draws[0], weights_N[:5]) + policy_gradient(before, draws[1], weights_N[5:])
    torch.testing.assert_close(policy.scores - before.scores, expected)


def test_normalising_over_the_window():
    """What a reward that is one number a step needs; from running sums, equal to the obvious computation."""
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=4, normalisation="window")
    draws, losses = [draw(policy, 6, seed) for seed in range(4)], torch.tensor([2.0, 1.0, 4.0, 1.5])
    before = copy.deepcopy(policy)
    for d, loss in zip(draws, losses, strict=True):
        reinforce.add([d], (-loss).expand(6))
    all_rewards = (-losses).repeat_interleave(6)
    weights = (-losses - all_rewards.mean()) / all_rewards.std()
    expected = sum(policy_gradient(before, d, w.expand(6)) for d, w in zip(draws, weights, strict=True))
    torch.testing.assert_close(policy.scores - before.scores, expected)


def test_a_window_without_spread_does_not_move_the_policy():
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=2, normalisation="window")
    for seed in range(2):
        reinforce.add([draw(policy, 6, seed)], torch.full((6,), 2.0))
    assert torch.equal(policy.scores, torch.zeros(3))


def test_the_gradient_is_taken_where_the_actions_were_drawn():
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=1, normalisation="step")
    early, rewards_N = draw(policy, 8), torch.randn(8)
    drawn_by = copy.deepcopy(policy)
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([2.0, -1.0, 0.5]))
    before = policy.scores.detach().clone()
    reinforce.add([early], rewards_N)
    torch.testing.assert_close(policy.scores.detach() - before, policy_gradient(drawn_by, early, normalise(rewards_N)))


def test_it_may_start_later():
    policy = MixturePolicy(3)
    reinforce = attached(policy, accumulate=1, start_after=2)
    assert [reinforce.add([draw(policy, 8, seed)], torch.randn(8)) for seed in range(4)] == [False, False, True, True]


def test_bad_arguments_are_named():
    policy = MixturePolicy(3)
    with pytest.raises(UsageError, match="accumulate=0: allowed are whole numbers from 1"):
        Reinforce(accumulate=0)
    with pytest.raises(UsageError, match="normalisation='batch': allowed are step, center, window, none"):
        Reinforce(normalisation="batch")
    with pytest.raises(UsageError, match="start_after=-1: allowed are whole numbers from 0"):
        Reinforce(start_after=-1)
    with pytest.raises(UsageError, match="The policy, a Shares, has no parameters to learn. Fix: .* update=False"):
        Reinforce(accumulate=2).attach(Shares.uniform(3), GradientAlignment())
    with pytest.raises(UsageError, match="normalisation='step' leaves nothing of the next step's loss"):
        Reinforce(normalisation="step").attach(policy, NextStepLoss())
    with pytest.raises(UsageError, match="must hold the policy's parameters and no others"):
        Reinforce(sgd(MixturePolicy(3))).attach(policy, GradientAlignment())


def test_one_object_serves_one_learner():
    policy = MixturePolicy(3)
    reinforce = attached(policy)
    with pytest.raises(UsageError, match="belongs to another learner already"):
        reinforce.attach(policy, GradientAlignment())
