"""A mixture of data sources that a policy draws from. Axes: N examples of a batch, K sources."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from inloop.distributed import begin_alike, gather_counts, gather_rows, rank, world_size
from inloop.errors import UsageError
from inloop.mixture.batches import collated, gathered, tensors_alike, with_tensors
from inloop.mixture.labels import label_counts
from inloop.mixture.sources import IndexedSource, Key, StreamSource, as_source
from inloop.policies import Actions, source_of
from inloop.randomness import default_generator, on_cpu, untouched_generators
from inloop.states import refuse_no_state

if TYPE_CHECKING:
    from inloop.learner import InLoop
    from inloop.mixture.loader import MixtureLoader

log = logging.getLogger("inloop")


class Mixture:
    """Draws, for each example, from the source that its action names.

    Processes that train together (torch.distributed) each make the same mixture and draw together: they share out the examples that a
    single process would draw.

    Args:
        sources: A list, or a dict with their names, of map-style datasets, tuples of tensors with examples on their first axis, or iterables.
        selection: How examples are picked within a source: "replacement" (each draw uniform, the paper) or "passes" (every
            example once, in an order that is shuffled anew for each pass). Iterables are read in their own order.
        generator: The generator of all draws; by default one that follows torch's seed. (Mixtures made after one ``torch.manual_seed`` draw
            the same: for repeats in one process, seed before each, or give generators.)
        collate: Makes a batch of a list of examples, as in a DataLoader.

    Attributes:
        names: Names of the sources, in the order of their numbers, which are the actions; by default the numbers.

    Example:
        >>> easy = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
        >>> hard = (torch.ones(6, 2), torch.ones(6, dtype=torch.long))
        >>> x, y = Mixture([easy, hard]).draw(torch.tensor([0, 1, 1]))
        >>> y
        tensor([0, 1, 1])
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        selection: Literal["replacement", "passes"] = "replacement",
        generator: torch.Generator | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not isinstance(sources, (Sequence, Mapping)) or isinstance(sources, str) or len(sources) < 2:
            got = f"{len(sources)}" if isinstance(sources, (list, tuple, dict)) else f"a {type(sources).__name__}"
            raise UsageError(f"A mixture needs a list, or a dict with names, of at least 2 sources; got {got}.")
        named = dict(sources.items() if isinstance(sources, Mapping) else enumerate(sources))
        self.names = [str(name) for name in named]
        if selection not in ("replacement", "passes"):
            raise UsageError(f"selection={selection!r}: allowed are 'replacement' and 'passes'.")
        self.generator = on_cpu(generator) if generator else default_generator("drawing from sources")
        passes = self.generator if selection == "passes" else None
        self.sources = [
            as_source(name, source, passes) for name, source in zip(self.names, named.values(), strict=True)
        ]
        self.collate = collate
        self.drawn_K = torch.zeros(len(self.sources), dtype=torch.long, device="cpu")
        self._num_processes = 1  # the processes that draw together
        self._tensors_K = tensors_alike(self.sources)
        self._warned_of_unused = False
        self._label_counts: list[Tensor | None] | None = None

    def draw(self, actions: Actions) -> Any:
        """A batch with example i from source ``actions[i]``, collated as by a DataLoader.

        Args:
            actions: The sources of this process's examples, shape [N], or a dict of choices with the entry "source".
        """
        source_n = _sources_of(actions, len(self.sources))
        counts = gather_counts(len(source_n))
        start = sum(counts[: rank()])
        mine = slice(start, start + len(source_n))
        source_N, position_N = self.choose(gather_rows(source_n, counts), mine)
        self.count(source_N)
        self._warn_of_unused()
        return self.batch(source_N[mine], position_N[mine])

    def batch(self, source_N: Tensor, position_N: Tensor) -> Any:
        """The batch of these examples."""
        if self._tensors_K and self.collate is default_collate:  # in memory: one gather for each source
            return gathered(self._tensors_K, source_N, position_N)
        return self.collated([self.fetch(key) for key in zip(source_N.tolist(), position_N.tolist(), strict=True)])

    def collated(self, examples: list[Any]) -> Any:
        """The batch of examples that may come from different sources."""
        return collated(examples, self.collate)

    def choose(self, actions: Actions, mine: slice) -> tuple[Tensor, Tensor]:
        """Source and position of each example, for all processes: two tensors of shape [N].

        Args:
            mine: The examples that this process fetches.
        """
        self._join_others()
        source_N = _sources_of(actions, len(self.sources))
        position_N = torch.empty_like(source_N)
        for number, source in enumerate(self.sources):
            here = source_N == number
            position_N[here] = source.choose(int(here.sum()), self.generator)
        self.leave_to_others(source_N, position_N, mine)
        return source_N, position_N

    def _join_others(self) -> None:
        """Take over the first process's random state and orders of passes, before the first common draw."""
        if self._num_processes == world_size():
            return
        self._num_processes = world_size()
        begin_alike(self.generator)
        indexed = [source for source in self.sources if isinstance(source, IndexedSource)]
        seeds = gather_rows(torch.tensor([[source.seed for source in indexed]], device="cpu"), [1] * world_size())[0]
        for source, seed in zip(indexed, seeds.tolist(), strict=True):
            source.load_state_dict(source.state_dict() | {"seed": seed})

    def leave_to_others(self, source_N: Tensor, position_N: Tensor, mine: slice) -> None:
        """Pass over the streams' examples that other processes fetch."""
        for number, source in enumerate(self.sources):
            if isinstance(source, StreamSource):
                theirs_N = source_N == number
                theirs_N[mine] = False
                source.pass_over(position_N[theirs_N].tolist())

    def count(self, source_N: Tensor) -> None:
        """Count examples as used, for the effective epochs."""
        self.drawn_K += torch.bincount(source_N, minlength=len(self.sources))

    def _warn_of_unused(self) -> None:
        """Warn of a policy with fewer choices than there are sources: it never names the last ones.

        Any other source that is never drawn has a share of zero on purpose, as in an oracle's fixed mixture.
        """
        if self._warned_of_unused or self.drawn_K.sum() < 50 * len(self.sources):
            return
        self._warned_of_unused = True
        num_named = int(self.drawn_K.nonzero().max()) + 1
        if num_named < len(self.sources):
            log.warning(
                "inloop: of the first %d examples none came from source %s; there are %d sources, and the policy seems to choose among %d. Fix: "
                "MixturePolicy(num_sources=%d), unless the shares of these sources are meant to be zero",
                int(self.drawn_K.sum()),
                ", ".join(self.names[num_named:]),
                len(self.sources),
                num_named,
                len(self.sources),
            )

    def fetch(self, key: Key) -> Any:
        """One example; for the default collate a number in it becomes a tensor, since other sources may have a tensor there."""
        source = self.sources[key[0]]
        example = (
            source.take(key[1]) if isinstance(source, StreamSource) else cast(IndexedSource, source).dataset[key[1]]
        )
        return with_tensors(example) if self.collate is default_collate else example

    def sizes(self) -> list[int | None]:
        """The number of examples of each source; None for a stream that has not ended yet."""
        return [source.size for source in self.sources]

    def label_counts(self) -> list[Tensor | None]:
        """How often each label occurs in each source, [C]; None where there are none.

        A label is an integer, or a tensor of integers, in the last entry of an example that is a tuple, or in the entry "labels" or "label"
        of one that is a dict; negative labels do not count. Up to 1,000 examples of each source are read, once, without using up random numbers.
        """
        if self._label_counts is None:
            with untouched_generators():
                self._label_counts = [label_counts(source) for source in self.sources]
        return self._label_counts

    def effective_epochs(self) -> Tensor:
        """How often each source was seen, in passes over it, shape [K]; nan for a stream that has not ended yet."""
        return self.drawn_K / torch.tensor([torch.nan if size is None else size for size in self.sizes()], device="cpu")

    def loader(
        self,
        learner: "InLoop",
        batch_size: int,
        *,
        num_batches: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        micro_batches: int = 1,
    ) -> "MixtureLoader":
        """Batches for a training loop: ``for actions, batch in mixture.loader(learner, 256, num_workers=2)``.

        Args:
            batch_size: Examples in each (micro-)batch; with several processes, of this one.
            num_batches: Batches to yield over the loader's life (not by epoch), resumed runs included; None for no end.
            num_workers: Processes that fetch examples; 0 to fetch in this one.
            prefetch: Batches on order for each worker.
            micro_batches: Batches for each step, if gradients are accumulated (it matters with ``interleave=True`` only).
        """
        from inloop.mixture.loader import MixtureLoader

        return MixtureLoader(self, learner, batch_size, num_batches, num_workers, prefetch, micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """The random state, and the position in each source."""
        return {
            "generator": self.generator.get_state(),
            "drawn": self.drawn_K.clone(),
            "sources": [source.state_dict() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        refuse_no_state(state, self.state_dict(), "Mixture")
        if len(state["sources"]) != len(self.sources):
            raise UsageError(
                f"The state is of a mixture of {len(state['sources'])} sources; this one has {len(self.sources)}. Fix: make the mixture of the same sources."
            )
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.refuse_other_state(saved)
        state = tree_map_only(Tensor, Tensor.cpu, state)
        self.generator.set_state(state["generator"])
        self.drawn_K.copy_(state["drawn"])
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(saved)


def _sources_of(actions: Actions, num_sources: int) -> Tensor:
    source_N = source_of(actions)
    if len(source_N) and not 0 <= int(source_N.min()) <= int(source_N.max()) < num_sources:
        raise UsageError(
            f"The actions name sources {int(source_N.min())} to {int(source_N.max())}; there are 0 to {num_sources - 1}. Fix: "
            f"MixturePolicy(num_sources={num_sources})."
        )
    return source_N.long().cpu()
