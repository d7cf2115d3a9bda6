"""Default generators, for users who bring none, and blocks that use no random numbers of the training."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def default_generator(purpose: str) -> torch.Generator:
    """A generator that follows ``torch.manual_seed`` and is independent of other purposes' generators.

    Two generators with the same seed give the same numbers: the index within a source would follow from the source, and
    most of the data would never be drawn.
    """
    digest = hashlib.sha256(f"{purpose} {torch.initial_seed()}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def on_cpu(generator: torch.Generator) -> torch.Generator:
    """The generator, or for one of a device a generator of the CPU with its seed: choices are drawn on the CPU."""
    return generator if generator.device.type == "cpu" else torch.Generator("cpu").manual_seed(generator.initial_seed())


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Give the global generators of torch, NumPy and Python back as they were before the block."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  users' datasets use the global one
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
