"""Default generators, for users who bring none."""

import hashlib

import torch


def default_generator(purpose: str) -> torch.Generator:
    """A generator that follows ``torch.manual_seed`` and is independent of other purposes' generators.

    Two generators with the same seed give the same numbers: the index within a source would follow from the source, and
    most of the data would never be drawn.
    """
    digest = hashlib.sha256(f"{purpose} {torch.initial_seed()}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
