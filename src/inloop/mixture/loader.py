"""Batches from a mixture for a training loop; worker processes can read them ahead.

The policy draws choices in this process when a batch is *ordered*; workers only fetch examples and hold no state. So an update of
the policy takes effect after the batches on order (``batches_ahead``); ``StepReport.lag`` counts the updates in between. The state
includes the batches on order: a continued run uses the same batches as an uninterrupted one.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from inloop.errors import UsageError
from inloop.mixture.mixture import Mixture
from inloop.mixture.sources import Key, StreamSource
from inloop.policies import Actions, Discrete, source_policy
from inloop.randomness import default_generator
from inloop.states import refuse_no_state
from inloop.step import Draw

if TYPE_CHECKING:
    from inloop.learner import InLoop


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A batch that is chosen and not used yet; N counts the examples of all processes."""

    draw: Draw
    source_N: Tensor
    position_N: Tensor
    read: dict[int, Any] = field(default_factory=dict)  # examples already read from streams, by place in the batch

    @property
    def mine(self) -> tuple[Tensor, Tensor]:
        """Sources and positions of this process's examples."""
        return self.source_N[self.draw.mine], self.position_N[self.draw.mine]

    def pairs(self) -> list[Key]:
        """Source and position of each example of this process."""
        sources, positions = self.mine
        return list(zip(sources.tolist(), positions.tolist(), strict=True))


class MixtureLoader:
    """Yields ``(actions, batch)``; ``learner.step(loss)`` then takes these actions.

    :meth:`inloop.Mixture.loader` makes it and explains the arguments.
    """

    def __init__(
        self,
        mixture: Mixture,
        learner: "InLoop",
        batch_size: int,
        num_batches: int | None,
        num_workers: int,
        prefetch: int,
        micro_batches: int,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch", prefetch, 1),
            ("micro_batches", micro_batches, 1),
            ("num_batches", 0 if num_batches is None else num_batches, 0),
        ):
            if value < least:
                raise UsageError(f"{name}={value}: allowed are whole numbers from {least}.")
        _refuse_other_number_of_sources(mixture, learner)
        self.mixture = mixture
        self.learner = learner
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.micro_batches = micro_batches
        self.num_ordered = 0
        self.num_yielded = 0
        self._ended = False
        self._on_order: deque[_Order] = deque()
        self._in_step: list[_Order] = []  # the batches of a step that is not over

    def __iter__(self) -> Iterator[tuple[Actions, Any]]:
        if self._ended:
            raise UsageError(
                f"This loader has yielded all of its num_batches={self.num_batches}, which counts over its life, not by epoch. Fix: leave num_batches out and "
                "end an epoch with itertools.islice(loader, n), or make a loader for each epoch."
            )
        for batch in self.batches():
            yield self.use_next(), batch
        self._ended = True

    def __len__(self) -> int:
        """The number of batches still to come."""
        if self.num_batches is None:
            raise TypeError("A loader without num_batches has no end, and no len().")
        return self.num_batches - self.num_yielded

    @property
    def batches_ahead(self) -> int:
        """The number of batches on order during training; an update of the policy takes effect after exactly these."""
        return self.num_workers * self.prefetch

    def use_next(self) -> Actions:
        """Announce the oldest unused batch as the next to train on; returns its actions."""
        order = self._on_order.popleft()
        self._in_step = [*self._in_step, order] if self.learner.num_announced else [order]
        self.learner.use(order.draw)
        self.mixture.count(order.source_N)
        self.num_yielded += 1
        return order.draw.actions

    def batches(self) -> Iterator[Any]:
        """Batches alone, for trainers that fetch ahead; call ``use_next`` before training on each.

        A new iterator begins with the unused batches of the one before.
        """
        if self.num_workers == 0:
            for order in self._orders():
                yield self._fetched(order)
            return
        loader: DataLoader[Any] = DataLoader(
            _Fetch(self.mixture),
            batch_sampler=self._with_streams(),
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch,
            collate_fn=self.mixture.collated,
            # Else each new iterator would draw from torch's generator. Random transforms in workers follow this one, but are not replayed.
            generator=default_generator(f"workers from batch {self.num_yielded} on"),
        )
        yield from loader

    def _orders(self) -> Iterator[_Order]:
        """The batches to fetch; first the batches on order when the loader was left or saved."""
        yield from list(self._on_order)
        while self.num_batches is None or self.num_ordered < self.num_batches:
            plain = self.learner.interleave and (self.num_ordered // self.micro_batches) % 2 == 1
            draw = self.learner.draw(self.batch_size, plain)
            order = _Order(draw, *self.mixture.choose(draw.everyone, draw.mine))
            self._on_order.append(order)
            self.num_ordered += 1
            yield order

    def _fetched(self, order: _Order) -> Any:
        """The batch of an order, fetched in this process."""
        self._read_streams(order)
        if not order.read:
            return self.mixture.batch(*order.mine)
        pairs = enumerate(order.pairs())
        return self.mixture.collated(
            [order.read[place] if place in order.read else self.mixture.fetch(key) for place, key in pairs]
        )

    def _with_streams(self) -> Iterator[list[Any]]:
        """The orders for workers. This process reads the streams, in order; their examples only pass through a worker."""
        for order in self._orders():
            self._read_streams(order)
            yield [order.read.get(place, _Index(*key)) for place, key in enumerate(order.pairs())]

    def _read_streams(self, order: _Order) -> None:
        """Read each example only once: a new iterator may fetch the batch again."""
        for place, key in enumerate(order.pairs()):
            if isinstance(self.mixture.sources[key[0]], StreamSource) and place not in order.read:
                order.read[place] = self.mixture.fetch(key)

    def state_dict(self, within_step: bool = False) -> dict[str, Any]:
        """The position, the batches on order, and the mixture's state; save it together with the learner's, between two steps.

        It is the same in all processes that train together.

        Args:
            within_step: Allow it between the micro-batches of a step, too; a continued run uses them again.
        """
        if self.learner.num_announced and not within_step:
            raise UsageError(
                "The loader was saved between a batch and its learner.step. Fix: save after learner.step(loss)."
            )
        begun = self._in_step if self.learner.num_announced else []
        mixture = self.mixture.state_dict()
        for order in begun:
            mixture["drawn"] -= torch.bincount(order.source_N, minlength=len(self.mixture.sources))
        return {
            "mixture": mixture,
            "num_ordered": self.num_ordered,
            "num_yielded": self.num_yielded - len(begun),
            "on_order": [
                {"draw": order.draw.state_dict(), "source": order.source_N, "position": order.position_N}
                for order in (*begun, *self._on_order)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; iterate anew afterwards."""
        refuse_no_state(state, self.state_dict(within_step=True), "MixtureLoader")
        self.mixture.load_state_dict(state["mixture"])
        self.num_ordered, self.num_yielded, self._ended = state["num_ordered"], state["num_yielded"], False
        self._on_order = deque(
            _Order(Draw.restored(self.learner.policy, saved["draw"]), saved["source"], saved["position"])
            for saved in state["on_order"]
        )
        for number, source in enumerate(self.mixture.sources):
            if isinstance(source, StreamSource):
                waiting = [int(p) for order in self._on_order for p in order.position_N[order.source_N == number]]
                source.restart_at(min(waiting, default=source.position))
        for order in self._on_order:
            self.mixture.leave_to_others(order.source_N, order.position_N, order.draw.mine)


@dataclass(frozen=True, slots=True)
class _Index:
    source: int
    position: int


class _Fetch(Dataset[Any]):
    """The sources in a worker. It receives an index, or an example already read from a stream."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def __getitem__(self, item: Any) -> Any:
        return self.mixture.fetch((item.source, item.position)) if isinstance(item, _Index) else item


def _refuse_other_number_of_sources(mixture: Mixture, learner: "InLoop") -> None:
    chooser = source_policy(learner.policy)
    if isinstance(chooser, Discrete) and chooser.num_choices != len(mixture.sources):
        raise UsageError(
            f"The policy chooses among {chooser.num_choices} sources, the mixture has {len(mixture.sources)}. Fix: make them equal."
        )
