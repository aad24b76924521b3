"""What of this machine a process may use, which its control groups may limit: cores and memory.

In a container it sees all of the machine and may use less.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_VERSION_1 = ("quota", "period")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Names of the files with the limit and the use of a control group, by version."""
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
"""Name of the file that counts the processes of a group that were killed."""
_CACHES = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
"""Names in ``memory.stat`` of what a group has in use that the kernel can take back."""


def control_groups(controller: str, proc: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups that this process is in, the innermost first.

    Args:
        controller: what they control, such as ``cpu``.
        proc, groups: where the kernel shows processes and control groups.

    Yields:
        Folder, which may lack the files of the controller, and version.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = groups / controller if controllers else groups
        folder = mount / path.lstrip("/")
        # In a container the path can be that of the machine, where the mount is the container's.
        for each in (folder, *folder.parents):
            if mount in (each, *each.parents):
                yield each, 1 if controllers else 2


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


class Memory(NamedTuple):
    """Memory [bytes].

    Attributes:
        available: that can be had without swapping: free, or used by caches of files.
    """

    total: int
    available: int


def usable_memory(proc: Path = PROC, groups: Path = GROUPS) -> Memory:
    """Return the memory that this process may use.

    That is the machine's, or that of its control groups if it is less: a container can be limited
    to 8 GB on a machine whose 512 it sees.

    Raises:
        OSError: there is no ``/proc``.
    """
    machine = _numbers(proc / "meminfo")
    found = [Memory(machine["MemTotal"] << 10, machine["MemAvailable"] << 10)]
    found.extend(_of_groups(proc, groups))
    return Memory(min(each.total for each in found), min(each.available for each in found))


def _of_groups(proc: Path, groups: Path) -> Iterator[Memory]:
    """Yield the memory of each control group of this process that has a limit."""
    for folder, version in control_groups("memory", proc, groups):
        try:
            limit, used = (int((folder / name).read_text()) for name in _FILES[version])
            stat = _numbers(folder / "memory.stat")
        except (OSError, ValueError):  # ValueError: "max"
            continue
        caches = sum(stat.get(name, 0) for name in _CACHES[version])
        yield Memory(limit, max(0, limit - used + caches))


def memory_kills(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return how many processes the kernel has killed for lack of memory.

    They are those of this process's control group, or of the machine if it is in none.
    """
    counters = [folder / _KILLS[v] for folder, v in control_groups("memory", proc, groups)]
    for counter in (*counters, proc / "vmstat"):
        try:
            return _numbers(counter)["oom_kill"]
        except (OSError, KeyError):  # an old kernel does not count
            continue
    return 0


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel by name, such as ``MemTotal: 8048 kB``."""
    rows = [line.split() for line in file.read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
