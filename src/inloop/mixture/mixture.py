"""A mixture of data sources that a policy draws from. Axes: N examples of a batch, K sources."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate

from inloop.errors import UsageError
from inloop.policies import Actions
from inloop.randomness import default_generator

Source = Dataset[Any] | tuple[Tensor, ...]


class Mixture:
    """Draws, for each example, uniformly with replacement from the source that its action names.

    Args:
        sources: For each source a map-style dataset or a tuple of tensors with examples on their first axis.
        generator: The source of all draws; by default one that follows torch's seed.
        collate: Makes a batch of a list of examples, as in a DataLoader.

    Example:
        >>> easy = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
        >>> hard = (torch.ones(6, 2), torch.ones(6, dtype=torch.long))
        >>> x, y = Mixture([easy, hard]).draw(torch.tensor([0, 1, 1]))
        >>> y
        tensor([0, 1, 1])
    """

    def __init__(
        self,
        sources: Sequence[Source],
        generator: torch.Generator | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if len(sources) < 2:
            raise UsageError(f"A mixture needs at least 2 sources; got {len(sources)}.")
        self.sources = [_as_dataset(position, source) for position, source in enumerate(sources)]
        self.sizes_K = torch.tensor([len(cast(Any, source)) for source in self.sources])
        if not bool((self.sizes_K > 0).all()):
            raise UsageError(f"Every source needs at least one example; the sizes are {self.sizes_K.tolist()}.")
        self.collate = collate
        self.generator = generator or default_generator("drawing from sources")

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
        if all(isinstance(source, TensorDataset) for source in self.sources):
            return self._gather(source_N, index_N)
        pairs = zip(source_N.tolist(), index_N.tolist(), strict=True)
        # One source may have numbers where another has tensors: a label, for example.
        return self.collate([tree_map_only((int, float), torch.as_tensor, self.sources[s][i]) for s, i in pairs])

    def _gather(self, source_N: Tensor, index_N: Tensor) -> list[Tensor]:
        """The same for sources in memory: one indexing for each source and tensor."""
        used = sorted(set(source_N.tolist())) or [0]
        parts = [[tensor[index_N[source_N == source]] for tensor in self.sources[source].tensors] for source in used]
        # They come source by source; put the examples back in the order of the actions.
        position_N = torch.argsort(torch.argsort(source_N, stable=True))
        return [torch.cat(columns)[position_N] for columns in zip(*parts, strict=True)]


def _as_dataset(position: int, source: object) -> Any:
    if isinstance(source, (tuple, list)) and source and all(isinstance(part, Tensor) for part in source):
        return TensorDataset(*source)
    if isinstance(source, (Tensor, str)) or not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(
            f"Source {position} is a {type(source).__name__}. Allowed are a map-style dataset (with [index] and len) and a tuple "
            "of tensors, as (x, y)."
        )
    return source
