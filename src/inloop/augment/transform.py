"""A drop-in transform for one image in an existing pipeline."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from inloop.augment.execution import apply
from inloop.errors import UsageError


class ChoosesOperations(Protocol):
    """Anything that chooses operations for n images, such as the policies of this package."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Any: ...


class Transform:
    """Augments one image, PIL or tensor, by a policy: for ``torchvision.transforms.Compose`` and the like.

    It draws from torch's own random numbers, which ``DataLoader`` seeds in each worker, unless it has a generator. A learned
    policy must draw in the main process, where its learner sees the choices: use :func:`~inloop.augment.apply` on
    whole batches there.

    Args:
        policy: Anything with ``sample(n, generator)``.
        generator: Not for workers: each would have a copy, and they would all draw the same.

    Example:
        >>> from inloop.augment import TrivialAugment
        >>> transform = Transform(TrivialAugment())
        >>> transform(torch.randint(256, (3, 32, 32), dtype=torch.uint8)).shape
        torch.Size([3, 32, 32])
    """

    def __init__(self, policy: ChoosesOperations, generator: torch.Generator | None = None) -> None:
        if isinstance(policy, type) or not callable(getattr(policy, "sample", None)):
            raise UsageError(f"Transform takes a policy with sample(n, generator); got {policy!r}.")
        self.policy = policy
        self.generator = generator

    def __call__(self, image: Any) -> Any:
        """An image of the same kind: PIL (RGB or L), or uint8 [C, H, W], or a batch of those [N, C, H, W]."""
        if self.generator is not None and get_worker_info() is not None:
            raise UsageError(
                "A Transform with a generator would do the same in every worker and epoch. Fix: make it without one."
            )
        if isinstance(image, Tensor):
            images = image if image.ndim == 4 else image.unsqueeze(0)
            new = apply(images, self.policy.sample(len(images), self.generator))
            return new if image.ndim == 4 else new.squeeze(0)
        return _to_pil(self(_from_pil(image)), image)

    def __repr__(self) -> str:
        return f"Transform({type(self.policy).__name__})"


def _from_pil(image: Any) -> Tensor:
    if getattr(image, "mode", None) not in ("RGB", "L"):
        got = f"a PIL image of mode {image.mode}" if hasattr(image, "mode") else type(image).__name__
        raise UsageError(
            f"Transform got {got}. Fix: give a PIL image of mode RGB or L (image.convert('RGB')) or a uint8 tensor."
        )
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def _to_pil(image: Tensor, like: Any) -> Any:
    from PIL import Image  # only for PIL images

    array = image.numpy() if like.mode == "RGB" else image[0].numpy()
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)) if like.mode == "RGB" else array)
