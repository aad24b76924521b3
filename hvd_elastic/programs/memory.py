"""Memory that a process may use, and how often the kernel has killed a process for lack of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvd_elastic.programs.control_groups import GROUPS, PROC, control_groups

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Names of the files with the limit and the use of a control group, by version."""
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
"""Name of the file that counts the processes of a group that were killed."""
_CACHES = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
"""Names in ``memory.stat`` of what a group has in use that the kernel can take back."""


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
