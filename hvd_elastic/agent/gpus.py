"""Asks NVIDIA's management library (NVML) how busy the GPUs of a host are."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from itertools import takewhile

from hvd_elastic.programs.nvml import LIBRARY, Nvml
from hvd_elastic.run_events import GpuSample

_NONE = ("", "-1")
"""Words of CUDA_VISIBLE_DEVICES that name no GPU; CUDA does not read on behind one."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    """The GPUs of this host; there are none without a driver that works."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._nvml = Nvml(library)

    def __len__(self) -> int:
        return len(self._nvml.handles)

    def sample_use(self) -> list[GpuSample]:
        """Return the use of each GPU that answers."""
        found = []
        for handle in self._nvml.handles:
            use, memory = _Utilization(), _Memory()
            if self._nvml.ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use)):
                continue
            if self._nvml.ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
                continue
            used = memory.used / max(1, memory.total)
            found.append(GpuSample(use.gpu / 100, round(used, 3), memory.total))
        return found


def usable_gpus(environment: Mapping[str, str], library: str = LIBRARY) -> int:
    """Return how many GPUs of this host a program may use: all, or CUDA_VISIBLE_DEVICES' if fewer.

    Parts of a GPU (MIG) count as CUDA_VISIBLE_DEVICES names them, since one process uses one.
    """
    found, named = len(Gpus(library)), environment.get("CUDA_VISIBLE_DEVICES")
    if named is None or not found:
        return found
    words = list(takewhile(lambda word: word not in _NONE, map(str.strip, named.split(","))))
    return len(words) if any(word.startswith("MIG") for word in words) else min(found, len(words))
