"""What a test can see of the device: where the host waits for it, where its streams race, and what fails in a graph's capture."""

import ctypes
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
_NOT_SHOWN = {"torch", "pytest", "_pytest", "pluggy", "xdist", "execnet", "contextlib.py", Path(__file__).parent.name}
_DEPTH = 8  # frames of a stack to show

_library: ctypes.CDLL


@dataclass(frozen=True)
class Event:
    """Something that happened on the device, and the Python code that made it happen, the last call last."""

    what: str
    stack: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join((self.what, *(self.stack or ("(no Python code: inside of a backward pass)",))))


class Events(list[Event]):
    """Events in their order; printed, all of them with their stacks."""

    def __str__(self) -> str:
        return "\n".join(f"{number}. {event}" for number, event in enumerate(self, start=1)) or "none"


class _Watcher:
    """Listens to the library while events are collected."""

    def __init__(self) -> None:
        self.waits: list[Events] = []
        self.races: list[Events] = []
        self.warns = False
        self._freed: dict[int, tuple[str, ...]] = {}
        self.callback = _OBSERVER(self._hear)

    def _hear(self, kind: bytes, text: bytes, number: int) -> None:
        stack = _stack()
        if kind == b"wait":
            for events in self.waits:
                events.append(Event(text.decode(), stack))
            if self.warns and not text.startswith(b"synchronize"):  # as torch: not if it is asked for by that name
                warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        elif kind == b"free":
            self._freed[number] = stack
        else:
            where = f", freed at {self._freed.pop(number, ('?',))[-1]}" if number >= 0 else ""
            for events in self.races:
                events.append(Event(text.decode() + where, stack))

    def update(self) -> None:
        """Listen as long as anybody wants to know: calls into Python take time."""
        is_wanted = bool(self.waits or self.races or self.warns)
        _library.pretend_watch_races(bool(self.races))
        _library.pretend_observe(self.callback if is_wanted else _OBSERVER())


_watcher = _Watcher()


def connect(library: ctypes.CDLL) -> None:
    global _library
    _library = library


def _stack() -> tuple[str, ...]:
    frames = traceback.extract_stack()
    own = [frame for frame in frames if frame.filename[0] != "<" and not _NOT_SHOWN & set(Path(frame.filename).parts)]
    return tuple(f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in own[-_DEPTH:])


@contextmanager
def _collected(into: list[Events]) -> Iterator[Events]:
    events = Events()
    into.append(events)
    _watcher.update()
    try:
        yield events
    finally:
        into[:] = [others for others in into if others is not events]  # equal lists are not the same
        _watcher.update()


def host_synchronisations() -> AbstractContextManager[Events]:
    """Collect where the host waits for the device inside of the block.

    It waits to read a number (``item``, ``bool``, ``float``, ``equal``), for copies from and to the CPU (unless they are non-blocking and the memory
    is pinned, or is small and copied to the device), for results whose shape depends on values (``nonzero``, masks as indices, ``unique``,
    ``bincount``), and to synchronize with a stream, an event or the device. That the host reads pinned memory too early is not seen.
    """
    return _collected(_watcher.waits)


def races() -> AbstractContextManager[Events]:
    """Collect races of streams inside of the block.

    A race is a use of memory that another stream writes, or a write to memory that another stream uses, if neither stream has waited for the
    other; and memory that its stream gets again while another stream may still use it. Memory from before the block has no history.
    """
    return _collected(_watcher.races)


def set_sync_debug_mode(mode: int) -> None:
    """``torch.cuda.set_sync_debug_mode``: 0 for nothing, 1 to warn where the host waits."""
    _watcher.warns = mode == 1
    _watcher.update()


@contextmanager
def graph_capture() -> Iterator[None]:
    """Pretend that the current stream captures a graph: as in CUDA, an error where the host would wait for the device."""
    _library.pretend_capture(True)
    try:
        yield
    finally:
        _library.pretend_capture(False)
