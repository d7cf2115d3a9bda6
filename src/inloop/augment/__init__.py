"""Image augmentation, batched and equal to Pillow: operations, search spaces, learned and fixed policies."""

import inloop.augment.image_operations  # adds the operations  # noqa: F401
from inloop.augment.execution import apply, apply_operation
from inloop.augment.fixed import RandAugment, TrivialAugment, UniformAugment
from inloop.augment.policy import AugmentPolicy
from inloop.augment.published import AutoAugment, FastAutoAugment, PopulationBasedAugment
from inloop.augment.registry import register_operation
from inloop.augment.spaces import SPACES, Space, get_space, make_space
from inloop.augment.transform import Transform

__all__ = [
    "SPACES",
    "AugmentPolicy",
    "AutoAugment",
    "FastAutoAugment",
    "PopulationBasedAugment",
    "RandAugment",
    "Space",
    "Transform",
    "TrivialAugment",
    "UniformAugment",
    "apply",
    "apply_operation",
    "get_space",
    "make_space",
    "register_operation",
]
