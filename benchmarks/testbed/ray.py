"""A Ray cluster of one's own on virtual hosts, which ``hvd-elastic ray`` starts and ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.testbed.launchers import OUR_PROGRAM
from hvd_elastic.engines.ray.nodes import ClusterRecord, RayCluster
from hvd_elastic.programs.processes import environment
from hvd_elastic.programs.ray_node import MARK
from hvd_elastic.virtual import VirtualCluster

_LIMIT_S = 1200.0


class VirtualRay:
    """Some hosts of a virtual cluster as nodes of one Ray cluster.

    Args:
        cluster: the virtual hosts.
        folder: folder that they share with this machine, for the hostfile and the record.
        slots: slots of each host.
        cpus: processors of each host.
    """

    def __init__(
        self, cluster: VirtualCluster, folder: Path, slots: int = 1, cpus: int = 2
    ) -> None:
        self.cluster, self._each = cluster, f"slots={slots} cpus={cpus}"
        self.home = folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)  # a start that failed is tried again
        self.hostfile = folder / "hosts"

    def words(self, verb: str, *more: str) -> list[str]:
        """Return the words of a command of ``hvd-elastic ray``."""
        ours = [*OUR_PROGRAM, "ray", verb, str(self.hostfile)]
        return [*ours, "--ssh-config", str(self.cluster.ssh_config), *more]

    def call(self, verb: str, *more: str, status: int = 0) -> str:
        """Run a command of ``hvd-elastic ray``; return what it printed."""
        done = subprocess.run(
            self.words(verb, *more),
            env={**os.environ, "HVD_ELASTIC_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def use(self, hosts: Sequence[str]) -> None:
        """Write the hostfile."""
        lines = [f"{host} {self._each}\n" for host in hosts]
        self.hostfile.write_text("".join(lines), encoding="utf-8")

    def up(self, *more: str) -> list[dict[str, Any]]:
        """Start nodes on all hosts of the hostfile that have none; return what is said of each."""
        lines = self.call("up", "--object-store", "80", "--json", *more).splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if each["kind"] == "host"]

    def stop(self) -> None:
        """Do nothing: all of it ends with the processes of the hosts."""

    @property
    def recorded(self) -> RayCluster:
        """Return the record of the cluster."""
        with patch.dict(os.environ, {"HVD_ELASTIC_HOME": str(self.home)}):
            return ClusterRecord(self.hostfile).require()

    @property
    def outside(self) -> dict[str, str]:
        """Return the variables of a driver on this machine."""
        with patch.dict(os.environ, {"HVD_ELASTIC_HOME": str(self.home)}):
            record = ClusterRecord(self.hostfile)
            return record.require().outside_variables(record.token_file)

    def processes(self, host: str, command: str = "") -> list[psutil.Process]:
        """Return its processes on a host whose command line begins so."""
        mark = self.recorded.mark
        found = []
        for pid in self.cluster.pids(host):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process = psutil.Process(pid)
                is_marked = environment(pid).get(MARK) == mark
                if is_marked and " ".join(process.cmdline()).startswith(command):
                    found.append(process)
        return found
