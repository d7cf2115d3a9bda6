"""Kinds of sources that no threshold of the default was set on: written after the rule was fixed, run once, on the test data.

One of ten splits is wrong, or three of ten look different; network, optimizer and steps are those of the other settings.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from problems import GROUP_NORM, JUDGES, TRAINED, K, Problem, Training, adamw, conv, different, image_problem, splits
from torch import Tensor, nn

from inloop_lab.data.images import ImageData
from inloop_lab.data.named import load_data

CAT, DOG = 3, 5
CIFAR100 = Training(partial(conv, lambda channels: nn.GroupNorm(8, channels), classes=100), adamw, 128, 600)


@cache
def cifar100() -> ImageData:
    return load_data("cifar100")


def exchanged(seed: int, final: bool) -> Problem:
    """Cats are called dogs, and dogs cats."""
    _, parts = splits(torch.Generator().manual_seed(seed))
    x, y = parts[0]
    parts[0] = x, torch.where(y == CAT, DOG, torch.where(y == DOG, CAT, y))
    return image_problem(GROUP_NORM, parts, final, wrong=(0,))


def other_images(seed: int, final: bool) -> Problem:
    """Images of CIFAR-100, ten classes of it under each label."""
    _, parts = splits(torch.Generator().manual_seed(seed))
    data = cifar100()
    parts[0] = data.train_x[: TRAINED // K], data.train_y[: TRAINED // K] % 10
    return image_problem(GROUP_NORM, parts, final, wrong=(0,))


def hundred_classes(seed: int, final: bool) -> Problem:
    """CIFAR-100; 40% of the labels of one split are drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    data = cifar100()
    parts = [(data.train_x[r], data.train_y[r]) for r in torch.randperm(TRAINED, generator=generator).chunk(K)]
    x, y = parts[0]
    is_wrong = torch.rand(len(y), generator=generator) < 0.4
    parts[0] = x, torch.where(is_wrong, torch.randint(100, y.shape, generator=generator), y)
    problem = image_problem(CIFAR100, parts, final, wrong=(0,))
    judge = data.train_x[TRAINED:JUDGES], data.train_y[TRAINED:JUDGES]
    return Problem(**{**vars(problem), "judges": [judge], "tests": {"test": (data.test_x, data.test_y)}})


def inverted(x: Tensor) -> Tensor:
    return 255 - x


def covered(x: Tensor) -> Tensor:
    """A grey square covers a quarter of the image."""
    x = x.clone()
    x[:, :, 8:24, 8:24] = 128
    return x


UNSEEN: dict[str, Callable[[int, bool], Problem]] = {
    "n cats and dogs": exchanged,
    "n other images": other_images,
    "n hundred classes": hundred_classes,
    "n inverted": different(inverted),
    "n covered": different(covered),
}
