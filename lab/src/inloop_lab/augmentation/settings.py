"""The settings of a run of the augmentation experiment, and the paper's own recipe as presets."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from inloop.augment import SPACES
from inloop.errors import UsageError
from inloop_lab.networks.wide_resnet import parse_wide_resnet

AugmentName = Literal["ola", "ua", "ra", "ta", "aa", "fast-aa", "pba", "none"]
SEARCHES_A_SPACE = ("ola", "ua", "ra", "ta")  # the others bring their own operations
# Options of OLA alone.
OLA_OPTIONS = ("interleave", "reference", "normalisation", "accumulate", "policy_learning_rate", "start", "layers")


@dataclass(frozen=True, kw_only=True)
class AugmentSettings:
    """One run, of one or more seeds. Defaults are the paper's, for CIFAR-10.

    Attributes:
        augment: "ola" (learned), "ua", "ra", "ta", "aa", "fast-aa", "pba", or "none" (crop, flip and Cutout only).
        space: The search space of ola, ua, ra and ta.
        examples: The number of training images to use; 0 for all.
        validation: The number of other training images that judge the run, instead of the test images; 0 for none.
        learning_rate: The largest one: reached after the warm-up, from half of it, then cosine to nearly nothing.
        warmup: The epochs of the warm-up.
        clip: The largest norm of the model's gradient; clipping comes after the reward.
        padding: Pixels around the image for the random crop.
        cutout: Side of Cutout, 0 for none.
        interleave: Whether every second step of ola is without operations; such steps judge the others.
        reference: The judge of ola's steps: "next" (the next step) or "heldout" (a tenth of the training images, which are
            then not trained on; a batch of them for each rewarded step).
        accumulate: Rewarded steps of ola for each update of its policy.
        policy_learning_rate: The learning rate of ola's Adam.
        normalisation: The normalisation of ola's rewards within a step: "step" (mean 0, deviation 1) or "center" (mean 0).
        start: Epochs before ola's policy first moves.
        layers: Which layers count for the reward: "all", or "linear" for the last one only.
        ra_operations: RandAugment's N.
        ra_strength: RandAugment's M, of 0..30.
    """

    data: str = "cifar10"
    network: str = "wrn-28-10"
    augment: AugmentName = "ola"
    space: str = "wl"
    batch: int = 256
    epochs: int = 200
    examples: int = 0
    validation: int = 0
    learning_rate: float = 0.1
    warmup: int = 5
    weight_decay: float = 5e-4
    clip: float = 5.0
    padding: int = 4
    flip: bool = True
    cutout: int = 16
    interleave: bool = True
    reference: Literal["next", "heldout"] = "next"
    accumulate: int = 1
    policy_learning_rate: float = 0.1
    normalisation: Literal["step", "center"] = "step"
    start: int = 0
    layers: Literal["all", "linear"] = "all"
    ra_operations: int = 2
    ra_strength: int = 14

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "augment": get_args(AugmentName),
            "space": tuple(SPACES),
            "layers": ("all", "linear"),
            "reference": ("next", "heldout"),
            "normalisation": ("step", "center"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}.")
        parse_wide_resnet(self.network)
        least: dict[str, float] = {
            "batch": 2,
            "epochs": 1,
            "examples": 0,
            "validation": 0,
            "warmup": 0,
            "weight_decay": 0,
            "padding": 0,
            "cutout": 0,
            "accumulate": 1,
            "start": 0,
            "ra_operations": 1,
            "ra_strength": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name}={getattr(self, name)}: allowed are numbers from {low}.")
        for name in ("learning_rate", "clip", "policy_learning_rate"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)}: allowed are numbers above 0.")
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name}={value}: allowed are finite numbers.")
        if self.ra_strength > 30:
            raise UsageError(f"ra_strength={self.ra_strength}: allowed are 0..30.")
        if self.start >= self.epochs:
            raise UsageError(f"start={self.start}: the policy would not move in {self.epochs} epochs.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def folder_name(self, usual: "AugmentSettings") -> str:
        """A name for the run's folder: data, network, augmentation, space, and the settings that are not usual for that data."""
        if self.warmup == default_warmup(self.epochs):
            usual = replace(usual, warmup=self.warmup)
        shown = ("data", "network", "augment", "space")
        special = [
            f"{field.name}-{getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in shown and getattr(self, field.name) != getattr(usual, field.name)
        ]
        space = [self.space] if self.augment in SEARCHES_A_SPACE else []
        return "-".join(["augment", Path(self.data).stem, self.network, self.augment, *space, *special])


PRESETS: dict[str, dict[str, Any]] = {
    f"paper-{data}-{space}": {"data": data, "network": "wrn-28-10", "space": space, "batch": 256, "epochs": 200}
    for data in ("cifar10", "cifar100")
    for space in ("wl", "ra")
}


def default_warmup(epochs: int) -> int:
    """The paper's 5 are a fortieth of its 200 epochs."""
    return max(1, epochs // 40)


def with_augment_defaults(data: str, epochs: int | None = None, side: int = 32, **given: Any) -> AugmentSettings:
    """Settings for ``data``; None stands for the default for that data and number of epochs.

    Args:
        side: The images' side in pixels, for a user's own data: crop and Cutout are the paper's for 32, and smaller for less.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    defaults: dict[str, Any] = {"padding": max(1, min(side, 32) // 8), "cutout": min(side, 32) // 2}
    if data == "digits":  # 8 x 8 pixels: nothing to cut out; and a mirrored digit is another or none
        defaults = {"network": "wrn-10-1", "epochs": 40, "batch": 250, "padding": 1, "flip": False, "cutout": 0}
    if epochs is not None:
        defaults["epochs"] = epochs
    return AugmentSettings(data=data, **({"warmup": default_warmup(defaults.get("epochs", 200))} | defaults | chosen))


# Options, each with the augmentations that use it.
ONLY_FOR = {
    **dict.fromkeys(OLA_OPTIONS, ("ola",)),
    **dict.fromkeys(("ra_operations", "ra_strength"), ("ra",)),
    "space": SEARCHES_A_SPACE,
}
