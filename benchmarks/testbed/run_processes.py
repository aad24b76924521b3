"""Finds the processes of a run on virtual hosts, and what is left of it there."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_elastic.virtual import VirtualCluster

_AGENT = "hvd_elastic.agent.agent"


@dataclass(frozen=True)
class WorkerProcess:
    """One worker, as seen from this machine."""

    host: str
    name: str
    slot: int
    pid: int

    def kill(self) -> None:
        """Kill -9."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def processes_with(name: str, value: str) -> Iterator[psutil.Process]:
    """Yield processes with a variable in their environment, those of virtual hosts included."""
    wanted = f"{name}={value}".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208  (no objects: it is called often)
        # Asked many times a second: psutil would take twice as long. Zombies have no environment.
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError, psutil.Error):
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    yield psutil.Process(int(entry))


def processes_of(run_id: str) -> Iterator[psutil.Process]:
    """Yield the living processes of a run on this machine and its virtual hosts."""
    yield from processes_with("HVD_ELASTIC_RUN_ID", run_id)


def workers_of(run_id: str) -> Iterator[WorkerProcess]:
    """Yield the living workers of a run."""
    for process in processes_of(run_id):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            environment = process.environ()
            if "HVD_ELASTIC_WORKER" not in environment:
                continue  # a template
            # What a worker starts has the same variables, but only it leads its session.
            if os.getsid(process.pid) == process.pid:
                host, name = environment["HVD_ELASTIC_HOST"], environment["HVD_ELASTIC_WORKER"]
                slot = int(environment["HVD_ELASTIC_LOCAL_RANK"])
                yield WorkerProcess(host, name, slot, process.pid)


def agents_on(
    cluster: VirtualCluster, hosts: Iterable[str]
) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the agents on virtual hosts, each with its host."""
    for host in hosts:
        for pid in sorted(cluster.pids(host)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # sshd starts it through a shell, whose command line contains the same words.
                if _AGENT in process.cmdline() and "python" in process.name():
                    yield host, process


def left_on_host(
    cluster: VirtualCluster,
    host: str,
    run_id: str,
    services: Collection[str] = (),
    *,
    sockets: bool = True,
) -> Iterator[str]:
    """Yield what is on a virtual host after the end of a run: processes, and its sockets.

    Args:
        services: names of processes that belong there.
        sockets: whether to look for sockets, which all hosts of the loopback network share.
    """
    # Asked once, because it looks through all processes of this machine.
    pids = cluster.pids(host)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.name() not in services:
                yield f"{host}: process {pid}: {' '.join(process.cmdline())}"
    # Abstract unix sockets are listed per network namespace.
    if sockets and f"hvd_elastic/{run_id}/" in _sockets(pids or cluster.pids(host, system=True)):
        yield f"{host}: a socket of run {run_id}"


def _sockets(pids: Iterable[int]) -> str:
    """Return the unix sockets that these processes see, which are of one host; "" if none lives."""
    for pid in sorted(pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if table := Path(f"/proc/{pid}/net/unix").read_text(errors="replace"):
                return table
    return ""


def temporary_entries(cluster: VirtualCluster) -> set[tuple[str, str]]:
    """Return (host, name) of what is in the /tmp of hosts that have one of their own."""
    found: set[tuple[str, str]] = set()
    if not cluster.loopback:
        # PyTorch caches compiled code there, for all later processes of the user.
        kept = f"torchinductor_{getpass.getuser()}"
        for host in cluster.hosts:
            folder = cluster.folder / "hosts" / host / "tmp"
            found |= {(host, path.name) for path in folder.iterdir() if path.name != kept}
    return found
