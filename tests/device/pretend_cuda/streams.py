"""``torch.cuda.Stream`` and ``torch.cuda.Event``, over the classes that torch has for all devices."""

from typing import Any

import torch


class Stream(torch.Stream):
    """A new stream of the device, or one that exists, by its numbers."""

    def __new__(cls, device: Any = None, priority: int = 0, **numbers: int) -> "Stream":
        return super().__new__(cls, **numbers) if numbers else super().__new__(cls, device="cuda", priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)


def numbers_of(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.accelerator.set_stream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))
