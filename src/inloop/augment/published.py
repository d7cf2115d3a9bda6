"""Published policies, as data: AutoAugment, Fast AutoAugment, Population Based Augmentation.

Each has ``sample(n, generator)``; ``apply`` takes its records. Axes: N examples, P sub-policies, R operations of one.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from inloop.augment.records import finish_record
from inloop.augment.registry import get_operation
from inloop.augment.spaces import SPACES, bits, real
from inloop.errors import UsageError

# Cubuk et al. 2019, Table 7: (operation, probability, level of 10), as also in torchvision (BSD).
AUTO_AUGMENT = """
invert 0.1 7, contrast 0.2 6 / rotate 0.7 2, translate_x 0.3 9 / sharpness 0.8 1, sharpness 0.9 3
shear_y 0.5 8, translate_y 0.7 9 / auto_contrast 0.5 8, equalize 0.9 2 / shear_y 0.2 7, posterize 0.3 7
color 0.4 3, brightness 0.6 7 / sharpness 0.3 9, brightness 0.7 9 / equalize 0.6 5, equalize 0.5 1
contrast 0.6 7, sharpness 0.6 5 / color 0.7 7, translate_x 0.5 8 / equalize 0.3 7, auto_contrast 0.4 8
translate_y 0.4 3, sharpness 0.2 6 / brightness 0.9 6, color 0.2 8 / solarize 0.5 2, invert 0.0 3
equalize 0.2 0, auto_contrast 0.6 0 / equalize 0.2 8, equalize 0.6 4 / color 0.9 9, equalize 0.6 6
auto_contrast 0.8 4, solarize 0.2 8 / brightness 0.1 3, color 0.7 0 / solarize 0.4 5, auto_contrast 0.9 3
translate_y 0.9 9, translate_y 0.7 9 / auto_contrast 0.9 2, solarize 0.8 3 / equalize 0.8 8, invert 0.1 3
translate_y 0.7 9, auto_contrast 0.9 1
"""


@dataclass(frozen=True)
class Entry:
    """An operation, the probability that it is done, and its magnitude."""

    operation: str
    probability: float
    magnitude: float


class SubPolicies:
    """One of P sub-policies for each example, uniformly; its operations in order, each done with its own probability."""

    def __init__(self, sub_policies: list[list[Entry]]) -> None:
        self.sub_policies = sub_policies
        self.code_PR = torch.tensor(
            [[get_operation(e.operation).code for e in sub] for sub in sub_policies], device="cpu"
        )
        self.signed_PR = torch.tensor(
            [[get_operation(e.operation).signed for e in sub] for sub in sub_policies], device="cpu"
        )
        self.probability_PR = torch.tensor([[e.probability for e in sub] for sub in sub_policies], device="cpu")
        self.magnitude_PR = torch.tensor(
            [[e.magnitude for e in sub] for sub in sub_policies], dtype=torch.float64, device="cpu"
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        which_N = torch.randint(len(self.sub_policies), (n,), generator=generator, device="cpu")
        done_NR = torch.rand(n, self.code_PR.shape[1], generator=generator, device="cpu") < self.probability_PR[which_N]
        return finish_record(
            self.code_PR[which_N], self.magnitude_PR[which_N], self.signed_PR[which_N], done_NR, generator
        )


class AutoAugment(SubPolicies):
    """AutoAugment's 25 sub-policies for CIFAR-10.

    A level, of 10, is a share of the ranges of its paper: posterize at level 7 keeps 6 bits, of 8 to 4.
    """

    def __init__(self) -> None:
        table = SPACES["autoaugment"].magnitudes
        lines = AUTO_AUGMENT.strip().replace("\n", " / ").split(" / ")
        entries = [[entry.split() for entry in line.split(", ")] for line in lines]
        super().__init__(
            [[Entry(name, float(p), table[name][3 * int(level)]) for name, p, level in sub] for sub in entries]
        )


class FastAutoAugment(SubPolicies):
    """Fast AutoAugment's 493 sub-policies for reduced CIFAR-10 (Lim et al. 2019).

    Args:
        width: The images' width: translations are shares of it.
        height: The images' height; None for square ones.
    """

    def __init__(self, width: int = 32, height: int | None = None) -> None:
        super().__init__(
            [
                [_fast_auto_augment_entry(name, p, level, width, height or width) for name, p, level in sub]
                for sub in _data("fast_autoaugment_cifar10.json")["policies"]
            ]
        )


def _fast_auto_augment_entry(name: str, probability: float, level: float, width: int, height: int) -> Entry:
    """Operations with a random sign have symmetric ranges: there a level of one half does nothing."""
    twice = 2 * level - 1
    magnitude = {
        "shear_x": 0.3 * twice,
        "shear_y": 0.3 * twice,
        "translate_x": 0.45 * width * twice,
        "translate_y": 0.45 * height * twice,
        "rotate": 30 * twice,
        "solarize": 256 * level,
        "posterize": int(4 + 4 * level),
        "cutout": 0.2 * level,
    }.get(name, 0.1 + 1.8 * level)
    return Entry("cutout_grey" if name == "cutout" else name, probability, magnitude)


class PopulationBasedAugment:
    """The schedule that PBA found on reduced CIFAR-10 (Ho et al. 2019), stretched over the epochs of the run.

    Geometric operations uncover black here, in PBA's own code mostly the mean colour.

    Args:
        epochs: The epochs of the run. Set ``epoch``, from 0, as the run goes on.
    """

    def __init__(self, epochs: int = 200) -> None:
        if epochs < 1:
            raise UsageError(f"epochs={epochs}: allowed are whole numbers from 1.")
        data = _data("pba_cifar10.json")
        names = data["operations"] * 2
        self.epochs, self.epoch = epochs, 0
        self.starts = [first for first, _ in data["phases"]]
        pairs_FE2 = torch.tensor([vector for _, vector in data["phases"]], device="cpu").view(
            len(self.starts), len(names), 2
        )
        self.probability_FE = pairs_FE2[:, :, 0] / 10
        table = [_pba_magnitudes(name) for name in names]
        self.magnitude_FE = torch.tensor(
            [[table[e][int(level)] for e, level in enumerate(levels)] for levels in pairs_FE2[:, :, 1]],
            dtype=torch.float64,
            device="cpu",
        )
        operations = [get_operation("cutout_centered" if name == "cutout" else name) for name in names]
        self.code_E = torch.tensor([operation.code for operation in operations], device="cpu")
        self.signed_E = torch.tensor([operation.signed for operation in operations], device="cpu")

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Up to two of the 30 entries, in random order: the first ones that are drawn with their probability."""
        if self.epoch < 0:
            raise UsageError(f"epoch={self.epoch}: allowed are whole numbers from 0.")
        at = self.epoch * 200 // self.epochs
        phase = max(i for i, start in enumerate(self.starts) if start <= at)
        how_many = torch.tensor([0.2, 0.3, 0.5], device="cpu")
        most_N = torch.multinomial(how_many, max(n, 1), replacement=True, generator=generator)[:n]
        order_NE = torch.rand(n, len(self.code_E), generator=generator, device="cpu").argsort(dim=1)
        fires_NE = torch.rand(order_NE.shape, generator=generator, device="cpu") < self.probability_FE[phase][order_NE]
        done_NE = fires_NE & (fires_NE.cumsum(dim=1) <= most_N.unsqueeze(1))
        # Done entries come first, in order; there are at most two.
        place_N2 = (~done_NE).byte().argsort(dim=1, stable=True)[:, :2]
        entry_N2, done_N2 = order_NE.gather(1, place_N2), done_NE.gather(1, place_N2)
        magnitude_N2 = self.magnitude_FE[phase][entry_N2]
        return finish_record(self.code_E[entry_N2], magnitude_N2, self.signed_E[entry_N2], done_N2, generator)


def _pba_magnitudes(name: str) -> tuple[float, ...]:
    """The magnitudes of the levels 0..10: every third strength."""
    table = SPACES["autoaugment"].magnitudes | {"posterize": bits(4, 0), "cutout": real(20 / 32)}
    return table[name][::3]


def _data(name: str) -> Any:
    return json.loads((files("inloop.augment") / "data" / name).read_text())
