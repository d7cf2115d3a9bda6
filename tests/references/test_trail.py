"""The trail: against brute force, its identity with the margin, its state, and that nothing is kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy, Recording
from inloop.alignment.oracles import align_by_loss
from inloop.errors import UsageError
from inloop.references import Trail
from inloop.rewards import GradientAlignment, NextStepLoss

N = 8


class Kept(GradientAlignment):
    aligns_once = True

    def __init__(self):
        self.rewards, self.calls = [], []

    def __call__(self, step, judge):
        self.calls.append([call.name for call in step.tape.calls])
        self.rewards.append(super().__call__(step, judge))
        return self.rewards[-1]


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()


class WithGRU(nn.Module):
    """A module that is run again, which cannot happen within a backward pass."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.gru(x.squeeze(1))[0][:, -1])


def train(model, decay, steps=8, micro_batches=1, learner_of=InLoop, **options):
    """Rewards of the learner and of brute force."""
    torch.manual_seed(0)
    reward = Kept()
    learner = learner_of(model, MixturePolicy(2), reward=reward, reference=Trail(decay), update=False, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averages, expected = None, []
    for _ in range(steps):
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        direction = None if averages is None else {name: averages[name] - now[name] for name in now}
        of_step = []
        for _ in range(micro_batches):
            x, y = torch.randn(N, 1, 6, 6, dtype=torch.float64), torch.randint(3, (N,))
            learner.sample(N)
            losses = F.cross_entropy(model(x), y, reduction="none")
            if direction is not None:
                with learner.paused():
                    of_step.append(align_by_loss(model, F.cross_entropy(model(x), y, reduction="none"), direction))
            (losses.mean() / micro_batches).backward()
        if of_step:
            expected.append(torch.cat(of_step))
        learner.step(losses.mean())
        averages = now if averages is None else {n: decay * averages[n] + (1 - decay) * now[n] for n in now}
        optimizer.step()
        optimizer.zero_grad()
    return reward, expected, learner


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
@pytest.mark.parametrize("make", [convolutional, lambda: WithGRU().double()])
def test_rewards_are_those_of_brute_force(make, retain, micro_batches):
    reward, expected, _ = train(make(), 0.9, micro_batches=micro_batches, record=Recording(retain=retain))
    assert len(reward.rewards) == len(expected) == 7
    exact = {"rtol": 1e-9, "atol": 1e-13} if retain != "half" else {"rtol": 1e-2, "atol": 1e-4}
    for got, wanted in zip(reward.rewards, expected, strict=True):
        torch.testing.assert_close(got, wanted, **exact)


def test_nothing_is_kept_once_steps_are_verified():
    reward, _, _ = train(convolutional(), 0.9)
    assert [bool(names) for names in reward.calls] == [True] + [False] * 6
    reward, _, _ = train(WithGRU().double(), 0.9)
    assert reward.calls[-1] == ["gru"]


def test_other_rewards_keep_their_tapes():
    class Twice(GradientAlignment):
        def __call__(self, step, judge):
            ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
            return step.align(judge) + step.tape.align(ones)

    model = convolutional()
    learner = InLoop(model, MixturePolicy(2), reward=Twice(), reference="trail", update=False)
    assert isinstance(learner.reference, Trail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        learner.sample(N)
        loss = model(torch.randn(N, 1, 6, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        report = learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert report.rewarded


def test_before_anything_has_moved_nothing_is_rewarded():
    model = convolutional()
    learner = InLoop(model, MixturePolicy(2), reference=Trail(), update=False)
    for _ in range(3):
        learner.sample(N)
        loss = model(torch.randn(N, 1, 6, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        assert not learner.step(loss).rewarded
        model.zero_grad()


def test_the_margin_identity():
    """``<∇l_i(θ), -θ> = L (f_y - sum_k p_k f_k)`` for a network of L layers without biases."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 9, bias=False), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False)
    ).double()
    x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
    scores = model(x)
    minus_parameters = {name: -p.detach() for name, p in model.named_parameters()}
    aligned = align_by_loss(model, F.cross_entropy(scores, y, reduction="none"), minus_parameters)
    margin = scores[range(N), y] - (scores.softmax(dim=1) * scores).sum(dim=1)
    torch.testing.assert_close(aligned, 3 * margin.detach(), rtol=1e-9, atol=1e-12)


def test_it_continues_from_its_state():
    torch.manual_seed(1)
    first = convolutional()
    second = copy.deepcopy(first)
    whole, _, _ = train(first, 0.9, steps=8)
    torch.manual_seed(1)
    reward = Kept()
    learner = InLoop(second, MixturePolicy(2), reward=reward, reference=Trail(0.9), update=False)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        if step == 4:
            state = learner.state_dict()
            learner.close()
            learner = InLoop(second, MixturePolicy(2), reward=reward, reference=Trail(0.9), update=False)
            learner.load_state_dict(state)
        x, y = torch.randn(N, 1, 6, 6, dtype=torch.float64), torch.randint(3, (N,))
        learner.sample(N)
        loss = F.cross_entropy(second(x), y)
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert len(reward.rewards) == len(whole.rewards)
    assert all(torch.equal(a, b) for a, b in zip(reward.rewards, whole.rewards, strict=True))


def test_half_precision_and_frozen_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    learner = InLoop(model, MixturePolicy(2), reference=Trail(0.999), update=False)
    for _ in range(3):
        learner.sample(N)
        loss = model(torch.randn(N, 4, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        learner.step(loss)
        with torch.no_grad():
            for p in model[1].parameters():
                p -= 0.1
        model.zero_grad()
    averages = learner.state_dict()["judging"]["reference"]["averages"]
    assert set(averages) == {"1.weight", "1.bias"}
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert 0 < float((averages["1.bias"] - model[1].bias.detach().float()).mean()) < 0.31


def test_refusals():
    with pytest.raises(UsageError, match=r"decay=1.0.*from 0 to below 1"):
        Trail(1.0)
    with pytest.raises(UsageError, match="of which NextStepLoss makes no use"):
        InLoop(convolutional(), MixturePolicy(2), reward=NextStepLoss(), reference="trail")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    learner = InLoop(model, MixturePolicy(2), reference=Trail())
    learner.sample(N)
    learner.skip()
    model[1].weight = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(UsageError, match=r"learner.reference.reset\(\)"):
        learner.sample(N)
