"""Update rules that follow the loss: their equations, and what they prefer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.errors import BatchSizeError, UsageError
from inloop.policies import Shares
from inloop.rewards import ExampleLoss
from inloop.step import Draw
from inloop.updates import Exp3, FollowLosses


def attached(update, policy):
    update.attach(policy, ExampleLoss())
    return update


def add(update, policy, actions, losses):
    """One step with these actions, drawn by the policy as it is."""
    return update.add([Draw(actions, (len(losses),), copy.deepcopy(policy), 0)], losses)


def test_following_losses_is_a_softmax_of_running_means():
    policy = Shares.uniform(3)
    update = attached(FollowLosses(temperature=2.0, smoothing=0.5), policy)
    assert add(update, policy, torch.tensor([0, 0, 1]), torch.tensor([1.0, 3.0, 4.0]))
    # The third was not seen: it gets the mean of the others.
    torch.testing.assert_close(policy.probabilities(), (torch.tensor([2.0, 4.0, 3.0]).double() / 2).softmax(0))
    add(update, policy, torch.tensor([0, 2]), torch.tensor([0.0, 7.0]))
    torch.testing.assert_close(policy.probabilities(), (torch.tensor([1.0, 4.0, 7.0]).double() / 2).softmax(0))


def test_exp3_follows_its_equations():
    policy = Shares.uniform(2)
    update = attached(Exp3(smoothing=0.9), policy)
    add(update, policy, torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 2.0, 6.0, 3.0]))
    returns = 0.1 * torch.tensor([6.0 / (4 * 0.5), 6.0 / (4 * 0.5)]).double()
    torch.testing.assert_close(update.returns_K, returns)
    assert policy.probabilities().tolist() == [0.5, 0.5]
    for _ in range(400):
        actions = policy.sample(64)
        add(update, policy, actions, torch.where(actions == 1, 2.0, 1.0))
    t = 401
    exploration = (torch.tensor(2.0).log() / (2 * t)).sqrt()
    before = (torch.tensor(2.0).log() / (2 * (t - 1))).sqrt()
    expected = (1 - 2 * exploration) * (before * update.returns_K).softmax(0) + exploration
    torch.testing.assert_close(policy.probabilities(), expected)
    assert update.returns_K[1] > update.returns_K[0]
    assert float(policy.probabilities().sum()) == pytest.approx(1)


def test_estimates_are_unbiased_for_a_lopsided_mixture():
    means = []
    for seed in range(300):
        policy = Shares([0.9, 0.1])
        update = attached(Exp3(smoothing=0.0), policy)
        actions = policy.sample(32, torch.Generator().manual_seed(seed))
        draw = Draw(actions, (32,), copy.deepcopy(policy), 0)
        policy.shares_K = torch.tensor([0.2, 0.8], dtype=torch.float64)  # it has moved on since
        update.add([draw], torch.where(actions == 1, 5.0, 2.0))
        means.append(update.returns_K)
    torch.testing.assert_close(torch.stack(means).mean(0), torch.tensor([2.0, 5.0]).double(), rtol=0.1, atol=0)


def sources():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 80, 6, generator=generator)
    y = (x.sum(dim=2) > 0).long()
    y[0] = torch.randint(2, (80,), generator=generator)
    return list(zip(x, y, strict=True))


def train(policy, reward, update=None, steps=120):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    mixture = inloop.Mixture(sources())
    reports = []
    learner = inloop.InLoop(model, policy, reward=reward, update=update, callback=reports.append)
    for _ in range(steps):
        x, y = mixture.draw(learner.sample(32))
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.mean().backward()
        learner.step(losses.mean(), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    return learner, reports


@pytest.mark.parametrize("kind", [FollowLosses, Exp3])
def test_those_that_follow_the_loss_prefer_what_cannot_be_learned(kind):
    """Through the learner, with its records; GAR leaves the same source."""
    learner, reports = train(Shares.uniform(3), "loss", kind())
    assert int(learner.policy.probabilities().argmax()) == 0
    assert reports[-1].rewards.mean_K[0] > reports[-1].rewards.mean_K[1]
    assert learner.update.version == len([report for report in reports if report.updated]) == 119
    learned, _ = train(inloop.MixturePolicy(3), "gar")
    assert int(learned.policy.probabilities().argmin()) == 0


def test_a_fixed_mixture_still_reports_rewards():
    _, reports = train(Shares.uniform(3), "gar")
    assert reports[-1].probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert reports[-1].rewarded
    assert not any(report.updated for report in reports)


@pytest.mark.parametrize("kind", [FollowLosses, Exp3])
def test_baselines_continue_from_their_state(kind):
    whole, _ = train(Shares.uniform(3), "loss", kind(), steps=30)
    again, _ = train(Shares.uniform(3), "loss", kind(), steps=0)
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again.policy.probabilities(), whole.policy.probabilities())
    assert again.update.version == whole.update.version
    assert str(again.update.state_dict()) == str(whole.update.state_dict())


def test_any_rule_for_the_sources_of_a_product():
    policy = inloop.Product({"source": Shares.uniform(3), "operation": inloop.Categorical(2)})
    update = attached(Exp3(), policy)
    for seed in range(20):
        actions = policy.sample(32, torch.Generator().manual_seed(seed))
        add(update, policy, actions, torch.where(actions["source"] == 1, 2.0, 1.0))
    assert int(policy.factors["source"].probabilities().argmax()) == 1
    with pytest.raises(
        UsageError, match="Exp3 sets the shares of sources by itself, and the policy is a MixturePolicy"
    ):
        Exp3().attach(inloop.MixturePolicy(3), ExampleLoss())


def test_losses_that_are_missing_or_of_another_number():
    model = nn.Linear(2, 1)
    learner = inloop.InLoop(model, Shares.uniform(2), reward="loss", update=FollowLosses())
    for losses in (torch.ones(3), torch.ones(4, 1)):
        learner.sample(4)
        model(torch.randn(4, 2)).mean().backward()
        with pytest.raises(BatchSizeError, match="one for each of the 4 examples"):
            learner.step(1.0, losses=losses)
    for _ in range(2):
        learner.sample(4)
        model(torch.randn(4, 2)).mean().backward()
        if learner.num_steps >= 1:
            with pytest.raises(UsageError, match="losses=losses"):
                learner.step(1.0)
        else:
            learner.step(1.0)


@pytest.mark.parametrize(
    ("policy", "reward", "rule"),
    [
        (inloop.MixturePolicy(3), "gar", "Anchored"),
        (inloop.Product({"source": inloop.MixturePolicy(3), "other": inloop.Categorical(2)}), "gar", "Anchored"),
        (inloop.MixturePolicy(3), "nslr", "Reinforce"),  # one reward for all examples of a step
        (inloop.MixturePolicy(3, form="inverted"), "gar", "Reinforce"),
        (inloop.Bernoulli(), "gar", "Reinforce"),
        (Shares.uniform(3), "gar", "NoUpdate"),
    ],
)
def test_the_default_rule_is_anchored_where_it_fits(policy, reward, rule):
    learner = inloop.InLoop(nn.Linear(2, 2), policy, reward=reward)
    assert type(learner.update).__name__ == rule
