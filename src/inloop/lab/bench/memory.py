"""Peak memory of live tensors during a step, on the CPU: what torch's allocator gave out, never the interpreter."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor


def live_bytes() -> int:
    """Of all tensors that exist now, each storage once; between steps nothing else is held."""
    gc.collect()
    # isinstance would wake objects that only pretend to have a class
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def peak_bytes(step: Callable[[], None]) -> int:
    """What was alive before the step, and the most that it had allocated and not freed at any moment."""
    before = live_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return before + peak
