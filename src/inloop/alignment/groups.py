"""Which calls are aligned together. A direction is computed for all of a group at once, which takes fewer kernels, and its products share kernels, too.

A group ends when its calls and their parameters have some megabytes: memory is released late by that much.
"""

from collections.abc import Iterator, Mapping, Sequence

from inloop.alignment import sizes
from inloop.alignment.kept import Kept


class Group:
    """Calls that wait for each other.

    Args:
        sizes: The bytes of each parameter, by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._calls: list[Kept] = []
        self._names: set[str] = set()
        self._bytes = 0

    def add(self, call: Kept) -> bool:
        """Add a call. Return whether the group is full."""
        self._calls.append(call)
        for name in call.parameter_names.values():
            if name not in self._names:
                self._names.add(name)
                self._bytes += self._sizes[name]
        self._bytes += call.nbytes
        return self._bytes > sizes.of_device(sizes.GROUP, call.device)

    def take(self) -> list[Kept]:
        """Return the calls, and begin anew."""
        calls, self._calls, self._bytes = self._calls, [], 0
        self._names.clear()
        return calls


def groups_of(calls: Sequence[Kept], sizes: Mapping[str, int]) -> Iterator[list[Kept]]:
    """Divide calls into groups, in their order."""
    group = Group(sizes)
    for call in calls:
        if group.add(call):
            yield group.take()
    if rest := group.take():
        yield rest
