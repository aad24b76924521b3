"""Tell what a host knows of faults of its GPUs and memory, every minute, until its input ends.

The agent of a run starts it, since a call of a driver that is broken may never return. Each line of
output is one answer as of ``read_hardware``. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import sys
from collections import Counter
from typing import Any

from hvd_elastic.programs.hardware import read_log_and_memory
from hvd_elastic.programs.nvml import GPU_IS_LOST, LIBRARY, Nvml

EVERY_S = 60.0
"""Time between two looks [s]."""
_HEAT, _POWER = 0x20 | 0x40, 0x80
"""Bits of the reasons for which a GPU's clocks are held down."""
_XID_EVENTS = 0x8
_MOST_EVENTS = 1000
"""Xid events that are read at a look: some faults give them without end."""
_RECOVERY_ACTION = 230
_ACTIONS = ("", "Reset", "Reboot", "Drain P2P", "Drain and Reset")


class NvmlFaults:
    """Faults of the GPUs of this host; also tells of Xid events since this object was made."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._nvml = nvml = Nvml(library)
        self._held_down: dict[int, set[str]] = {}
        self._xids = Counter[tuple[str, int]]()
        self._events = ctypes.c_void_p()
        if nvml.handles and not nvml.ask("nvmlEventSetCreate", ctypes.byref(self._events)):
            for handle in nvml.handles:
                kind = ctypes.c_ulonglong(_XID_EVENTS)
                nvml.ask("nvmlDeviceRegisterEvents", handle, kind, self._events)

    def __len__(self) -> int:
        return len(self._nvml.handles)

    def read(self) -> list[dict[str, Any]]:
        """Return the faults of each GPU, as :func:`~hvd_elastic.programs.hardware.gpus_of` does."""
        return [self._read(index, handle) for index, handle in enumerate(self._nvml.handles)]

    def xids(self) -> list[tuple[str, int, str, int]]:
        """Return bus, number and text of the Xid events so far, and how often each came."""
        data = ctypes.create_string_buffer(32)
        for _ in range(_MOST_EVENTS if self._events.value else 0):
            if self._nvml.ask("nvmlEventSetWait_v2", self._events, data, 0):
                break
            device, _, number, _, _ = struct.unpack("PQQII", data.raw)
            self._xids[self._bus(ctypes.c_void_p(device)), number] += 1
        return [(bus, number, "", times) for (bus, number), times in self._xids.items()]

    def _read(self, index: int, handle: ctypes.c_void_p) -> dict[str, Any]:
        nvml = self._nvml
        name = ctypes.create_string_buffer(96)
        nvml.ask("nvmlDeviceGetName", handle, name, len(name))
        rows = [ctypes.c_uint() for _ in range(4)]
        nvml.ask("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
        _, _, pending, failure = (each.value for each in rows)
        reasons = nvml.number("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        words = {"heat"} if reasons & _HEAT else set()
        words |= {"its power supply"} if reasons & _POWER else set()
        # A moment is normal, as when work begins.
        held_down, self._held_down[index] = words & self._held_down.get(index, set()), words
        uncorrected = ctypes.c_ulonglong()
        status = nvml.ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0, ctypes.byref(uncorrected))
        pages = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return {
            "index": index,
            "bus": self._bus(handle),
            "name": name.value.decode("utf-8", "replace"),
            "lost": status == GPU_IS_LOST,
            "corrected": nvml.number("nvmlDeviceGetTotalEccErrors", handle, 0, 0),
            "uncorrected": uncorrected.value,
            "repair_pending": bool(pages or pending),
            "repair_failed": bool(failure),
            "width": nvml.number("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "most_width": nvml.number("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "held_down_by": sorted(held_down),
            "action": self._action(handle),
        }

    def _bus(self, handle: ctypes.c_void_p) -> str:
        info = ctypes.create_string_buffer(68)
        self._nvml.ask("nvmlDeviceGetPciInfo_v3", handle, info)
        return info.raw[36:].partition(b"\0")[0].decode("ascii", "replace")

    def _action(self, handle: ctypes.c_void_p) -> str:
        """Return what the driver wants done to bring a GPU back; empty: nothing, or not known."""
        field = ctypes.create_string_buffer(struct.pack("II32x", _RECOVERY_ACTION, 0), 40)
        if self._nvml.ask("nvmlDeviceGetFieldValues", handle, 1, field):
            return ""
        failed, number = struct.unpack_from("iI", field, 28)
        return "" if failed else _ACTIONS[number] if number < len(_ACTIONS) else "Reset"


def main() -> None:
    """Tell of the hardware until the input ends; at once if there is nothing to tell."""
    os.nice(19)
    gpus = NvmlFaults()
    while True:
        found = {"gpus": gpus.read(), **read_log_and_memory()}
        if found["xids"] is None and len(gpus):
            found["xids"] = gpus.xids()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if not any(each not in (None, []) for each in found.values()):
            return
        if select.select([0], [], [], EVERY_S)[0]:
            return


if __name__ == "__main__":
    main()
