"""The smallest model of every family of timm, that is of every module of timm.models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import timm
import torch
from torch import nn
from trial import BATCH, Batch, Inputs

SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "tiny",
    "xxs",
    "_xs",
    "mini",
    "_s0",
    "_t0",
    "_b0",
    "_m0",
    "_a0",
    "050",
    "_18",
    "small",
    "_s",
)
CLASSES, LARGE = 10, 12_000_000
LOOKED_AT = 12  # models of a family
Attempt = tuple[str, Callable[[], tuple[nn.Module, Sequence[Inputs]]]]


class Images:
    """Random images of one size."""

    def __init__(self, channels: int, size: int) -> None:
        self.shape = channels, size, size

    def __call__(self, seed: int) -> Batch:
        return {"x": torch.randn(BATCH, *self.shape, generator=torch.Generator().manual_seed(seed))}

    def learn(self, error: str) -> bool:
        return False

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


def families() -> list[str]:
    return timm.list_modules()


def attempts(family: str) -> Iterator[list[Attempt]]:
    """Ways to build the smallest model: with two blocks if it is large, for small images if it can be told their size, else as it is."""
    name, count = smallest(family)
    for depth in ({"depth": 2}, {"layers": (1, 1, 1, 1)}, {}) if count > LARGE else ({},):
        for size in (64, 128):
            for told in ({"img_size": size}, {}):
                options = depth | told
                label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
                yield [(label, lambda size=size, options=options: _model(name, size, **options))]
    size = timm.create_model(name, pretrained=False).default_cfg["input_size"][-1]
    yield [(name, lambda: _model(name, size))]


def _model(name: str, size: int, **options: Any) -> tuple[nn.Module, Sequence[Inputs]]:
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model, [Images(model.default_cfg["input_size"][0], size)]


def smallest(family: str) -> tuple[str, int]:
    """The model with the fewest parameters, among those that are named like small ones, and their number."""
    names = timm.list_models(module=family)
    ranked = sorted(
        names, key=lambda name: min([rank for rank, mark in enumerate(SMALL) if mark in name], default=len(SMALL))
    )
    sizes = {}
    for name in ranked[:LOOKED_AT]:
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False)
            sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        except Exception:
            continue  # some compute with their weights when they are built
    name = min(sizes, key=sizes.__getitem__) if sizes else ranked[0]
    return name, sizes.get(name, 0)
