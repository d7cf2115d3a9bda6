"""What is known of the sources that a policy chooses among: names, sizes and labels."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from inloop.errors import UsageError


class Sources(Protocol):
    """A mixture, as far as a policy needs it."""

    @property
    def names(self) -> Sequence[str]: ...

    def sizes(self) -> Sequence[int | None]: ...

    def label_counts(self) -> Sequence[Tensor | None]: ...


class SourceInfo:
    """Names, sizes and labels of K sources.

    Copies of a policy share it, and pickles have the names only: it may refer to a whole mixture.
    """

    def __init__(self, names: Sequence[str], mixture: Sources | None = None) -> None:
        self.names = list(names)
        self._mixture = mixture

    @classmethod
    def of(cls, sources: object) -> "SourceInfo":
        """Of a number of sources, of a mixture, or of an info itself."""
        if isinstance(sources, SourceInfo):
            return sources
        if hasattr(sources, "names") and hasattr(sources, "label_counts"):
            mixture = cast(Sources, sources)
            return cls(mixture.names, mixture)
        return cls([str(number) for number in range(count_sources(sources))])

    def __len__(self) -> int:
        return len(self.names)

    def sizes(self) -> Sequence[int | None]:
        """The number of examples of each source; None if it is not known."""
        return [None] * len(self) if self._mixture is None else self._mixture.sizes()

    def label_counts(self) -> Sequence[Tensor | None]:
        """How often each label occurs in each source, [C]; None if that is not known."""
        return [None] * len(self) if self._mixture is None else self._mixture.label_counts()

    def in_order(self, what: str, numbers: Mapping[str, float]) -> list[float]:
        """Numbers that are given by the names of the sources, in the order of the sources."""
        if numbers.keys() != set(self.names):
            raise UsageError(
                f"{what}= is given for {', '.join(map(str, numbers))}; the sources are {', '.join(self.names)}. Fix: give one number for each of them."
            )
        return [numbers[name] for name in self.names]

    def __deepcopy__(self, memo: Any) -> "SourceInfo":
        return self

    def __reduce__(self) -> Any:
        return SourceInfo, (self.names,)


def count_sources(num_sources: object) -> int:
    """The number of sources, at least 2."""
    try:
        count = operator.index(num_sources)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 2:
        got = num_sources if isinstance(num_sources, int | float) else f"a {type(num_sources).__name__}"
        raise UsageError(
            f"num_sources={got}: allowed are whole numbers from 2, and a Mixture of the sources; with one source there is nothing to learn."
        )
    return count
