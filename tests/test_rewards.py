"""Rewards other than gradient alignment, and a user's own."""

from tests.training import Run, is_kept, make_net, make_sources, num_hooks, rewards_of
import copy
import gc
import logging
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from inloop import Bernoulli, Categorical, InLoop, Mixture, MixturePolicy, Product, Recording, refusals
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError, OverwrittenTensorError, UnsupportedLayerError, UsageError, VerificationError
from inloop.rewards import Reward
from inloop.updates.reinforce import normalise
from tests.alignment.architectures import UnseenProduct
from tests.learners import make_learner
from tests.training import Run, make_net, make_sources



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
