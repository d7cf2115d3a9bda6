"""The paper's augmentation experiment: a network trained on augmented images, and a policy that learns the augmentation meanwhile (OLA).

Each image: the policy's operations on the raw pixels, random crop, flip, normalisation, Cutout. Steps with and without
operations alternate. Steps without operations train the network like any other; their gradients reward the others.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop import Recording, Reinforce
from inloop.alignment.plan import LayerFilter
from inloop.augment import (
    AugmentPolicy,
    AutoAugment,
    FastAutoAugment,
    PopulationBasedAugment,
    RandAugment,
    Space,
    TrivialAugment,
    UniformAugment,
    apply,
)
from inloop.errors import UsageError
from inloop.learner import InLoop
from inloop_lab.augmentation.pipeline import StandardPipeline, normalise_images
from inloop_lab.augmentation.settings import SEARCHES_A_SPACE, AugmentSettings
from inloop_lab.data.images import ImageData
from inloop_lab.networks.wide_resnet import make_wide_resnet
from inloop_lab.runs.seed import Bar
from inloop_lab.runs.states import Stateful, load_parts, save_parts

SNAPSHOTS = 8  # how many times a run records its whole policy


class AugmentExperiment:
    """One seed: network, augmentation, data, and records.

    Args:
        space: Operations in place of the settings' space, for experiments with other operations.
    """

    def __init__(self, settings: AugmentSettings, data: ImageData, seed: int, space: Space | None = None) -> None:
        self.settings = settings
        self.seed = seed
        self.num_epochs = settings.epochs
        self.space = space or settings.space
        torch.manual_seed(seed)
        self.train, self.judged_by = choose_images(data, settings)
        if settings.augment == "ola" and settings.reference == "heldout":
            self.train, self.held_out = hold_out(self.train)
        self.steps_per_epoch = max(1, len(self.train[0]) // settings.batch)
        self.model = make_wide_resnet(settings.network, data.train_x.shape[1], data.num_classes)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=settings.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=settings.weight_decay,
        )
        self.pipeline = StandardPipeline(settings.padding, settings.flip, settings.cutout)
        # Order and crops have generators of their own, so they are the same for every augmentation.
        self.generators = [torch.Generator().manual_seed(seed + 1000 * k) for k in range(1, 5)]
        self.order, self.crops, self.choices, self.references = self.generators
        self.fixed = make_fixed(settings, self.space, data.train_x.shape)
        self.learner = self._make_learner() if settings.augment == "ola" else None
        self.epochs: list[dict[str, Any]] = []

    def _make_learner(self) -> InLoop:
        settings = self.settings
        policy = AugmentPolicy(self.space)
        only_linear: LayerFilter = lambda name, module: isinstance(module, nn.Linear)  # noqa: E731
        return InLoop(
            self.model,
            policy,
            interleave=settings.interleave,
            reference=self.held_out_loss if settings.reference == "heldout" else "next",
            update=Reinforce(
                torch.optim.Adam(policy.parameters(), lr=settings.policy_learning_rate),
                accumulate=settings.accumulate,
                normalisation=settings.normalisation,
                start_after=settings.start * self.steps_per_epoch // (2 if settings.interleave else 1),
            ),
            record=Recording(layers=only_linear if settings.layers == "linear" else None),
            generator=self.choices,
        )

    def held_out_loss(self) -> Tensor:
        """The loss on a batch of held-out images, cropped and flipped as in plain steps."""
        images, labels = self.held_out
        rows = torch.randint(len(images), (self.settings.batch,), generator=self.references)
        return F.cross_entropy(self.model(self.pipeline(images[rows], self.references)), labels[rows])

    @property
    def policy(self) -> AugmentPolicy | None:
        return None if self.learner is None else self.learner.policy  # type: ignore[return-value]

    def augmented(self, images: Tensor) -> Tensor:
        """The batch with its operations done: the learned policy's, a fixed one's, or none."""
        if self.learner is not None:
            return apply(images, self.learner.sample(len(images)))
        if self.fixed is not None:
            return apply(images, self.fixed.sample(len(images), self.choices))
        return images

    def train_epoch(self) -> None:
        """One pass over the training images, without an incomplete last batch."""
        self.model.train()
        if isinstance(self.fixed, PopulationBasedAugment):
            self.fixed.epoch = len(self.epochs)
        images, labels = self.train
        started, losses = time.perf_counter(), []
        rows = torch.randperm(len(images), generator=self.order)
        for step in range(self.steps_per_epoch):
            chosen = rows[step * self.settings.batch : (step + 1) * self.settings.batch]
            now = len(self.epochs) + step / self.steps_per_epoch
            losses.append(self.train_step(images[chosen], labels[chosen], learning_rate(self.settings, now)))
        epoch: dict[str, Any] = {"epoch": len(self.epochs) + 1, "loss": sum(losses) / len(losses)}
        self.epochs.append(epoch | {"seconds": time.perf_counter() - started} | self._policy_record())

    def train_step(self, images: Tensor, labels: Tensor, rate: float) -> float:
        """Augment, forward, backward, reward the step before, clip, update; returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x = self.pipeline(self.augmented(images), self.crops)
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        if self.learner is not None:
            self.learner.step(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _policy_record(self) -> dict[str, Any]:
        """The learned policy after this epoch: keep probabilities, mean strengths, numbers; now and then all strengths."""
        if self.policy is None:
            return {}
        p: dict[str, Any] = self.policy.probabilities()
        strength_AS = p["strength"]
        record = {
            "keep": rounded(p["keep"]),
            "number": rounded(p["number"]),
            "mean_strength": rounded(strength_AS @ torch.arange(strength_AS.shape[1], dtype=strength_AS.dtype)),
        }
        now = len(self.epochs) + 1
        marks = {round(i * self.num_epochs / SNAPSHOTS) for i in range(1, SNAPSHOTS + 1)}
        return record | ({"strength": rounded(strength_AS)} if now in marks else {})

    def bars(self) -> list[Bar]:
        if self.policy is None:
            return []
        keep = self.policy.keep_logits.detach().sigmoid().tolist()
        return [Bar(name, value) for name, value in zip(self.policy.space.operations, keep, strict=True)]

    @torch.no_grad()
    def accuracy(self) -> float:
        """The accuracy on the test images, or on the validation images."""
        self.model.eval()
        images, labels = self.judged_by
        batches = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
        right = sum(int((self.model(normalise_images(x)).argmax(dim=1) == y).sum()) for x, y in batches)
        return right / len(labels)

    def result(self) -> dict[str, Any]:
        settings, accuracy = self.settings, self.accuracy()
        judged = {"validation_accuracy": accuracy} if settings.validation else {}
        return {
            "seed": self.seed,
            "data": settings.data,
            "network": settings.network,
            "augment": settings.augment,
            "space": settings.space if settings.augment in SEARCHES_A_SPACE else None,
            "test_accuracy": None if settings.validation else accuracy,
            **judged,
            "operations": list(self.policy.space.operations) if self.policy is not None else [],
            "epochs": self.epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        return save_parts(self._parts()) | {"generators": [generator.get_state() for generator in self.generators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self._parts(), state)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer}
        return parts if self.learner is None else parts | {"learner": self.learner}


def rounded(values: Tensor) -> list[Any]:
    """As nested lists of numbers with four digits: records stay small."""
    return (values.detach().double() * 1e4).round().div(1e4).tolist()


def choose_images(data: ImageData, settings: AugmentSettings) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training images, and the images that judge the run.

    The choice of training images is fixed, with each class in proportion. So is the choice of validation images, which never overlap
    with them.
    """
    num_images = len(data.train_x)
    wanted = settings.examples or num_images - settings.validation
    learned = settings.augment == "ola"
    trained_on = wanted - max(1, wanted // 10) if learned and settings.reference == "heldout" else wanted
    if wanted + settings.validation > num_images or trained_on < settings.batch * (2 if learned else 1):
        raise UsageError(
            f"{wanted} images for training, {settings.validation} for validation, batches of {settings.batch}: there are {num_images} "
            f"training images, and {'two batches' if learned else 'one batch'} must be filled{' without the held-out tenth' if trained_on < wanted else ''}."
        )
    if settings.cutout >= (side := min(data.train_x.shape[2:])):
        raise UsageError(
            f"cutout={settings.cutout} would blank images of {side} pixels. Fix: --cutout {side // 2} or less, 0 for none."
        )
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0))
    # Sorted by the share of its class that comes before, so every stretch has all classes in proportion.
    labels = data.train_y[order]
    is_class = F.one_hot(labels, data.num_classes)
    before = (is_class.cumsum(dim=0) - 1).gather(1, labels.unsqueeze(1)).squeeze(1)
    order = order[((before + 0.5) / is_class.sum(dim=0)[labels]).argsort(stable=True)]
    used, held = order[:wanted], order[num_images - settings.validation :]
    test = (data.train_x[held], data.train_y[held]) if settings.validation else (data.test_x, data.test_y)
    return (data.train_x[used], data.train_y[used]), test


def hold_out(images: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images without the last tenth, and the last tenth."""
    x, y = images
    size = max(1, len(x) // 10)
    return (x[:-size], y[:-size]), (x[-size:], y[-size:])


def make_fixed(settings: AugmentSettings, space: str | Space, shape: Sequence[int]) -> Any:
    """The fixed augmentation; None if there is none."""
    match settings.augment:
        case "ua":
            return UniformAugment(space)
        case "ra":
            return RandAugment(settings.ra_operations, settings.ra_strength, space)
        case "ta":
            return TrivialAugment(space)
        case "aa":
            return AutoAugment()
        case "fast-aa":
            return FastAutoAugment(width=shape[3], height=shape[2])
        case "pba":
            return PopulationBasedAugment(settings.epochs)
    return None


def learning_rate(settings: AugmentSettings, epoch: float) -> float:
    """Linear from half to the whole during the warm-up, then half a cosine wave that would reach 0 ``warmup`` epochs too late."""
    top, warmup = settings.learning_rate, settings.warmup
    if epoch < warmup:
        return top * (0.5 + 0.5 * epoch / warmup)
    return top * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / settings.epochs))
