"""A mixture of data sources that a policy draws from. Axes: N examples of a batch, K sources."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from inloop.errors import UsageError
from inloop.policies import Actions

Source = Dataset[Any] | tuple[Tensor, ...]


class Mixture:
    """Draws, for each example, uniformly with replacement from the source that its action names.

    Args:
        sources: For each source a map-style dataset or a tuple of tensors with examples on their first axis.
        generator: The source of all draws; by default one that is seeded with torch's seed.

    Example:
        >>> easy = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
        >>> hard = (torch.ones(6, 2), torch.ones(6, dtype=torch.long))
        >>> x, y = Mixture([easy, hard]).draw(torch.tensor([0, 1, 1]))
        >>> y
        tensor([0, 1, 1])
    """

    def __init__(self, sources: Sequence[Source], generator: torch.Generator | None = None) -> None:
        if len(sources) < 2:
            raise UsageError(f"A mixture needs at least 2 sources; got {len(sources)}.")
        self.sources = [TensorDataset(*source) if isinstance(source, tuple) else source for source in sources]
        self.sizes_K = torch.tensor([len(cast(Any, source)) for source in self.sources])
        if not bool((self.sizes_K > 0).all()):
            raise UsageError(f"Every source needs at least one example; the sizes are {self.sizes_K.tolist()}.")
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())

    def draw(self, actions: Actions) -> Any:
        """A batch with example i from source ``actions[i]``, collated as by a DataLoader.

        Args:
            actions: Sources, shape [N], or a dict of choices with the entry "source".
        """
        source_N = cast(Tensor, actions if isinstance(actions, Tensor) else actions["source"])
        if len(source_N) and not 0 <= int(source_N.min()) <= int(source_N.max()) < len(self.sources):
            raise UsageError(
                f"The actions name sources {int(source_N.min())} to {int(source_N.max())}; there are 0 to {len(self.sources) - 1}."
            )
        # In float64 the product is exact enough for any source that fits in memory, and below its size.
        uniform_N = torch.rand(len(source_N), generator=self.generator, dtype=torch.float64)
        index_N = (uniform_N * self.sizes_K[source_N]).long()
        used = sorted(set(source_N.tolist())) or [0]
        batches = [self._fetch(source, index_N[source_N == source]) for source in used]
        # The batches come source by source; put the examples back in the order of the actions.
        position_N = torch.argsort(torch.argsort(source_N, stable=True))
        return tree_map(lambda *parts: torch.cat(parts)[position_N], *batches)

    def _fetch(self, source: int, index_n: Tensor) -> Any:
        dataset = cast(Any, self.sources[source])
        if isinstance(dataset, TensorDataset):
            return [tensor[index_n] for tensor in dataset.tensors]
        return default_collate([dataset[index] for index in index_n.tolist()])
