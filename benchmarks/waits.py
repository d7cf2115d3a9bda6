"""Kernels, and waits of the host, on the pretend CUDA device of the tests, as one line of JSON.

python -m benchmarks.waits
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.device.pretend_cuda.loading import load

load()  # before torch is imported

from tests.device.pretend_cuda.watching import host_synchronisations  # noqa: E402

from inloop_lab.bench.overhead import MODELS, Waits, measure_model  # noqa: E402


@contextmanager
def counted() -> Iterator[Waits]:
    waits = Waits()
    with host_synchronisations() as events:
        yield waits
    waits.number = len(events)


if __name__ == "__main__":
    print(json.dumps([measure_model(model, tells, counted) for model in MODELS for tells in (False, True)]))
