"""Which calls are aligned together. A direction is computed for all of a group at once, which takes fewer kernels, and its products share kernels, too.

A group ends when its calls and their parameters have some megabytes: memory is released late by that much.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from inloop.alignment import sizes
from inloop.alignment.direction import Computed, Direction
from inloop.alignment.kept import Kept


class Group:
    """Calls that wait for each other."""

    def __init__(self) -> None:
        self._calls: list[Kept] = []
        self._names: set[str] = set()
        self._bytes = 0

    def add(self, call: Kept, direction: Direction) -> bool:
        """Add a call that is aligned with ``direction``. Return whether the group is full."""
        self._calls.append(call)
        for name in call.parameter_names.values():
            if name not in self._names:
                self._names.add(name)
                self._bytes += _bytes(direction, name)
        self._bytes += sum([tensor.nbytes for tensor in call.tensors()])
        return self._bytes > sizes.of_device(sizes.GROUP, call.device)

    def take(self) -> list[Kept]:
        """Return the calls, and begin anew."""
        calls, self._calls, self._bytes = self._calls, [], 0
        self._names.clear()
        return calls


def groups_of(calls: Sequence[Kept], direction: Direction) -> Iterator[list[Kept]]:
    """Divide calls into groups, in their order."""
    group = Group()
    for call in calls:
        if group.add(call, direction):
            yield group.take()
    if rest := group.take():
        yield rest


def _bytes(direction: Direction, name: str) -> int:
    while isinstance(direction, Computed):
        direction = direction.raw
    value: Tensor | None = direction.get(name)
    return 0 if value is None else value.nbytes
