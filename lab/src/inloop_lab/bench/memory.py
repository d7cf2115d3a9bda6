"""Peak memory of live tensors during a step, on the CPU: the memory of torch's allocator, without the interpreter."""

from collections.abc import Callable

import torch

_MARK = "inloop: measured from here"


def peak_bytes(make_step: Callable[[], Callable[[], None]], warmup: int = 4, steps: int = 2) -> int:
    """The largest memory in use at any moment of ``steps`` steps, model and optimizer included.

    The profiler is on when the step is made: torch does not report freed memory whose allocation it did not see.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = make_step()
        for _ in range(warmup):
            step()
        with torch.profiler.record_function(_MARK):
            pass
        for _ in range(steps):
            step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now = peak = 0
    measured = False
    for event in events:
        if event.name() == _MARK:
            measured, peak = True, now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now) if measured else 0
    return peak
