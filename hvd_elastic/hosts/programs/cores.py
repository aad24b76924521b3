"""Number of cores that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_VERSION_1 = ("quota", "period")


def usable_cores(proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use, at least 1.

    That is its CPU affinity, or the quota of its control groups, rounded up, if that is less: a
    container can be limited to 4 cores on a machine whose 64 it sees.
    """
    quota = min(_quotas(proc, groups), default=math.inf)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, math.ceil(quota))) if quota < math.inf else cores


def _quotas(proc: Path, groups: Path) -> Iterator[float]:
    """Yield the CPU quota of each control group of a process that has one [cores]."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = groups / "cpu" if controllers else groups
        folder = mount / path.lstrip("/")
        # In a container the path can be that of the machine, where the mount is the container's.
        for each in (folder, *folder.parents):
            if mount not in (each, *each.parents):
                break
            try:
                if controllers:
                    used, period = ((each / f"cpu.cfs_{n}_us").read_text() for n in _VERSION_1)
                else:
                    used, period = (each / "cpu.max").read_text().split()
                if used != "max" and float(used) > 0:
                    yield float(used) / float(period)
            except (OSError, ValueError):
                continue
