"""A learner comes and goes without a trace on the model, and several can watch one."""

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



def test_close_takes_everything_off():
    run = Run().train(2)
    assert num_hooks(run.model) == 2
    run.learner.close()
    assert num_hooks(run.model) == 0
    assert run.learner.reference.waiting is None
    with InLoop(run.model, MixturePolicy(4)):
        assert num_hooks(run.model) > 0
    assert num_hooks(run.model) == 0


def test_a_forgotten_learner_takes_its_hooks_along():
    net = make_net()
    Run(net=net).train(2)
    gc.collect()
    assert num_hooks(net) == 0


def test_the_tape_is_freed_when_it_is_paid():
    run = Run().train(2)
    tape = run.learner.reference.waiting.tape
    assert tape.calls
    run.step()
    assert tape.calls == []


def test_two_learners_on_one_model():
    run = Run(accumulate=1)
    other = InLoop(run.model, MixturePolicy(4), update=False, record=Recording(layers=["2"]))
    for _ in range(3):
        actions = run.learner.sample(16)
        other.sample(16)
        x, y = run.mixture.draw(actions)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.learner.step(loss)
        report = other.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert report.rewarded
    assert report.reward_mean != run.reports[-1].reward_mean
