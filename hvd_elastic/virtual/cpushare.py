"""Limit the CPU cores of virtual hosts with control groups, version 1 or 2."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError

PERIOD_US = 10_000
"""Period of a quota. With the kernel's default of 100 ms, half a core would be a whole one that
stops for 50 ms at a time, which is as long as whole training steps."""
LEAST_QUOTA_US = 1000
"""What the kernel takes."""


@dataclass(frozen=True)
class CpuGroups:
    """Control groups of one cluster, at ``<mount>/<name>/<host>``.

    Attributes:
        version: version of the control group file system, 1 or 2.
    """

    folder: Path
    version: int

    @classmethod
    def find(cls, name: str) -> CpuGroups | None:
        """Return the groups of that name, existing or not; None if no CPU controller is mounted."""
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            mount = Path(before.split(" ")[4])
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(mount / name, 1)
            if kind == "cgroup2":
                controllers = mount / "cgroup.controllers"
                if controllers.is_file() and "cpu" in controllers.read_text().split():
                    return cls(mount / name, 2)
        return None

    def make(self, host: str, cpus: float) -> Path:
        """Create a host's group, limited to ``cpus`` cores; return its folder."""
        group = self.folder / host
        try:
            group.mkdir(parents=True, exist_ok=True)
            quota = max(int(cpus * PERIOD_US), LEAST_QUOTA_US)
            period = max(PERIOD_US, int(quota / cpus))
            if self.version == 1:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                for parent in (self.folder.parent, self.folder):
                    (parent / "cgroup.subtree_control").write_text("+cpu")
                (group / "cpu.max").write_text(f"{quota} {period}")
        except OSError as error:
            raise VirtualClusterError(
                f"the CPU share of {host} cannot be set in {group}: {error.strerror}; "
                "leave out --cpus, or allow control groups to this user"
            ) from error
        return group

    def remove(self) -> None:
        """Remove the groups; all of their processes have ended."""
        if not self.folder.is_dir():
            return
        groups = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        for group in [*groups, self.folder]:
            # The kernel releases a group shortly after its last process has ended.
            for attempt in range(100):
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if attempt == 99:
                        raise VirtualClusterError(
                            f"control group {group} cannot be removed: {error.strerror}"
                        ) from error
                    time.sleep(0.01)
