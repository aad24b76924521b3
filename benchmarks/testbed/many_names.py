"""Many host names that lead to a few sshds of this machine; each name gets its own connection."""

from __future__ import annotations

from pathlib import Path

from hvd_elastic.virtual import VirtualCluster

SSHDS = 8
"""Number of sshds that share the logins."""


class ManyNames:
    """An ssh configuration that gives the hosts of a cluster many names: many0, many1, ….

    Args:
        cluster: virtual hosts on the loopback interface.
        folder: folder for the configuration and the hostfiles.
        names: number of names.
    """

    def __init__(self, cluster: VirtualCluster, folder: Path, names: int) -> None:
        self._folder = folder
        self.config = folder / "config"
        text = cluster.ssh_config.read_text()
        for at, host in enumerate(cluster.hosts):
            own = " ".join(f"many{number}" for number in range(at, names, len(cluster.hosts)))
            text = text.replace(f"Host {host}\n", f"Host {host} {own}\n", 1)
        self.config.write_text(text)

    def hostfile(self, count: int) -> Path:
        """Write a hostfile with the first ``count`` names; return its path."""
        path = self._folder / f"hosts{count}"
        path.write_text(f"many[0-{count - 1}]\n")
        return path
