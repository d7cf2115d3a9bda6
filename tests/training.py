"""A small problem with several sources, the plain loop around a learner, and what can be asked of either, shared by the learner's tests."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from inloop import Mixture, MixturePolicy
from tests.learners import make_learner


def make_sources(num_sources=4, poisoned=None, size=2000, features=16, classes=4, seed=0):
    """Linearly separable classes; the labels of source ``poisoned`` are uniform noise."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(features, classes, generator=generator)
    sources = []
    for source in range(num_sources):
        x = torch.randn(size, features, generator=generator)
        y = (x @ directions).argmax(dim=1)
        noise = torch.randint(classes, (size,), generator=generator)
        sources.append((x, noise if source == poisoned else y))
    return sources


def make_net(features=16, classes=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(inplace=True), nn.Linear(32, classes))


class Run:
    """A model, a policy, a learner and the user's loop."""

    def __init__(self, sources=None, net=None, seed=0, lr=0.02, policy=None, **options):
        self.sources = sources or make_sources()
        self.model = net or make_net(seed=seed)
        self.policy = policy or MixturePolicy(len(self.sources))
        self.reports = []
        options.setdefault("callback", self.reports.append)
        self.learner = make_learner(self.model, self.policy, generator=torch.Generator().manual_seed(seed), **options)
        self.mixture = Mixture(self.sources, generator=torch.Generator().manual_seed(seed + 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def train(self, num_steps, batch_size=64):
        for _ in range(num_steps):
            self.step(batch_size)
        return self

    def step(self, batch_size=64):
        actions = self.learner.sample(batch_size)
        x, y = self.mixture.draw(actions)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        report = self.learner.step(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return report


def rewards_of(run):
    return [report.reward_mean for report in run.reports]


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def watch_input(layer):
    """A function that says whether anybody still holds the memory of the layer's next input."""
    inputs = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))

    def is_held():
        handle.remove()
        return not inputs[0].expired()

    return is_held
