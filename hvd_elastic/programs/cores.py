"""Number of cores that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from hvd_elastic.programs.control_groups import GROUPS, PROC, control_groups

_VERSION_1 = ("quota", "period")


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the number of cores that this process may use, at least 1.

    That is its CPU affinity, or the quota of its control groups, rounded up, if that is less: a
    container can be limited to 4 cores on a machine whose 64 it sees.
    """
    quota = min(_quotas(proc, groups), default=math.inf)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, math.ceil(quota))) if quota < math.inf else cores


def _quotas(proc: Path, groups: Path) -> Iterator[float]:
    """Yield the CPU quota of each control group of this process that has one [cores]."""
    for folder, version in control_groups("cpu", proc, groups):
        try:
            if version == 1:
                used, period = ((folder / f"cpu.cfs_{n}_us").read_text() for n in _VERSION_1)
            else:
                used, period = (folder / "cpu.max").read_text().split()
            if used != "max" and float(used) > 0:
                yield float(used) / float(period)
        except (OSError, ValueError):
            continue
