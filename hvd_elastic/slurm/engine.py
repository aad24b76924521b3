"""Reach the nodes of Slurm allocations: ``srun`` starts each command, and carries its streams."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host, format_hostfile
from hvd_elastic.hosts.local import PopenEnds, start_here
from hvd_elastic.hosts.process import Command, RemoteProcess, Sink, as_command
from hvd_elastic.slurm.allocation import Allocation
from hvd_elastic.slurm.commands import clean_environment

_STEP_S = 10
"""How long srun may wait for a node to take a step [s]; longer, and the node counts as lost."""
_TELL_ADDRESS = "export HVD_ELASTIC_LEADER_ADDRESS=$SLURM_LAUNCH_NODE_IPADDR; "
"""The agent finds by it which of the node's addresses the other hosts use."""


class SlurmEngine:
    """The nodes of a run's allocations as its hosts.

    Args:
        hostfile: hostfile of the run, written by this class.
        allocation: the allocation that the run is led in.
    """

    def __init__(self, hostfile: Path, allocation: Allocation) -> None:
        self._hostfile = hostfile
        self._jobs: dict[str, str] = {}
        self._hosts: dict[str, Host] = {}
        self.add(allocation)

    def add(self, allocation: Allocation) -> None:
        """Give the run the hosts of an allocation."""
        for host in allocation.hosts:
            self._jobs[host.name] = allocation.job_id
            self._hosts[host.name] = host
        self._write()

    def remove(self, job_id: str) -> None:
        """Take the hosts of an allocation from the run."""
        for name in [name for name, job in self._jobs.items() if job == job_id]:
            del self._hosts[name]  # how to reach it is still needed until the run has left it
        self._write()

    def connect(self, host: Host) -> Connection:
        job_id = self._jobs.get(host.name)
        if job_id is None:
            raise SrunError(f"host {host.name} is in no Slurm allocation of this run")
        return SrunConnection(host, job_id)

    def address_towards(self, hosts: list[Host]) -> str:
        return "127.0.0.1"  # the agents find their own addresses, see _TELL_ADDRESS

    def _write(self) -> None:
        temporary = self._hostfile.with_name(f"{self._hostfile.name}.new")
        temporary.write_text(format_hostfile(self._hosts.values()), encoding="utf-8")
        temporary.replace(self._hostfile)


class SrunConnection(Connection):
    """A node of an allocation: each command is a step of the job."""

    def __init__(self, host: Host, job_id: str) -> None:
        self.host = host
        self._job_id = job_id
        self._processes: list[PopenEnds] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed

    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        if self._closed:
            raise SrunError(f"host {self.host.name}: the connection is closed")
        environment = clean_environment(os.environ)
        # The variables of the user's ssh session do not belong to this node.
        environment = {k: v for k, v in environment.items() if not k.startswith("SSH_")}
        command = as_command(command)
        argv = srun_command(self._job_id, self.host.name, command)
        ends = start_here(argv, self.host.name, cwd="/", env=environment)
        self._processes = [known for known in self._processes if not known.ended] + [ends]
        return RemoteProcess(ends, command, self.host.name, on_stderr, on_stdout)

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.close()


class SrunError(SshError):
    """A node cannot be used through srun."""

    brief = "cannot be used through srun"


def srun_command(job_id: str, host: str, command: str) -> list[str]:
    """Return the command that runs a shell command on a node of an allocation.

    Without ``--unbuffered``, which would put a terminal between that changes bytes. The step shares
    the node with the other steps, gets all CPUs and devices that the job has there, and outlives
    other nodes.
    """
    return [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--immediate={_STEP_S}",
        "--cpu-bind=none",
        "--mpi=none",
        "--quiet",
        f"--chdir={Path.home()}",
        "/bin/sh",
        "-c",
        _TELL_ADDRESS + command,
    ]
