"""Generators for those who do not bring their own."""

import hashlib

import torch


def default_generator(purpose: str) -> torch.Generator:
    """A generator that follows ``torch.manual_seed`` and is independent of those for other purposes.

    Two generators with the same seed give the same numbers: a source and the index within it would go hand in hand, and
    most of the data would never be drawn.
    """
    digest = hashlib.sha256(f"{purpose} {torch.initial_seed()}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
