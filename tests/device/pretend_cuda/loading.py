"""Loads the device's library, then torch, and gives ``torch.cuda`` the functions that a build for the CPU lacks."""

import atexit
import ctypes
import sys
import time
from types import SimpleNamespace
from typing import Any

from tests.device.pretend_cuda.building import built_library, torch_directory

_TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so")


def load() -> None:
    """Make the device available.

    Raises:
        CannotBuildError: If its library cannot be built here.
    """
    path = built_library()
    assert "torch" not in sys.modules, "load the device before torch, which asks for a device once, when it is imported"
    for name in _TORCH_LIBRARIES:
        ctypes.CDLL(str(torch_directory() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.pretend_is_capturing.restype = ctypes.c_bool
    library.pretend_bytes_now.restype = library.pretend_bytes_at_most.restype = ctypes.c_size_t
    _complete_torch(library)


def _complete_torch(library: ctypes.CDLL) -> None:
    import torch

    from tests.device.pretend_cuda import lstm, streams, watching

    functions: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: torch.accelerator.current_stream().stream_id,
        "_cuda_synchronize": torch.accelerator.synchronize,
        "_cuda_getCurrentStream": lambda index: streams.numbers_of(torch.accelerator.current_stream()),
        "_cuda_getDefaultStream": lambda index: (0, 0, 1),
        "_cuda_setStream": streams.set_stream,
        "_cuda_sleep": lambda cycles: None,  # nothing here takes longer than it is waited for
        "_cuda_memoryStats": lambda index: _memory_statistics(library),
        "_cuda_resetPeakMemoryStats": lambda index: library.pretend_forget_bytes_at_most(),
        "_cuda_set_sync_debug_mode": watching.set_sync_debug_mode,
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: 0
    cuda._get_device_properties = lambda index: SimpleNamespace(
        name="pretend CUDA device", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    cuda.default_generators = (torch.Generator(device="cuda"),)  # the first one is the default one
    cuda.graphs._cuda_isCurrentStreamCapturing = library.pretend_is_capturing
    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # else it warns that it is not there
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign, assignment]
    lstm.register()
    watching.connect(library)
    # The thread of backward passes needs Python's lock once more after the last of them, and Python kills a process whose threads ask too late.
    atexit.register(time.sleep, 0.1)


def _memory_statistics(library: ctypes.CDLL) -> dict[str, Any]:
    """Return the part of ``torch.cuda.memory_stats`` that there is."""
    return {
        "allocated_bytes": {"all": {"current": library.pretend_bytes_now(), "peak": library.pretend_bytes_at_most()}}
    }


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``torch.UntypedStorage``, which copies and loads tensors, with the device among those it knows."""
    import torch

    if device is None or torch.device(device).type != "cuda":
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)
    return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
