"""A mixture's batches as trainers want them: alone, and a fixed number for each epoch."""

from collections.abc import Iterator
from typing import Any

from inloop.errors import UsageError
from inloop.mixture.loader import MixtureLoader


class EpochLoader:
    """Yields ``batches_per_epoch`` batches each time it is iterated; ``loader.use_next()`` must be called before each is trained on.

    It is no ``DataLoader``: trainers that would replace a DataLoader's sampler by their own leave it alone. Examples are drawn by a policy,
    so an epoch is whatever number of batches one likes to call so.
    """

    def __init__(self, loader: MixtureLoader, batches_per_epoch: int) -> None:
        if batches_per_epoch < 1:
            raise UsageError(f"batches_per_epoch={batches_per_epoch}: allowed are whole numbers from 1.")
        self.loader = loader
        self.batches_per_epoch = batches_per_epoch

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self.batches_per_epoch), self.loader.batches(), strict=False):
            yield batch
