"""One data source behind one interface: indexed (a dataset, tensors in memory) or a stream that is read in order."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from inloop.errors import UsageError
from inloop.states import refuse_other_structure

# A source, and an index in it; for a stream the index counts its examples over all passes.
Key = tuple[int, int]


class Source(ABC):
    """A source of examples.

    Attributes:
        name: For messages.
        size: Examples in one pass; None while unknown.
    """

    name: str
    size: int | None

    @abstractmethod
    def choose(self, n: int, generator: torch.Generator) -> Tensor:
        """The positions of the next ``n`` examples."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def refuse_other_state(self, state: Any) -> None:
        """Raise unless a state is one of such a source."""
        own = self.state_dict()
        refuse_other_structure(state, {**own, "size": own["size"] or 0}, f"source {self.name}")


class IndexedSource(Source):
    """A map-style dataset. Examples are drawn with replacement, or by passes that are shuffled anew each time.

    The order of a pass follows from a seed and the number of the pass alone, so the state is three numbers.
    """

    def __init__(self, dataset: Any, passes: torch.Generator | None, name: str = "") -> None:
        self.dataset = dataset
        self.name = name
        self.size: int = len(dataset)
        self.passes = passes is not None
        self.seed = int(torch.randint(2**62, (), generator=passes, device="cpu")) if passes is not None else 0
        self.num_passes = 0
        self.position = 0
        self._order = torch.empty(0, dtype=torch.long, device="cpu")
        self._order_of_pass = -1

    def choose(self, n: int, generator: torch.Generator) -> Tensor:
        if not self.passes:
            # In float64 the product is precise enough for any size, and stays below it.
            return (torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") * self.size).long()
        chosen = []
        while n > 0:
            if self._order_of_pass != self.num_passes:
                shuffler = torch.Generator().manual_seed((self.seed + self.num_passes) % 2**63)
                self._order = torch.randperm(self.size, generator=shuffler, device="cpu")
                self._order_of_pass = self.num_passes
            part = self._order[self.position : self.position + n]
            chosen.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position == self.size:
                self.num_passes, self.position = self.num_passes + 1, 0
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.long, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size, "seed": self.seed, "num_passes": self.num_passes, "position": self.position}

    def refuse_other_state(self, state: Any) -> None:
        super().refuse_other_state(state)
        if self.passes and not (state["size"] == self.size and 0 <= state["position"] < self.size):
            raise UsageError(
                f"The state is of {state['position']} examples into a pass over {state['size']} examples of source {self.name}, which has {self.size} "
                "now. Fix: give the same data, or begin with a new mixture."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.num_passes, self.position = state["seed"], state["num_passes"], state["position"]
        self._order_of_pass = -1


class StreamSource(Source):
    """An iterable, read in order and begun anew at its end. This process reads chosen examples at once."""

    def __init__(self, stream: Iterable[Any], name: str) -> None:
        self.stream = stream
        self.name = name
        self.size: int | None = None
        self.position = 0  # examples chosen so far, over all passes
        self._read = 0  # examples read so far
        self._iterator: Iterator[Any] = iter(())
        self._in_pass = 0
        self._buffer: dict[int, Any] = {}
        self._passed_over: set[int] = set()

    def choose(self, n: int, generator: torch.Generator) -> Tensor:
        positions = torch.arange(self.position, self.position + n, device="cpu")
        self.position += n
        return positions

    def take(self, position: int) -> Any:
        """The example at this position; each can be taken once, in any order."""
        while self._read <= position:
            example = self._next()
            if self._read in self._passed_over:
                self._passed_over.remove(self._read)
            else:
                self._buffer[self._read] = example
            self._read += 1
        return self._buffer.pop(position)

    def pass_over(self, positions: Iterable[int]) -> None:
        """Do not keep the examples at these positions: nobody takes them here."""
        self._passed_over.update(positions)

    def _next(self) -> Any:
        try:
            example = next(self._iterator)
        except StopIteration:
            if self._in_pass:
                self.size = self._in_pass
            self._iterator, self._in_pass = iter(self.stream), 0
            try:
                example = next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"The stream of source {self.name} is empty; every source needs at least one example."
                ) from None
        self._in_pass += 1
        return example

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restart_at(state["position"])
        self.position, self.size = state["position"], state["size"]

    def restart_at(self, position: int) -> None:
        """Read the stream again from its beginning, and pass over the examples before ``position``."""
        self._iterator, self._in_pass, self._read = iter(()), 0, 0
        self._buffer.clear()
        self._passed_over.clear()
        while self._read < position:
            self._next()
            self._read += 1


def as_source(name: str, source: object, passes: torch.Generator | None) -> Source:
    """Wrap a user's source: a map-style dataset, a tuple of tensors, or an iterable; ``passes`` seeds shuffled passes."""
    if isinstance(source, list) and source and all(isinstance(part, Tensor) for part in source):
        raise UsageError(
            f"Source {name} is a list of tensors, which may mean columns or examples. Fix: for columns give a tuple, (x, y)."
        )
    if isinstance(source, tuple) and source and all(isinstance(part, Tensor) for part in source):
        lengths = [len(part) for part in source]
        if len(set(lengths)) != 1:
            raise UsageError(f"The tensors of source {name} are of different lengths: {lengths}.")
        source = TensorDataset(*source)
    if isinstance(source, tuple) and any(isinstance(part, np.ndarray) for part in source):
        raise UsageError(
            f"Source {name} is a tuple with NumPy arrays. Fix: give tensors, (torch.as_tensor(x), torch.as_tensor(y))."
        )
    if isinstance(source, DataLoader):
        raise UsageError(f"Source {name} is a DataLoader, which gives batches. Fix: give its dataset.")
    if isinstance(source, (Tensor, str, Mapping)):
        raise UsageError(f"Source {name} is a {type(source).__name__}. {_ALLOWED}")
    if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
        if not isinstance(source, Iterable):
            raise UsageError(f"Source {name} is a {type(source).__name__}. {_ALLOWED}")
        if iter(source) is source:
            raise UsageError(
                f"Source {name} is a {type(source).__name__}, which can be read only once. Fix: give an object that can be iterated "
                "anew, such as an IterableDataset."
            )
        return StreamSource(source, name)
    if not hasattr(source, "__len__"):
        raise UsageError(f"Source {name}, a {type(source).__name__}, has no len(). {_ALLOWED}")
    if len(source) == 0:
        raise UsageError(f"Source {name} is empty; every source needs at least one example.")
    return IndexedSource(source, passes, name)


_ALLOWED = "Allowed are a map-style dataset (with [index] and len), a tuple of tensors, as (x, y) or (ids,), and an iterable of examples."
