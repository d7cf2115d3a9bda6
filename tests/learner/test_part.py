"""Rewards for a random part of each batch: those that the whole would give, for fewer examples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, Mixture, MixturePolicy, Recording, Reinforce
from inloop.errors import BatchSizeError, UsageError, VerificationError
from inloop.rewards import GradientAlignment
from inloop.sampler import Sampler
from tests.learners import make_learner
from tests.training import make_net, make_sources


class Net(nn.Module):
    """Convolutions, norms, a module without a rule, a bare parameter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3)
        self.gru, self.scale = nn.GRU(4, 5, batch_first=True), nn.Parameter(torch.ones(5))
        self.bn, self.head = nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(1).unflatten(1, (-1, 4))
        return self.head(self.bn(self.gru(x)[0][:, -1] * self.scale))


class Kept(GradientAlignment):
    def __init__(self):
        self.rewards = []

    def __call__(self, step, reference):
        self.rewards.append(super().__call__(step, reference))
        return self.rewards[-1]


def train(part, steps=6, micro_batches=1, **options):
    torch.manual_seed(0)
    net = Net().double()
    reward, chosen = Kept(), []
    learner = make_learner(
        net,
        MixturePolicy(3),
        reward=reward,
        part=part,
        update=False,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(
        steps, micro_batches, 8, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    for batches in data:
        for x in batches:
            learner.sample(8)
            (net(x).square().mean() / micro_batches).backward()
        learner.step(1.0)
        chosen.append([draw.rewarded_here for draw in learner.reference.waiting.draws])
        optimizer.step()
        optimizer.zero_grad()
    return reward.rewards, chosen, learner


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rewards_are_those_of_the_whole_batch(retain, micro_batches):
    whole, _, _ = train(1.0, micro_batches=micro_batches, retain=retain)
    some, chosen, _ = train(0.4, micro_batches=micro_batches, retain=retain)
    assert len(some) == len(whole) == 5
    for step, (part, everything) in enumerate(zip(some, whole, strict=True)):
        rows = [torch.arange(8) if rows is None else rows for rows in chosen[step]]
        expected = torch.cat([part_8[row] for part_8, row in zip(everything.split(8), rows, strict=True)])
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-14)
    assert [len(part) for part in some] == [8 * micro_batches] * 2 + [
        3 * micro_batches
    ] * 3  # the first two are verified


def test_less_is_kept():
    _, _, learner = train(0.25)
    calls = {call.name: call for call in learner.reference.waiting.tape.calls}
    assert calls["head"].num_examples == 2
    assert calls["head"].num_recorded == 8
    assert calls["gru"].num_examples == 8  # to be run again as a whole


def test_the_policys_gradient_has_the_same_expectation():
    """Over many choices of a part of one batch."""
    rewards = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy = MixturePolicy(3).double()
    sampler = Sampler(policy, torch.Generator().manual_seed(0))
    draw = sampler.draw(40, version=0, plain=False)
    log_prob = policy.log_prob(draw.everyone)
    (whole,) = torch.autograd.grad((rewards * log_prob).sum(), policy.scores)
    parts = []
    for _ in range(4000):
        part = sampler.choose_rewarded(draw, 0.25)
        (gradient,) = torch.autograd.grad(
            (rewards[part.rewarded_rows] * policy.log_prob(part.rewarded)).sum(), policy.scores
        )
        parts.append(4 * gradient)
    mean, std = torch.stack(parts).mean(0), torch.stack(parts).std(0)
    assert ((mean - whole).abs() < 4 * std / 4000**0.5).all()


def test_it_learns_and_continues():
    torch.manual_seed(0)
    model, mixture = make_net(), Mixture(make_sources(4, poisoned=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = InLoop(model, MixturePolicy(4), part=0.25, update=Reinforce(accumulate=5))

    def step(learner):
        x, y = mixture.draw(learner.sample(256))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        report = learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        return report

    reports = [step(learner) for _ in range(250)]
    assert int(reports[-1].rewards.count_K.sum()) == 64
    assert int(learner.policy.probabilities().argmin()) == 2
    state, data = learner.state_dict(), mixture.state_dict()
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    step(learner)  # the step before was dropped when the state was saved
    expected = step(learner)
    again = InLoop(model, MixturePolicy(4), part=0.25, update=Reinforce(accumulate=5))
    learner.close()
    again.load_state_dict(state)
    mixture.load_state_dict(data)
    model.load_state_dict(parameters)
    again.num_steps = state["num_steps"]
    step(again)
    assert step(again).reward_mean == pytest.approx(expected.reward_mean, rel=1e-6)


def test_a_run_without_verification_continues_with_a_part():
    def rewarded_in_the_first_step(state=None):
        learner = InLoop(
            net := Net().double(), MixturePolicy(3), part=0.4, update=False, record=Recording(verify=False)
        )
        if state is not None:
            learner.load_state_dict(state)
        learner.sample(8)
        net(torch.randn(8, 1, 6, 6, dtype=torch.float64)).square().mean().backward()
        learner.step(1.0)
        (draw,) = learner.reference.waiting.draws
        return draw.rewarded_counts

    _, _, learner = train(0.4, verify=False)
    assert rewarded_in_the_first_step() == (8,)  # what is checkpointed is not known yet
    assert rewarded_in_the_first_step(learner.state_dict()) == (3,)


@pytest.mark.parametrize("part", [0.0, -1.0, 1.5])
def test_what_is_no_part(part):
    with pytest.raises(UsageError, match="part="):
        InLoop(nn.Linear(1, 1), MixturePolicy(2), part=part)


def test_a_batch_that_is_smaller_than_the_one_that_was_sampled_is_refused():
    learner = InLoop(net := Net().double(), MixturePolicy(3), part=0.99)
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    with pytest.raises(BatchSizeError, match="train on the whole batch that was sampled"):
        for _ in range(4):  # the first are rewarded whole, to be verified
            learner.sample(8)
            keep = slice(0, 8 if learner.num_steps < 2 else 4)
            net(x[keep]).square().mean().backward()
            learner.step(1.0)
            net.zero_grad()


class Changes(nn.Module):
    """From the third step on it uses another layer, and then its weight once more, unseen: examples do not add up any more."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.first(x) if self.steps < 4 else self.second(self.first(x))


def test_a_new_kind_of_step_is_verified_though_only_parts_are_rewarded():
    torch.manual_seed(0)
    model = Changes()
    learner = InLoop(model, MixturePolicy(2), part=0.5, update=False)
    sizes = []
    for step in range(7):
        learner.sample(8)
        loss = model(torch.randn(8, 4)).square().mean() + (0.1 * model.second.weight.square().sum() if step == 6 else 0)
        loss.backward()
        if step == 6:
            with pytest.raises(VerificationError, match="second.weight"):
                learner.step(loss)
            break
        learner.step(loss)
        sizes.append(learner.reference.waiting.tape.part)
        model.zero_grad()
    # Steps 0 and 1 are verified, and whole; step 3 is of a new kind, so the steps after it are whole until one is verified.
    assert [bool(part) for part in sizes] == [False, False, True, True, False, True]


def test_a_policy_that_was_changed_by_hand_draws_with_its_new_shares():
    policy = MixturePolicy(3)
    sampler = Sampler(policy, torch.Generator().manual_seed(0))
    first = sampler.draw(4, version=0, plain=False)
    with torch.no_grad():
        policy.scores[0] = 5.0
    second = sampler.draw(4, version=0, plain=False)
    assert sampler.draw(4, version=0, plain=False).policy is second.policy
    assert first.policy.probabilities().tolist() == pytest.approx([1 / 3] * 3)
    assert second.policy.probabilities().tolist() == policy.probabilities().tolist()
