"""Virtual hosts with a data set, and jobs on them whose processes are all ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.signals import uninterrupted
from hvd_elastic.virtual import VirtualCluster

DIGITS = Path(__file__).resolve().parents[2] / "scripts/examples/digits.py"


class Testbed:
    """A virtual cluster with everything that jobs on it need.

    Args:
        cluster: virtual hosts.
        scratch: folder that all hosts see.

    Attributes:
        hostfile: hostfile that drivers read.
        discovery_script: script that prints the hostfile in Horovod's format.
        programs: folder for ``PATH`` with an ``ssh`` that uses the cluster's configuration.
        interface: this machine's network interface to the hosts.
        data: folder of the data set.
    """

    __test__ = False  # pytest would take a class of this name for a test

    def __init__(self, cluster: VirtualCluster, scratch: Path) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.scratch = scratch
        self.hostfile = scratch / "hostfile"
        self.discovery_script = scratch / "discover"
        self.programs = scratch / "bin"
        self.data = scratch / "digits"
        self.interface = _interface_with(cluster.leader_address)
        self._jobs = 0
        write_ssh(self.programs / "ssh", cluster.ssh_config)
        _write_program(self.discovery_script, f'exec sed "s/ slots=/:/" "{self.hostfile}"')
        write_digits(self.data)

    @property
    def description(self) -> str:
        """Description of the hosts, for the conditions."""
        kind = "addresses of the loopback network" if self.cluster.loopback else "namespaces"
        return f"{len(self.hosts)} virtual hosts ({kind})"

    def slots(self, *counts: int) -> dict[str, int]:
        """Return host → number of workers for the first hosts, without those that have none."""
        return {host: count for host, count in zip(self.hosts, counts, strict=False) if count}

    @contextlib.contextmanager
    def job_folder(self) -> Iterator[Path]:
        """Make a folder for a job and, when the block ends, bring all hosts up again."""
        self._jobs += 1
        folder = self.scratch / f"job{self._jobs}"
        for name in ("marks", "home"):
            (folder / name).mkdir(parents=True)
        try:
            yield folder
        finally:
            with uninterrupted():
                restore_hosts(self.cluster)

    def kill(self, host: str, pid: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a process by its id on the host; return when [s, monotonic]."""
        asked = time.monotonic()
        self.cluster.kill(host, pid, number)
        return asked


def end_processes(cluster: VirtualCluster, host: str) -> None:
    """Kill all processes on a virtual host."""
    # Repeated, since a process may start another one just before it is killed.
    while pids := cluster.pids(host):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def restore_hosts(cluster: VirtualCluster) -> None:
    """Kill all processes on all hosts, boot hosts that are off, and reconnect cut links."""
    for host in cluster.hosts:
        end_processes(cluster, host)
        if cluster.status(host) == "off":
            cluster.boot(host)
        elif cluster.status(host) == "cut":
            cluster.heal(host)


@contextlib.contextmanager
def make_testbed(
    hosts: int,
    *,
    loopback: bool = False,
    rate: str | None = None,
    cpus: float | None = None,
    shares: Sequence[Path] = (),
) -> Iterator[Testbed]:
    """Create virtual hosts for the length of the block.

    Args:
        hosts: number of hosts.
        loopback: use addresses of the loopback network even if this process is root.
        rate: rate of each host's link, such as ``1gbit``; None: not limited.
        cpus: number of cores that each host may use; None: not limited.
        shares: folders that the hosts must see.

    Raises:
        UsageError: PyTorch or Horovod is not installed.
    """
    for package in ("torch", "horovod"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"benchmarks train with {package}, which is missing: make horovod")
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-bench-") as scratch:
        cluster = VirtualCluster.up(
            hosts, 1, loopback=loopback or None, rate=rate, cpus=cpus, shares=[scratch, *shares]
        )
        try:
            yield Testbed(cluster, Path(scratch))
        finally:
            with uninterrupted():
                cluster.down()


def write_ssh(path: Path, config: Path) -> None:
    """Write an ``ssh`` program that uses a given configuration, for the ``PATH`` of launchers.

    Raises:
        UsageError: ssh is not installed.
    """
    found = shutil.which("ssh")
    if found is None:
        raise UsageError("ssh is not installed. Install it: apt install openssh-client")
    _write_program(path, f'exec {found} -F {shlex.quote(str(config))} "$@"')


def _write_program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _interface_with(address: str) -> str:
    """Return the name of this machine's network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise RunError(f"no network interface of this machine has the address {address}")
