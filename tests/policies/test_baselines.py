import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.errors import BatchSizeError, UsageError
from inloop.policies import FixedMixture, LossMixture, OnlineDataMixing


def test_fixed_mixtures():
    assert FixedMixture.uniform(4).probabilities().tolist() == [0.25] * 4
    assert FixedMixture.proportional([10, 30]).probabilities().tolist() == [0.25, 0.75]
    tempered = FixedMixture.tempered([1, 16], 2.0).probabilities()
    torch.testing.assert_close(tempered, torch.tensor([0.2, 0.8], dtype=torch.float64))
    assert FixedMixture.tempered([1, 16], 1e9).probabilities().tolist() == pytest.approx([0.5, 0.5])
    assert FixedMixture([1.0, 0.0]).sample(50).unique().tolist() == [0]


@pytest.mark.parametrize("shares", [[1.0], [], [-1.0, 2.0], [0.0, 0.0]])
def test_shares_that_are_none(shares):
    with pytest.raises(UsageError, match="at least 2 numbers"):
        FixedMixture(shares)


def test_loss_mixture_is_a_softmax_of_running_means():
    policy = LossMixture(3, temperature=2.0, smoothing=0.5)
    policy.learn(torch.tensor([0, 0, 1]), torch.tensor([1.0, 3.0, 4.0]), torch.full((3,), 1 / 3))
    # The third was not seen: it gets the mean of the others.
    torch.testing.assert_close(policy.probabilities(), (torch.tensor([2.0, 4.0, 3.0]).double() / 2).softmax(0))
    policy.learn(torch.tensor([0, 2]), torch.tensor([0.0, 7.0]), torch.full((2,), 1 / 3))
    torch.testing.assert_close(policy.probabilities(), (torch.tensor([1.0, 4.0, 7.0]).double() / 2).softmax(0))


def test_online_data_mixing_follows_its_equations():
    policy = OnlineDataMixing(2, smoothing=0.9)
    policy.learn(torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 2.0, 6.0, 3.0]), torch.full((4,), 0.5))
    returns = 0.1 * torch.tensor([6.0 / (4 * 0.5), 6.0 / (4 * 0.5)]).double()
    torch.testing.assert_close(policy.returns_K, returns)
    assert policy.probabilities().tolist() == [0.5, 0.5]
    for _ in range(400):
        actions = policy.sample(64)
        policy.learn(actions, torch.where(actions == 1, 2.0, 1.0), policy.probabilities()[actions])
    t = 401
    exploration = (torch.tensor(2.0).log() / (2 * t)).sqrt()
    before = (torch.tensor(2.0).log() / (2 * (t - 1))).sqrt()
    expected = (1 - 2 * exploration) * (before * policy.returns_K).softmax(0) + exploration
    torch.testing.assert_close(policy.probabilities(), expected)
    assert policy.returns_K[1] > policy.returns_K[0]
    assert float(policy.probabilities().sum()) == pytest.approx(1)


def test_estimates_are_unbiased_for_a_lopsided_mixture():
    policy = OnlineDataMixing(2, smoothing=0.0)
    policy.shares_K = torch.tensor([0.9, 0.1], dtype=torch.float64)
    means = []
    for seed in range(300):
        tried = copy.deepcopy(policy)
        actions = tried.sample(32, torch.Generator().manual_seed(seed))
        drawn_with = tried.probabilities()[actions]
        tried.shares_K = torch.tensor([0.2, 0.8], dtype=torch.float64)  # it has moved on since
        tried.learn(actions, torch.where(actions == 1, 5.0, 2.0), drawn_with)
        means.append(tried.returns_K)
    torch.testing.assert_close(torch.stack(means).mean(0), torch.tensor([2.0, 5.0]).double(), rtol=0.1, atol=0)


def sources():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 80, 6, generator=generator)
    y = (x.sum(dim=2) > 0).long()
    y[0] = torch.randint(2, (80,), generator=generator)
    return list(zip(x, y, strict=True))


def train(policy, reward, steps=120, state=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    mixture = inloop.Mixture(sources())
    reports = []
    learner = inloop.InLoop(model, policy, reward=reward, callback=reports.append)
    for _ in range(steps):
        x, y = mixture.draw(learner.sample(32))
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.mean().backward()
        learner.step(losses.mean(), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    return learner, reports


@pytest.mark.parametrize("kind", [LossMixture, OnlineDataMixing])
def test_those_that_follow_the_loss_prefer_what_cannot_be_learned(kind):
    """Through the learner, with its records; GAR leaves the same source."""
    learner, reports = train(kind(3), "loss")
    assert int(learner.policy.probabilities().argmax()) == 0
    assert reports[-1].rewards.mean_K[0] > reports[-1].rewards.mean_K[1]
    assert learner.updater.version == len([report for report in reports if report.updated]) == 119
    learned, _ = train(inloop.MixturePolicy(3), "gar")
    assert int(learned.policy.probabilities().argmin()) == 0


def test_a_fixed_mixture_still_reports_rewards():
    _, reports = train(FixedMixture.uniform(3), "gar")
    assert reports[-1].probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert reports[-1].paid
    assert not any(report.updated for report in reports)


def test_baselines_continue_from_their_state():
    whole, _ = train(OnlineDataMixing(3), "loss", steps=30)
    state = whole.state_dict()
    policy = OnlineDataMixing(3)
    again = inloop.InLoop(nn.Linear(2, 2), policy, reward="loss")
    again.load_state_dict(state)
    assert torch.equal(policy.probabilities(), whole.policy.probabilities())
    assert again.updater.version == whole.updater.version


def test_baselines_in_a_product():
    for baseline in (OnlineDataMixing(3), LossMixture(3)):
        with pytest.raises(UsageError, match="learns by a rule of its own"):
            inloop.Product({"source": baseline, "operation": inloop.Categorical(2)})
    inloop.Product({"source": FixedMixture.uniform(3), "operation": inloop.Categorical(2)})
    with pytest.raises(UsageError, match="has no parameters to learn"):
        inloop.InLoop(nn.Linear(1, 1), inloop.Product({"source": FixedMixture.uniform(3)}))


def test_losses_that_are_missing_or_of_another_number():
    model = nn.Linear(2, 1)
    learner = inloop.InLoop(model, LossMixture(2), reward="loss")
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
