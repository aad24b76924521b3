"""Read what a host knows of faults of its GPUs and memory; standard library only, sent to hosts.

The agent of a run has it watched by a process of its own, since a call of a driver that is broken
may never return.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hvd_elastic.programs.nvml import NvmlFaults

LIMIT_S = 5.0
_WATCH_LIMIT_S = 30.0
"""Time limit of ``dmesg`` where nobody waits for the answer, and workers use the cores [s]."""
_MOMENT_S = 0.5
"""Time between two looks at GPUs whose clocks may be held down for a moment [s]."""
_EVERY_S = 60.0
"""Time between two answers of a host that is watched [s]."""
EDAC = Path("/sys/devices/system/edac/mc")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")
_MACHINE_CHECK = re.compile(r"\[Hardware Error\]: Machine check events logged")
_UNCORRECTED = re.compile(
    r"\[Hardware Error\]:.*(?:System Fatal|Uncorrected|event severity: (?:fatal|recoverable))"
)


def read_hardware() -> dict[str, Any]:
    """Return faults of GPUs, of memory, and those in the kernel's log; None where not known."""
    gpus: list[dict[str, Any]] = []

    def read_gpus() -> None:
        faults = NvmlFaults()
        if faults.read():
            time.sleep(_MOMENT_S)
            gpus.extend(faults.read())

    reading = threading.Thread(target=read_gpus, daemon=True)  # a broken driver may never answer
    reading.start()
    reading.join(LIMIT_S)
    return {"gpus": gpus[:], **_read_log_and_memory(LIMIT_S)}


def watch_hardware() -> None:
    """Write an answer as of :func:`read_hardware` every minute, until the input ends.

    It ends at once on a host that knows of no faults.
    """
    os.nice(19)
    gpus = NvmlFaults()
    while True:
        found = {"gpus": gpus.read(), **_read_log_and_memory(_WATCH_LIMIT_S)}
        if found["xids"] is None and len(gpus):
            found["xids"] = gpus.xids()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if not any(each not in (None, []) for each in found.values()):
            return
        if select.select([0], [], [], _EVERY_S)[0]:
            return


def _read_log_and_memory(limit_s: float) -> dict[str, Any]:
    """Return faults of memory and those in the kernel's log; None where not known."""
    log = _kernel_log(limit_s)
    xids = Counter(_XID.findall(log or ""))
    told = [[bus, int(xid), text, times] for (bus, xid, text), times in xids.items()]
    return {
        "xids": None if log is None else told,
        "machine_checks": None if log is None else len(_MACHINE_CHECK.findall(log)),
        "machine_checks_uncorrected": None if log is None else len(_UNCORRECTED.findall(log)),
        "memory_uncorrected": _edac("ue_count"),
        "memory_corrected": _edac("ce_count"),
    }


def _kernel_log(limit_s: float) -> str | None:
    """Return the kernel's log; None where this user may not read it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["dmesg"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace")
    return None


def _edac(name: str) -> int | None:
    """Return the sum of a counter of all memory controllers; None if there are none."""
    found = []
    for path in EDAC.glob(f"mc*/{name}"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return sum(found) if found else None
