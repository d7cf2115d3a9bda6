"""Runs functions in processes of their own, several at a time: one that is killed, or takes too long, ends no other."""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

GIGABYTES = 8
CHUNK = 1 << 16
PATIENCE = 3
Row = dict[str, Any]
Send = Callable[[Row], None]


@dataclass
class Child:
    """A process, and what it has sent so far.

    Attributes:
        reader: The end of the pipe to read from.
        end: When it is killed, by ``time.monotonic``.
    """

    task: Any
    process: int
    reader: int
    start: float
    end: float
    sent: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Keep what has arrived; return whether there may be more."""
        chunk = os.read(self.reader, CHUNK)
        self.sent += chunk
        return bool(chunk)

    def finish(self) -> Row:
        """Kill the process, and return all complete parts that it sent, with its time, by the clock and of the processor."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        used = os.wait4(self.process, 0)[2]
        os.close(self.reader)
        row: Row = {}
        for line in self.sent.split(b"\n")[:-1]:
            row |= json.loads(line)
        seconds = {"total_seconds": time.monotonic() - self.start, "processor_seconds": used.ru_utime + used.ru_stime}
        return row | {name: round(value, 1) for name, value in seconds.items()}


def results(
    tasks: Iterable[Any], run: Callable[[Any, Send], None], workers: int, seconds: int
) -> Iterator[tuple[Any, Row]]:
    """The tasks with what they sent, as they end.

    Args:
        run: Called in a process of its own with a task and a function that sends a part of its result.
        seconds: After how many of the processor a task is killed, or after three times as many by the clock: other jobs may run.
    """
    waiting, running = iter(tasks), list[Child]()
    more = True
    while True:
        while more and len(running) < workers:
            task = next(waiting, None)
            more = task is not None
            if more:
                running.append(_started(task, run, seconds))
        if not running:
            return
        patience = max(0.0, min(child.end for child in running) - time.monotonic())
        ready = select.select([child.reader for child in running], [], [], patience)[0]
        now = time.monotonic()
        for child in list(running):
            if (child.reader in ready and not child.read()) or now >= child.end:
                running.remove(child)
                yield child.task, child.finish()


def _started(task: Any, run: Callable[[Any, Send], None], seconds: int) -> Child:
    reader, writer = os.pipe()
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with suppress(BaseException), os.fdopen(writer, "w") as pipe:
            run(task, lambda part: print(json.dumps(part), file=pipe, flush=True))
        os._exit(0)
    os.close(writer)
    return Child(task, process, reader, start, start + PATIENCE * seconds)
