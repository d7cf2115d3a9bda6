"""The settings of a run of the split experiment, and the defaults that depend on the data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from inloop.errors import UsageError
from inloop_lab.networks.small import NETWORKS
from inloop_lab.splits.noise import Noise

RewardName = Literal["gar", "nslr", "none", "oracle", "loss", "exp3"]
OptimizerName = Literal["nesterov", "sgd", "adam"]
ReferenceName = Literal["next", "previous", "heldout"]


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """One run, of one or more seeds. Defaults are the paper's.

    Attributes:
        reward: "gar", "nslr", or a baseline: "none" (every split equally often), "oracle" (never the noisy one), "loss" (softmax of the
            splits' losses), "exp3" (online data mixing by the loss).
        optimizer: "nesterov" (lr 0.1, momentum 0.9, L2 5e-4, the paper's), "sgd" (lr 0.1) or "adam" (lr 0.001).
        reference: "next", "previous" or "heldout" (a fixed tenth of the clean data, at most a batch, which is in no split).
        layers: "all", or "linear" to reward linear layers only.
    """

    data: str = "cifar10"
    network: str = "fc-bn"
    reward: RewardName = "gar"
    noise: Noise = "labels"
    sources: int = 10
    batch: int = 1000
    epochs: int = 10
    optimizer: OptimizerName = "nesterov"
    reference: ReferenceName = "next"
    accumulate: int = 10
    layers: Literal["all", "linear"] = "all"

    def __post_init__(self) -> None:
        choices = {
            "network": NETWORKS,
            "reward": get_args(RewardName),
            "noise": get_args(Noise),
            "optimizer": get_args(OptimizerName),
            "reference": get_args(ReferenceName),
            "layers": ("all", "linear"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}.")
        for name, least in (("sources", 2), ("batch", 2), ("epochs", 1), ("accumulate", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: allowed are whole numbers from {least}.")
        if self.reward == "oracle" and self.noise == "none":
            raise UsageError("reward='oracle' leaves out the noisy split, and with noise='none' there is none.")
        if self.reference == "previous" and self.reward != "gar":
            raise UsageError(
                f"reference='previous' is for reward='gar': {self.reward!r} does not look at the gradient of the step before."
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def folder_name(self, usual: "SplitSettings") -> str:
        """A name for the run's folder: data, network, reward, noise, and the settings that are not usual for that data."""
        others = ("sources", "batch", "epochs", "optimizer", "reference", "accumulate", "layers")
        special = [f"{name}-{getattr(self, name)}" for name in others if getattr(self, name) != getattr(usual, name)]
        return "-".join(["splits", Path(self.data).stem, self.network, self.reward, self.noise, *special])


# Options, each with the rewards that use it.
ONLY_FOR = {"reference": ("gar", "nslr"), "accumulate": ("gar", "nslr"), "layers": ("gar",)}


def with_defaults(data: str, num_examples: int | None = None, **given: Any) -> SplitSettings:
    """Settings for ``data``, with ``num_examples`` for training; None stands for the default for that data."""
    chosen = {name: value for name, value in given.items() if value is not None}
    size = {"digits": 1500, "cifar10": 50_000, "cifar100": 50_000}.get(data, num_examples or 50_000)
    # Of 1,500 digits, the paper's batch would be two thirds, and ten epochs a few steps.
    small = {"batch": max(2, size // 6), "epochs": 40, "optimizer": "sgd"}
    defaults: dict[str, Any] = small if size < 20_000 else {}
    return SplitSettings(data=data, **(defaults | chosen))
