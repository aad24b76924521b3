"""Ending what a run left on its hosts (``killclust``): processes, then the files they leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.remote_python import run_script
from hvd_elastic.hosts.ssh import SshOptions, connect

DEFAULT_GRACE_S = 5.0
SCRIPT_S = 60.0


@dataclass(frozen=True)
class Target:
    """Which of the caller's own processes are meant; their descendants are with them.

    Attributes:
        run: those with this run id in their environment; None: those of every run.
        strays: instead, workers of torchrun, mpirun and horovodrun (known by their environment)
            that no living launcher holds any more.
        pattern: instead, those whose command line matches this regular expression.
    """

    run: str | None = None
    strays: bool = False
    pattern: str | None = None


@dataclass(frozen=True)
class FoundProcess:
    """A process of a run.

    Attributes:
        pid: its process id on its host.
        command: its command line, cut to 200 characters.
        run: the run it belongs to; for a stray the launcher, with the job's name if it has one.
        ended: the signal that ended it (``TERM``, ``KILL``), ``left`` when none did, "" when it
            was only listed.
    """

    pid: int
    command: str
    run: str
    ended: str


@dataclass(frozen=True)
class LeftFile:
    """A file or folder that dead processes left, and nobody uses.

    Attributes:
        path: where it lies on its host.
        kind: ``temporary folder``, ``shared memory``, ``lock`` or ``socket``.
        bytes: its size.
        problem: why it could not be removed, or "".
    """

    path: str
    kind: str
    bytes: int
    problem: str


@dataclass(frozen=True)
class Ended:
    """What was ended and removed on a host (in a dry run: would be).

    Attributes:
        processes: those that were found.
        files: what dead processes had left.
        gpus: a line for each process that still holds GPU memory.
    """

    processes: tuple[FoundProcess, ...]
    files: tuple[LeftFile, ...]
    gpus: tuple[str, ...]


def kill_run(
    hosts: Sequence[Host],
    target: Target,
    options: SshOptions | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    dry_run: bool = False,
    fanout: int = DEFAULT_FANOUT,
) -> Iterator[HostResult[Ended]]:
    """Ends the caller's own processes of a run, with their descendants, on every host.

    Nothing else is touched. Then files are removed that dead processes of the caller's left: none
    that any process has open.

    Args:
        hosts: where.
        target: which processes.
        options: how to connect.
        grace_s: seconds between TERM and KILL.
        dry_run: only list them.
        fanout: hosts at a time.

    Yields:
        One result a host as it ends; FAILED when a process could not be ended.
    """
    options = options or SshOptions()
    kill_s = SCRIPT_S + 5 * grace_s

    def kill(host: Host, stopper: Stopper) -> Ended:
        with connect(host, options) as connection:
            stopper.add(connection.close)
            processes = end_processes_of(connection, target, grace_s, kill_s, dry_run)
            # Files know no pattern: those of every dead run are looked for.
            request = {"run": target.run, "host": host.name, "dry_run": dry_run}
            left = run_script(connection, "clear_left", request, SCRIPT_S)
            return Ended(
                tuple(FoundProcess(**entry) for entry in processes),
                tuple(LeftFile(**entry) for entry in left["removed"]),
                tuple(left["gpus"]),
            )

    limit_s = options.connect_timeout_s + kill_s + SCRIPT_S + 10.0
    return fan_out(hosts, kill, fanout, limit_s, _judge_left)


def end_processes_of(
    connection: Connection,
    target: Target,
    grace_s: float,
    limit_s: float,
    dry_run: bool,
    ours: bool = False,
) -> list[dict[str, Any]]:
    """Finds processes on a host and, but in a dry run, ends them; the fields are FoundProcess's.

    Args:
        connection: the host.
        target: which processes.
        grace_s: seconds between TERM and KILL.
        limit_s: seconds for all of it.
        dry_run: only list them.
        ours: whether what our own agents left counts among the strays.
    """
    request = {**vars(target), "ours": ours, "grace_s": grace_s, "dry_run": dry_run}
    found: list[dict[str, Any]] = run_script(connection, "kill_run", request, limit_s)["processes"]
    return found


def _judge_left(ended: Ended) -> tuple[Outcome, str]:
    left = [str(process.pid) for process in ended.processes if process.ended == "left"]
    reasons = [f"still there after KILL: process {', '.join(left)}"] if left else []
    reasons += [f"{file.path}: {file.problem}" for file in ended.files if file.problem]
    return (Outcome.FAILED, "; ".join(reasons)) if reasons else (Outcome.OK, "")
