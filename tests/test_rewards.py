"""Rewards other than gradient alignment, and a user's own."""

import pytest
import torch
import torch.nn.functional as F

from inloop import InLoop, MixturePolicy
from inloop.errors import UsageError
from inloop.rewards import Reward, as_reward
from tests.training import Run, make_net, num_hooks, rewards_of


def test_next_step_loss_is_minus_the_next_loss():
    run = Run(reward="nslr", accumulate=2)
    losses = []
    for _ in range(4):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        losses.append(float(loss.detach()))
        loss.backward()
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert rewards_of(run)[1:] == pytest.approx([-value for value in losses[1:]])
    assert [report.updated for report in run.reports] == [False, False, True, False]
    assert not any(report.reward_std for report in run.reports[1:])


def test_own_rewards_join_in():
    class Constant(Reward):
        needs_tape = False
        normalisation = "none"

        def __call__(self, step, reference):
            return torch.full((step.num_examples,), 3.0)

    run = Run(reward=Constant()).train(2)
    assert run.reports[1].reward_mean == 3.0


def test_a_reward_must_say_whether_it_needs_the_tape():
    class Silent(Reward):
        def __call__(self, step, judge):
            return torch.ones(step.num_examples)

    net = make_net()
    with pytest.raises(
        UsageError, match="Silent does not say whether it needs the recorded layers of a step. Fix: write"
    ):
        InLoop(net, MixturePolicy(4), reward=Silent())
    assert num_hooks(net) == 0
    Silent.needs_tape = "yes"
    with pytest.raises(UsageError, match="needs_tape = True, or False"):
        as_reward(Silent())
    Silent.needs_tape = False
    assert Run(reward=Silent()).train(2).reports[-1].reward_mean == 1
