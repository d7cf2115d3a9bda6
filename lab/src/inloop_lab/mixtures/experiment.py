"""Trains a small language model on a mixture of domains, and learns the mixture meanwhile.

The loss of an example is the mean cross-entropy over the tokens of its row. The learning rate rises over the first twentieth of the steps, and then falls
to a tenth along a cosine.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.policies import Discrete, MixturePolicy, Shares
from inloop.updates import Exp3, FollowLosses
from inloop_lab.mixtures.domains import Domains, batch_of
from inloop_lab.mixtures.settings import LEARNED, MixtureSettings
from inloop_lab.networks.transformers import Transformer
from inloop_lab.runs.seed import Bar
from inloop_lab.runs.states import Stateful, load_parts, save_parts
from inloop_lab.text.domains import IGNORED, Rows

PERIODS = 20  # how often a run is evaluated and saved


def num_periods(settings: MixtureSettings) -> int:
    return min(PERIODS, settings.steps)


SIZES = {"tiny": (128, 2, 4), "small": (384, 6, 6)}  # width, depth, heads


class MixtureExperiment:
    """One seed of a run; an *epoch* is a twentieth of the steps."""

    def __init__(self, settings: MixtureSettings, domains: Domains, seed: int) -> None:
        self.settings, self.domains, self.seed = settings, domains, seed
        self.num_epochs = num_periods(settings)
        torch.manual_seed(seed)
        self.model = make_model(settings, domains.num_tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.mixture = Mixture(dict(domains.training), generator=torch.Generator().manual_seed(seed + 1000))
        self.policy = make_policy(settings, self.mixture)
        self.judge = torch.Generator().manual_seed(seed + 3000)
        self.learner = self._make_learner(torch.Generator().manual_seed(seed + 2000))
        self.epochs: list[dict[str, Any]] = []

    def _make_learner(self, generator: torch.Generator) -> InLoop:
        if self.settings.mixture not in LEARNED:
            rule = {"loss": FollowLosses, "exp3": Exp3}.get(self.settings.mixture)
            return InLoop(self.model, self.policy, reward="loss", update=rule() if rule else None, generator=generator)
        reference: Any = "trail" if self.settings.mixture == "trail" else "next"
        if self.domains.target is not None:
            reference = self.target_loss
        return InLoop(
            self.model,
            self.policy,
            optimizer=self.optimizer,
            reference=reference,
            part=self.settings.part,
            generator=generator,
        )

    def _rate(self, step: int) -> float:
        warm, steps = max(1, self.settings.steps // 20), self.settings.steps
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bfloat16):
            yield

    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example, [N], and the logits, [N, L, C]."""
        with self._precision():
            logits = self.model(x)
        losses_NL = F.cross_entropy(logits.float().transpose(1, 2), y, ignore_index=IGNORED, reduction="none")
        return losses_NL.sum(dim=1) / (y != IGNORED).sum(dim=1), logits

    def target_loss(self) -> Tensor:
        """The mean loss of as many rows of the target as a batch has, drawn anew each time."""
        assert self.domains.target is not None
        numbers = torch.randint(len(self.domains.target), (self.settings.batch,), generator=self.judge)
        return self.losses(*batch_of(self.domains.target, numbers))[0].mean()

    def bars(self) -> list[Bar]:
        return [Bar(name, share) for name, share in zip(self.domains.training, self.shares(), strict=True)]

    def shares(self) -> list[float]:
        probabilities: list[float] = self.policy.probabilities().tolist()
        return probabilities

    def train_epoch(self) -> None:
        done, period = len(self.epochs), len(self.epochs) + 1
        steps = self.settings.steps * period // self.num_epochs - self.settings.steps * done // self.num_epochs
        self.model.train()
        total = 0.0
        for _ in range(steps):
            x, y = self.mixture.draw(self.learner.sample(self.settings.batch))
            losses_N, logits = self.losses(x, y)
            loss = losses_N.mean()
            loss.backward()
            told = {"logits": logits, "labels": y} if self.settings.mixture in LEARNED else {"losses": losses_N}
            self.learner.step(loss, **told)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            total += loss.item()
        held_out = {name: self.held_out_loss(rows) for name, rows in self.domains.held_out.items()}
        self.epochs.append(
            {
                "epoch": period,
                "loss": total / steps,
                "probabilities": self.shares(),
                "held_out": held_out,
                "target": None if self.domains.target is None else self.held_out_loss(self.domains.target),
            }
        )

    @torch.no_grad()
    def held_out_loss(self, rows: Rows) -> float:
        """The mean loss of all rows, in nats a token."""
        self.model.eval()
        batches = torch.arange(len(rows)).split(256)
        return sum(float(self.losses(*batch_of(rows, numbers))[0].sum()) for numbers in batches) / len(rows)

    def result(self) -> dict[str, Any]:
        """The result of a finished seed."""
        last = self.epochs[-1]
        statistics = self.learner.statistics if self.settings.mixture in LEARNED else None
        verdicts = [] if statistics is None else statistics.verdicts()
        return {
            "seed": self.seed,
            "mixture": self.settings.mixture,
            "held_out_loss": sum(last["held_out"].values()) / len(last["held_out"]),
            "held_out": last["held_out"],
            "target_loss": last["target"],
            "shares": dict(zip(self.domains.training, last["probabilities"], strict=True)),
            "flagged": [verdict.name for verdict in verdicts if verdict.flagged],
            "words": {verdict.name: verdict.word for verdict in verdicts},
            "effective_epochs": self.mixture.effective_epochs().tolist(),
            "epochs": self.epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        return save_parts(self._parts()) | {"judge": self.judge.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self._parts(), state)
        self.judge.set_state(state["judge"])

    def _parts(self) -> dict[str, Stateful]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "mixture": self.mixture,
            "learner": self.learner,
        }


def make_model(settings: MixtureSettings, num_tokens: int) -> nn.Module:
    width, depth, heads = SIZES[settings.model]
    return Transformer(
        nn.Embedding(num_tokens, width), settings.length, width, depth, heads, classes=num_tokens, causal=True
    )


def make_policy(settings: MixtureSettings, mixture: Mixture) -> Discrete:
    """The distribution to learn, or the fixed one of a baseline."""
    sizes = [len(source.dataset) for source in mixture.sources]  # type: ignore[attr-defined]
    if settings.mixture in LEARNED:
        prior = [float(size) for size in sizes] if settings.prior == "proportional" else None
        return MixturePolicy(mixture, prior=prior, floor=settings.floor)
    if settings.mixture == "proportional":
        return Shares.proportional(sizes)
    if settings.mixture == "tempered":
        return Shares.tempered(sizes, settings.temperature)
    bad = settings.bad.split(",") if settings.bad else []
    if unknown := [name for name in bad if name not in mixture.names]:
        raise UsageError(
            f"bad={settings.bad!r}: the domains are {', '.join(mixture.names)}, and '{unknown[0]}' is none."
        )
    return Shares([0.0 if name in bad else 1.0 for name in mixture.names])
