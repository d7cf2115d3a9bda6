"""Models that are run again, whole or in checkpointed parts, and the rewards of a run, shared by the tests of what is kept."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from inloop import MixturePolicy
from tests.learners import make_learner


class Residual(nn.Module):
    """An in-place activation on the very first output, dropout, a layer that is used twice."""

    def __init__(self, norm=lambda channels: nn.GroupNorm(2, channels)):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        x = x + self.conv(F.dropout(F.relu(self.norm(x)), 0.3, self.training))
        x = x + self.conv(x)
        return self.head(x.mean(dim=(2, 3)))


class Tokens(nn.Module):
    """Two embeddings that nothing comes before, a black box, a tied output layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(7).expand(len(ids), 7))
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


MODELS = {
    "residual": lambda: (Residual(), torch.randn(5, 3, 8, 8).double()),
    "tokens": lambda: (Tokens(), torch.randint(0, 11, (5, 7))),
    "one layer": lambda: (nn.Linear(3, 2), torch.randn(5, 3).double()),
    "black box": lambda: (nn.GRUCell(3, 4), torch.randn(5, 3).double()),
    "sequential": lambda: (
        nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 2)),
        torch.randn(6, 3).double(),
    ),
}


def make(name):
    torch.manual_seed(3)
    model, x = MODELS[name]()
    return model.double(), x


# ------------------------------------------------------------------ with checkpointed modules


WIDTH = 6


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Scaled(Block):
    """With a bare parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + super().forward(x) * self.scale


class Recurrent(nn.Module):
    """With a module that has no rule."""

    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.gru(x)[0])


class Normalised(nn.Module):
    """Examples depend on each other."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)

    def forward(self, x):
        return F.relu(self.norm(self.inner(x)))


class Tied(Block):
    """Shares a layer with all others of its kind."""

    shared = None

    def __init__(self):
        super().__init__()
        Tied.shared = Tied.shared or nn.Linear(WIDTH, 12)
        self.up = Tied.shared


class Nested(nn.Module):
    """With a checkpoint within."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


class Net(nn.Module):
    def __init__(self, make_block, reentrant):
        super().__init__()
        torch.manual_seed(0)
        Tied.shared = None
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(dim=1))


class SequenceFirst(nn.Module):
    """Examples are second within the segments, and as many as positions."""

    def __init__(self, checkpoints, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.block = (
            nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0) if kind == "attention" else Block(dropout=0.1)
        )
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.first(x).transpose(0, 1)
        x = self.block(x) if self.checkpoints is None else checkpoint(self.block, x, use_reentrant=self.checkpoints)
        return self.head(x.transpose(0, 1)).mean(dim=1)


class Late(Net):
    """From the fourth step on a layer of a segment is used outside of it, too."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        block = self.blocks[0]
        x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        x = x + block.up(x)[..., :WIDTH] if self.calls > 3 else x
        return self.head(x.mean(dim=1))


class HoldsMethod(Block):
    def __init__(self):
        super().__init__()
        self.chosen = self.one_way

    def one_way(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.chosen(x)


class Given(nn.Module):
    """A parameter goes into the segment from outside."""

    def __init__(self, checkpoints):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.pos = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(4, WIDTH))
        self.block, self.checkpoints = Block(), checkpoints

    def shifted(self, x, pos):
        return self.block(x + pos)

    def forward(self, x):
        x = self.first(x)
        run = self.shifted
        x = run(x, self.pos) if not self.checkpoints else checkpoint(run, x, self.pos, use_reentrant=False)
        return self.head(x.mean(dim=1))


def rewards_of(net, steps=4, seen=None, positions=4, **options):
    """Rewards of every step, as the learner hands them on."""
    net.double()
    learner = make_learner(net, MixturePolicy(2), generator=torch.Generator().manual_seed(0), update=False, **options)
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    rewards = []
    reward = learner.reward
    learner.reward = type(reward)()
    learner.reward.__class__ = type(
        "Kept", (type(reward),), {"__call__": lambda self, *a: rewards.append(reward(*a)) or rewards[-1]}
    )
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, positions, 3, generator=generator, dtype=torch.float64)
        learner.sample(8)
        loss = net(x).square().mean()
        loss.backward()
        learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    if seen is not None:
        seen.extend(learner.reference.waiting.tape.calls)
    return torch.stack(rewards)


def bytes_kept(calls):
    """Without parameters: a segment has copies of its own."""
    kept = {}
    for call in calls:
        own = {value.data_ptr() for value in call.layer.parameters()} if hasattr(call, "layer") else set()
        for tensor in call.tensors():
            if tensor.data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(kept.values())
