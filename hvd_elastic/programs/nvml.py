"""Ask NVIDIA's management library (NVML); standard library only."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
GPU_IS_LOST = 15
"""Answer of NVML about a GPU that fell off the bus."""
_MISSING = 13
"""Answer of NVML for a function that it lacks."""
_MOST = 16


class Nvml:
    """The library of this host.

    Attributes:
        handles: what stands for each GPU; there are none without a driver that works.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self.handles: list[ctypes.c_void_p] = []
        with contextlib.suppress(OSError):
            self._library = ctypes.CDLL(library)
            self._open()

    def _open(self) -> None:
        count = ctypes.c_uint()
        if self.ask("nvmlInit_v2") or self.ask("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return
        for index in range(min(count.value, _MOST)):
            handle = ctypes.c_void_p()
            if not self.ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
                self.handles.append(handle)

    def ask(self, name: str, *arguments: Any) -> int:
        """Call a function; return NVML's answer, which is 0 if all is well."""
        function = getattr(self._library, name, None)  # older drivers lack some
        return _MISSING if function is None else int(function(*arguments))

    def number(self, name: str, handle: ctypes.c_void_p, *arguments: int) -> int:
        """Return a number that NVML has of a GPU; 0 where it has none."""
        found = ctypes.c_ulonglong()
        return 0 if self.ask(name, handle, *arguments, ctypes.byref(found)) else found.value
