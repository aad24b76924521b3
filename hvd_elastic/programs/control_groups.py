"""Control groups of a process, version 1 or 2, by which a container is limited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


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
