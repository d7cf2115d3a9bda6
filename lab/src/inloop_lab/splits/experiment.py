"""The paper's split experiment: equal splits of a data set, one of them noisy, and a policy that learns which to use.

The *area* of split k (Table 1) is (K - 1) times the trapezoid mean over epochs of its probability, averaged within each
epoch: uniform sampling gives (K - 1) / K, never using a split 0, and no split can have more than 1 (inverted softmax).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.alignment import Recording
from inloop.alignment.plan import LayerFilter
from inloop.learner import InLoop
from inloop.mixture import Mixture
from inloop.paper import paper_policy, paper_settings
from inloop.policies import Discrete, Shares
from inloop.updates import Exp3, FollowLosses, Update
from inloop.verdicts import SourceVerdict
from inloop_lab.data.images import ImageData, to_input
from inloop_lab.networks.small import make_network
from inloop_lab.runs.seed import Bar
from inloop_lab.runs.states import Stateful, load_parts, save_parts
from inloop_lab.splits.noise import NOISY_SPLIT, make_splits, noisy_split
from inloop_lab.splits.settings import SplitSettings


class SplitExperiment:
    """One seed of the experiment: model, policy, learner, data, and records."""

    def __init__(self, settings: SplitSettings, data: ImageData, seed: int) -> None:
        self.settings = settings
        self.data = data
        self.seed = seed
        self.num_epochs = settings.epochs
        torch.manual_seed(seed)
        self.held_out: tuple[Tensor, Tensor] | None = None
        training = data
        if settings.reference == "heldout":
            self.held_out, training = hold_out(data, settings.batch)
        self.splits = make_splits(training, settings.sources, settings.noise, torch.Generator().manual_seed(seed))
        self.mixture = Mixture(self.splits)
        self.model = make_network(settings.network, data.train_x.shape[1:], data.num_classes)
        self.optimizer = make_optimizer(settings.optimizer, self.model)
        self.policy = make_policy(settings)
        self.learner = self._make_learner()
        self.epochs: list[dict[str, Any]] = []

    def _make_learner(self) -> InLoop:
        settings = self.settings
        only_linear: LayerFilter = lambda name, module: isinstance(module, nn.Linear)  # noqa: E731
        options = paper_settings(settings.accumulate)
        if settings.reward != "gar":
            # Baselines follow the loss, if anything.
            options["reward"] = "nslr" if settings.reward == "nslr" else "loss"
        if settings.reward not in ("gar", "nslr"):
            options["update"] = make_baseline(settings.reward)
        if settings.reference != "next":
            options["reference"] = self.held_out_loss if settings.reference == "heldout" else settings.reference
        record = Recording(layers=only_linear if settings.layers == "linear" else None)
        return InLoop(self.model, self.policy, record=record, **options)

    def held_out_loss(self) -> Tensor:
        """The loss on clean examples of no split; BatchNorm is in training mode, as in the steps that it judges."""
        assert self.held_out is not None
        x, y = self.held_out
        return F.cross_entropy(self.model(to_input(x)), y)

    def bars(self) -> list[Bar]:
        noisy = noisy_split(self.settings.noise)
        shares = enumerate(self.policy.probabilities().tolist())
        return [Bar(f"split {k}", share, "noisy" if k == noisy else "") for k, share in shares]

    def train_epoch(self) -> None:
        """As many steps as fill one pass over the training data."""
        settings = self.settings
        self.model.train()
        losses, p_TK = [], []
        for _ in range(max(1, len(self.data.train_x) // settings.batch)):
            p_TK.append(self.policy.probabilities())
            x, y = self.mixture.draw(self.learner.sample(settings.batch))
            losses_N = F.cross_entropy(self.model(to_input(x)), y, reduction="none")
            loss = losses_N.mean()
            loss.backward()
            self.learner.step(loss, losses=losses_N)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        self.epochs.append(
            {
                "epoch": len(self.epochs) + 1,
                "loss": sum(losses) / len(losses),
                "probabilities": torch.stack(p_TK).mean(dim=0).tolist(),
            }
        )

    @torch.no_grad()
    def test_accuracy(self) -> float:
        self.model.eval()
        batches = zip(torch.split(self.data.test_x, 1000), torch.split(self.data.test_y, 1000), strict=True)
        right = sum(int((self.model(to_input(x)).argmax(dim=1) == y).sum()) for x, y in batches)
        return right / len(self.data.test_y)

    def result(self) -> dict[str, Any]:
        """The result of a finished seed."""
        settings = self.settings
        areas_K = areas([epoch["probabilities"] for epoch in self.epochs])
        noisy = noisy_split(settings.noise)
        others = [area for k, area in enumerate(areas_K) if k != noisy]
        statistics = self.learner.statistics if settings.reward == "gar" else None
        verdicts = [] if statistics is None else statistics.verdicts()
        return {
            "seed": self.seed,
            "network": settings.network,
            "reward": settings.reward,
            "noisy_area": None if noisy is None else areas_K[noisy],
            "other_area": sum(others) / len(others),
            "test_accuracy": self.test_accuracy(),
            "named": [verdict.source for verdict in verdicts if verdict.flagged],
            "areas": areas_K,
            "sources": [row_of(verdict) for verdict in verdicts],
            "effective_epochs": self.mixture.effective_epochs().tolist(),
            "epochs": self.epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        return save_parts(self._parts())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self._parts(), state)

    def _parts(self) -> dict[str, Stateful]:
        return {"model": self.model, "optimizer": self.optimizer, "mixture": self.mixture, "learner": self.learner}


def row_of(verdict: SourceVerdict) -> dict[str, Any]:
    """The verdict as it is kept in a result."""
    numbers = {name: getattr(verdict, name) for name in ("source", "examples", "advantage", "low", "high")}
    return {**numbers, "bad": verdict.flagged}


def hold_out(data: ImageData, batch: int) -> tuple[tuple[Tensor, Tensor], ImageData]:
    """A fixed random tenth of the training data, at most a batch, and the data without it."""
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))
    kept, held = order[(size := max(1, min(batch, len(order) // 10))) :], order[:size]
    human = None if data.human_labels is None else data.human_labels[kept]
    rest = replace(data, train_x=data.train_x[kept], train_y=data.train_y[kept], human_labels=human)
    return (data.train_x[held], data.train_y[held]), rest


def make_policy(settings: SplitSettings) -> Discrete:
    """The distribution to learn, or the distribution of a baseline."""
    if settings.reward == "oracle":
        return Shares([0.0 if k == NOISY_SPLIT else 1.0 for k in range(settings.sources)])
    if settings.reward in ("gar", "nslr"):
        return paper_policy(settings.sources)
    return Shares.uniform(settings.sources)


def make_baseline(name: str) -> Update | None:
    """The update rule of a baseline; None if its shares are fixed."""
    return {"loss": FollowLosses, "exp3": Exp3}[name]() if name in ("loss", "exp3") else None


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def areas(probabilities_EK: list[list[float]]) -> list[float]:
    """Area of each split from its mean probability in each of E epochs."""
    p_EK = torch.tensor(probabilities_EK, dtype=torch.float64)
    mean_K = p_EK[0] if len(p_EK) == 1 else torch.trapezoid(p_EK, dim=0) / (len(p_EK) - 1)
    return ((p_EK.shape[1] - 1) * mean_K).tolist()
