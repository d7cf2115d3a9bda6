"""One training run that is the same for any number of processes: what is compared over world sizes."""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inloop
from inloop.distributed import rank, traffic, world_size

NUM_SOURCES = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Tied weights, a bare parameter, a module without a rule (GRU), layers on sequences."""

    def __init__(self, tokens=7, length=4, width=6):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.blocks(self.embedding(ids) + self.positions)
        return self.head(self.mixer(x)[0])

    def parts(self):
        return [*self.blocks, self.mixer]


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, stride=2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(4, 5),
        )

    def parts(self):
        return [self[3], self[6]]


def sources_with_wrong_labels():
    """Data in float64; all labels of the first source are wrong."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SOURCES, 400, 1, 4, 4, generator=generator, dtype=torch.float64)
    right = x.mean(dim=(2, 3, 4)).gt(0).long()
    return [(x[k], 1 - right[k] if k == 0 else right[k]) for k in range(NUM_SOURCES)]


def sources_of(kind):
    """Data in float64; the first source has random labels."""
    generator = torch.Generator().manual_seed(5)
    sources = []
    for number in range(NUM_SOURCES):
        if kind is Transformer:
            ids = torch.randint(7, (40, 4), generator=generator)
            targets = torch.randint(7, (40, 4), generator=generator) if number == 0 else (3 * ids + 1) % 7
            sources.append((ids, targets))
        else:
            x = torch.randn(40, 1, 4, 4, generator=generator, dtype=torch.float64)
            targets = (
                torch.randint(5, (40,), generator=generator) if number == 0 else x.mean(dim=(1, 2, 3)).gt(0).long()
            )
            sources.append((x, targets))
    return sources


@dataclass(frozen=True)
class Options:
    kind: type = Transformer
    wrapper: str = "none"
    steps: int = 20
    batch: int = 12
    micro_batches: int = 1
    interleave: bool = False
    retain: str = "exact"
    reference: str = "next"
    selection: str = "replacement"
    clip: bool = True
    part: float = 1.0
    knows_optimizer: bool = False
    tells: bool = False  # logits and labels, to the default rule


def shares(batch):
    """How many examples each process has of a batch: as even as can be."""
    return [len(part) for part in torch.arange(batch).tensor_split(world_size())]


class Run:
    """Model, learner, mixture and optimizer; ``train`` goes on for some steps."""

    def __init__(self, options):
        self.options = options
        torch.manual_seed(3)
        self.model = options.kind().double()
        if options.wrapper == "fsdp":
            for part in self.model.parts():
                fully_shard(part)
            fully_shard(self.model)
        self.wrapped = DistributedDataParallel(self.model) if options.wrapper == "ddp" else self.model
        if options.knows_optimizer:  # rounding must not decide the sign of a step
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(3 + rank())  # processes often have seeds of their own
        sources = sources_with_wrong_labels() if options.tells else sources_of(options.kind)
        self.mixture = inloop.Mixture(sources, selection=options.selection)
        self.learner = inloop.InLoop(
            self.wrapped,
            inloop.MixturePolicy(NUM_SOURCES),
            optimizer=self.optimizer if options.knows_optimizer else None,
            interleave=options.interleave,
            part=options.part,
            reference=self.held_out if options.reference == "held-out" else options.reference,
            update=None if options.tells else inloop.Reinforce(accumulate=2),
            record=inloop.Recording(retain=options.retain),
        )
        self.rewards, self.probabilities, self.losses, self.messages, self.bytes = [], [], [], [], []
        self.told = []
        add = self.learner.update.add
        self.learner.update.add = lambda draws, rewards_N: (
            self.rewards.append(rewards_N.clone()) or add(draws, rewards_N)
        )

    def held_out(self):
        x, y = sources_of(self.options.kind)[1]
        mine = slice(rank(), len(x), world_size())
        return F.cross_entropy(self.model(x[mine]).flatten(0, -2), y[mine].flatten())

    def train(self, steps=None):
        options = self.options
        for _ in range(options.steps if steps is None else steps):
            before = traffic.messages, traffic.bytes
            for number in range(options.micro_batches):
                last = number == options.micro_batches - 1
                with contextlib.nullcontext() if last else self.no_sync():
                    loss = self.pass_once()
                if options.wrapper == "fsdp":
                    self.model.set_requires_gradient_sync(True)
            told = [torch.cat(parts) for parts in zip(*self.told, strict=True)] if options.tells else [None, None]
            report = self.learner.step(loss, logits=told[0], labels=told[1])
            self.told = []
            self.messages.append(traffic.messages - before[0])
            self.bytes.append(traffic.bytes - before[1])
            self.probabilities.append(report.probabilities)
            if options.clip and options.wrapper != "fsdp":
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def pass_once(self):
        mine = shares(self.options.batch)[rank()]
        x, y = self.mixture.draw(self.learner.sample(mine))
        output = self.wrapped(x)
        self.told.append((output.detach(), y))
        loss = F.cross_entropy(output.flatten(0, -2), y.flatten()) * self.learner.loss_weight
        (loss / self.options.micro_batches).backward()
        return loss.detach()

    def no_sync(self):
        if self.options.wrapper == "ddp":
            return self.wrapped.no_sync()
        if self.options.wrapper == "fsdp":
            self.model.set_requires_gradient_sync(False)
        return contextlib.nullcontext()

    def record(self):
        return {
            "rewards": [part.tolist() for part in self.rewards],
            "probabilities": torch.stack(self.probabilities).tolist(),
            "drawn": self.mixture.drawn_K.tolist(),
            "messages": self.messages,
            "bytes": self.bytes,
            "excess": self.learner.statistics.signs.compared_excess.mean_K.nan_to_num(0.0).tolist(),
        }


def train(options):
    return Run(options).train().record()
