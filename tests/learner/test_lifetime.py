"""A learner comes and goes without a trace on the model, and several can watch one."""

import gc

import pytest
import torch
import torch.nn.functional as F

from inloop import InLoop, MixturePolicy, Recording, Reinforce
from inloop.errors import UsageError
from inloop.policies import Shares
from inloop.references import HeldOut, Next, Previous
from inloop.updates import NoUpdate
from tests.training import Run, make_net, make_sources, num_hooks


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


def test_the_tape_is_freed_when_it_is_rewarded():
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


# ------------------------------------------------------------------ parts that a learner is given


def held_out_loss(net):
    x, y = make_sources()[0]
    return lambda: F.cross_entropy(net(x[:32]), y[:32])


PARTS = {
    "next": lambda net: {"reference": Next()},
    "previous": lambda net: {"reference": Previous()},
    "held-out": lambda net: {"reference": HeldOut(held_out_loss(net))},
    "reinforce": lambda net: {"update": Reinforce(accumulate=1)},
    "watch": lambda net: {"update": NoUpdate()},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_reference_and_an_update_serve_one_learner_until_it_is_closed(name):
    net = make_net()
    part = PARTS[name](net)
    first = Run(net=net, **part).train(3)
    with pytest.raises(UsageError, match=r"belongs to another learner already. Fix: make one for each learner"):
        InLoop(net, MixturePolicy(4), **part)
    assert first.train(1).reports[-1].rewarded  # and the first goes on
    first.learner.close()
    parameters = {key: value.clone() for key, value in net.state_dict().items()}
    again = Run(net=net, **part).train(4)
    again.learner.close()
    net.load_state_dict(parameters)
    fresh = Run(net=net, **PARTS[name](net)).train(4)
    assert str(again.reports) == str(fresh.reports)  # it begins anew
    assert torch.equal(again.policy.scores, fresh.policy.scores)


@pytest.mark.parametrize(
    ("policy", "record"),
    [(Shares.uniform(4), Recording()), (MixturePolicy(4), Recording(layers=["nope"]))],
    ids=["refused by the update", "refused by the recording"],
)
def test_what_was_given_to_a_learner_that_was_refused_is_free(policy, record):
    reference, update = Next(), Reinforce(accumulate=1)
    with pytest.raises(UsageError, match="no parameters to learn|names 'nope'"):
        InLoop(make_net(), policy, reference=reference, update=update, record=record)
    assert Run(reference=reference, update=update).train(2).reports[-1].updated
