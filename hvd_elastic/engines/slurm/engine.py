"""Reach the nodes of Slurm allocations: ``srun`` starts each command, and carries its streams."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from hvd_elastic.agent.preemption.notice import AFTER_SIGTERM
from hvd_elastic.control.endings import StopCause
from hvd_elastic.engines.base import HostSource, repeating
from hvd_elastic.engines.slurm.allocation import (
    Allocation,
    clean_environment,
    has_ended,
    is_inside,
    own_allocation,
)
from hvd_elastic.errors import SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host, Hostfile, write_hostfile
from hvd_elastic.hosts.local import LocalConnection, PopenEnds, ProgramConnection, start_here
from hvd_elastic.records.run_folder import RunFolder

_STEP_S = 10
"""How long srun may wait for a node to take a step [s]; longer, and the node counts as lost."""
_LOOK_S = 15.0
"""Time between two looks at whether the allocation has ended [s]."""
_HEAR_S = 1.0
"""How long the last words of an srun that has failed are waited for [s]."""
_TELL_ADDRESS = "export HVD_ELASTIC_LEADER_ADDRESS=$SLURM_LAUNCH_NODE_IPADDR; "
"""The agent finds by it which of the node's addresses the other hosts use."""
_TELL_SEEN = "echo hvd_elastic sees: $(sha256sum <{} 2>/dev/null) >&2; "
_SEEN = re.compile(rb"(?m)^hvd_elastic sees: ?(\w*).*\n")
"""What the first command on a node says of a file: a job that is ending gets no further step."""
_OF_SRUN = re.compile(rb"(?m)^srun: (error: \S+: task 0: |.*lacks support for cpu binding).*\n")
_FOR_GOOD = re.compile(
    rb"srun: error: (Slurm job \d+ has expired|"
    rb"Unable to (create step|confirm allocation) for job \d+: "
    rb"(Invalid generic resource|Invalid job id|Job/step already completing|"
    rb"Access/permission denied|More processors requested than|"
    rb"Memory required by task is not available))"
)
"""What srun says of a step that this job will never have; other errors may be over soon."""


class SrunError(SshError):
    """A node cannot be used through srun."""

    brief = "cannot be used through srun"


class SlurmEngine:
    """The nodes of a run's allocations as its hosts."""

    def __init__(self, folder: RunFolder, allocation: Allocation) -> None:
        self._folder = folder
        self._jobs: dict[str, str] = {}
        self._gres: dict[str, str] = {}
        self._hosts: dict[str, Host] = {}
        self._kill_wait_s = allocation.kill_wait_s
        self._connections: list[SrunConnection] = []
        self._changing = threading.Lock()
        self.add_allocation(allocation)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts that the run has been given."""
        return tuple(self._hosts)

    def add_allocation(self, allocation: Allocation) -> None:
        """Give the run the hosts of an allocation."""
        with self._changing:
            for host in allocation.hosts:
                self._jobs[host.name] = allocation.job_id
                self._gres[host.name] = allocation.gres.get(host.name, "")
                self._hosts[host.name] = host
        self._write()

    def remove_job(self, job_id: str) -> None:
        """Take the hosts of an allocation from the run, which then leaves them."""
        with self._changing:
            for name in [name for name, job in self._jobs.items() if job == job_id]:
                self._hosts.pop(name, None)
        self._write()

    def in_use(self, job_id: str) -> bool:
        """Return whether the run is still connected to a host of an allocation."""
        with self._changing:
            return any(each.alive and each.job_id == job_id for each in self._connections)

    def connect(self, host: Host) -> Connection:
        with self._changing:
            job_id = self._jobs.get(host.name)
            if job_id is None:
                raise SrunError(f"host {host.name} is in no Slurm allocation of this run")
            gres = self._gres[host.name]
            connection = SrunConnection(
                host, job_id, self._folder.run_json, gres, self._kill_wait_s
            )
            self._connections = [each for each in self._connections if each.alive] + [connection]
            return connection

    def address_towards(self, hosts: list[Host]) -> str:
        return "127.0.0.1"  # the agents find their own addresses, see _TELL_ADDRESS

    def _write(self) -> None:
        write_hostfile(self._folder.hosts, self._hosts.values())


@contextlib.contextmanager
def slurm_engine(folder: RunFolder, allocation: Allocation) -> Iterator[SlurmEngine]:
    """Yield the nodes of an allocation as the hosts of a run, which they are from then on.

    The run is stopped when the allocation has ended, if its leader outlives it: that of a shell of
    ``salloc`` does, and the nodes do not come back.
    """

    def stop_if_over() -> bool:
        if not has_ended(allocation.job_id):
            return False
        folder.send_request("stop", {"reason": StopCause.ALLOCATION.value})
        return True

    engine = SlurmEngine(folder, allocation)
    with repeating("allocation", _LOOK_S, stop_if_over):
        yield engine


class SlurmSource(HostSource):
    """The allocation that this process runs in."""

    def is_around(self, environment: Mapping[str, str]) -> bool:
        return is_inside(environment)

    def hosts(self, environment: Mapping[str, str]) -> Hostfile:
        allocation = own_allocation(environment)
        return Hostfile(allocation.hosts, f"Slurm job {allocation.job_id}")

    def lead(
        self, folder: RunFolder, environment: Mapping[str, str]
    ) -> AbstractContextManager[SlurmEngine]:
        return slurm_engine(folder, own_allocation(environment))

    def clean(self, environment: Mapping[str, str]) -> dict[str, str]:
        return clean_environment(environment)  # workers have the variables of their own node's step


class SrunConnection(ProgramConnection):
    """A node of an allocation: each command is a step of the job.

    Args:
        seen: file of this machine with a content of its own, by which to find out whether the node
            sees the same files.
        gres: what the job has on the node of its generic resources, such as ``gpu:2``.
        kill_wait_s: time between SIGTERM and SIGKILL at the end of the job [s].
    """

    error = SrunError

    def __init__(
        self,
        host: Host,
        job_id: str,
        seen: Path,
        gres: str = "",
        kill_wait_s: float = Allocation.kill_wait_s,
    ) -> None:
        super().__init__(host)
        self.job_id = job_id
        self._gres = gres
        self._kill_wait_s = kill_wait_s
        self._seen = seen
        self._looking = threading.Lock()
        self._first: _SrunEnds | None = None
        self._files: Connection | None = None

    @property
    def files(self) -> Connection:
        """Return this machine where it has the same files: srun carries some 10 MB/s."""
        if self._first is None:
            self.run("true", timeout_s=_STEP_S + 20)
        with self._looking:
            if self._files is None:
                assert self._first is not None
                here = hashlib.sha256(self._seen.read_bytes()).hexdigest()
                same = self._first.sees(_STEP_S + 20) == here
                self._files = LocalConnection(self.host) if same else self
            return self._files

    def start_shell(self, command: str) -> PopenEnds:
        if self._first is None:
            command = _TELL_SEEN.format(shlex.quote(str(self._seen))) + command
        command = f"export {AFTER_SIGTERM}={self._kill_wait_s:g}; {command}"
        environment = clean_environment(os.environ)
        # The variables of the user's ssh session do not belong to this node.
        environment = {k: v for k, v in environment.items() if not k.startswith("SSH_")}
        argv = srun_command(self.job_id, self.host.name, command, self._gres)
        ends = _SrunEnds(start_here(argv, cwd="/", env=environment), self.host.name)
        self._first = self._first or ends
        return ends

    def close(self) -> None:
        super().close()
        if self._files is not None and self._files is not self:
            self._files.close()


class _SrunEnds(PopenEnds):
    """Pipes of a step, without what srun itself says about a command that has failed.

    Those would be the last lines, which messages quote. The exit status of a step that Slurm will
    never give is ``EX_NOPERM``: trying again is of no use.
    """

    def __init__(self, popen: subprocess.Popen[bytes], host: str) -> None:
        self._refused = False
        self._heard = threading.Event()
        self._seen = ""
        self._has_seen = threading.Event()
        super().__init__(popen, host)

    def sees(self, timeout_s: float) -> str:
        """Return what the command said of a file by ``_TELL_SEEN``; empty: nothing."""
        self._has_seen.wait(timeout_s)
        return self._seen

    def read_stderr(self, size: int) -> bytes:
        while data := super().read_stderr(size):
            self._refused = self._refused or _FOR_GOOD.search(data) is not None
            if seen := _SEEN.search(data):
                self._seen = seen[1].decode()
                self._has_seen.set()
                data = _SEEN.sub(b"", data)
            if rest := _OF_SRUN.sub(b"", data):
                return rest
        self._heard.set()
        self._has_seen.set()
        return b""

    def wait(self, timeout: float | None) -> int | None:
        status = super().wait(timeout)
        if status == 1:  # of srun itself, or of the command
            self._heard.wait(_HEAR_S)
        return os.EX_NOPERM if status == 1 and self._refused else status


def srun_command(job_id: str, host: str, command: str, gres: str = "") -> list[str]:
    """Return the command that runs a shell command on a node of an allocation.

    Without ``--unbuffered``, which would put a terminal between that changes bytes. The step shares
    the node with the other steps, and gets all CPUs and devices that the job has there. ``gres``
    says which: otherwise it asks for the GPUs of all nodes if the user has (``--gpus``), and for
    those of one task if they are by task. GPUs are asked for all together, since Slurm refuses a
    number for each node that another node of the job does not have.
    """
    devices = gres.split(",")
    gpus = ",".join(each.removeprefix("gpu:") for each in devices if each.startswith("gpu:"))
    others = ",".join(each for each in devices if not each.startswith("gpu:"))
    return [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        *([f"--gpus={gpus}"] if gpus else []),
        *([f"--gres={others}"] if others else []),
        f"--immediate={_STEP_S}",
        "--cpu-bind=none",
        "--mpi=none",
        "--quiet",
        f"--chdir={Path.home()}",
        "/bin/sh",
        "-c",
        _TELL_ADDRESS + command,
    ]
