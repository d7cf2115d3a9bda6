"""The loop that every trainer's adapter is compared with."""

import torch
import torch.nn.functional as F
from torch import nn

import inloop

CLIP = 0.05  # of every step


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def make_mixture():
    """Three sources; the labels of the first are random."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 60, 8, generator=generator)
    y = x[:, :, :3].argmax(dim=2)
    y[0] = torch.randint(3, (60,), generator=generator)
    return inloop.Mixture(list(zip(x, y, strict=True)), generator=torch.Generator().manual_seed(2))


def make_options():
    return {"update": inloop.Reinforce(accumulate=2), "generator": torch.Generator().manual_seed(3)}


def train_plainly(steps, batch=16, micro_batches=1, interleave=False):
    """The policy after every step, and the mean rewards."""
    net, mixture = make_net(), make_mixture()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)  # trainers' adapters give theirs by themselves
    options = {"optimizer": optimizer, "interleave": interleave, **make_options()}
    learner = inloop.InLoop(net, inloop.MixturePolicy(3), **options)
    loader = iter(mixture.loader(learner, batch, micro_batches=micro_batches))
    record = []
    for _ in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            _, (x, y) = next(loader)
            loss = F.cross_entropy(net(x), y) / micro_batches
            loss.backward()
            total += float(loss)
        report = learner.step(total)
        record.append((report.probabilities, report.reward_mean))
        norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return record


def assert_same(record, expected):
    assert len(record) == len(expected)
    for (here, reward_here), (there, reward_there) in zip(record, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(
            torch.tensor(reward_here), torch.tensor(reward_there), rtol=1e-5, atol=1e-9, equal_nan=True
        )
    assert not torch.equal(expected[0][0], expected[-1][0])
