"""End processes that a run left on its hosts, and remove files they left (``killclust``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.remote_python import run_script
from hvd_elastic.hosts.ssh import SshOptions, connect

DEFAULT_GRACE_S = 5.0
# Limit for a program on a host, without the grace time.
SCRIPT_S = 60.0


@dataclass(frozen=True)
class Target:
    """Selection of processes of the current user; their descendants are included.

    Attributes:
        run: processes with this run id in their environment; None for those of every run.
        strays: instead, workers of torchrun, mpirun and horovodrun (known by their environment)
            whose launcher has ended.
        pattern: instead, processes whose command line matches this regular expression.
    """

    run: str | None = None
    strays: bool = False
    pattern: str | None = None


@dataclass(frozen=True)
class FoundProcess:
    """A process that was found.

    Attributes:
        pid: its process id on its host.
        command: its command line, cut to 200 characters.
        run: run that it belongs to; for a stray the launcher, with the job's name if it has one.
        ended: signal that ended it (``TERM``, ``KILL``), ``left`` if it is still alive, "" if it
            was only listed.
    """

    pid: int
    command: str
    run: str
    ended: str


@dataclass(frozen=True)
class LeftFile:
    """An unused file or folder that dead processes left.

    Attributes:
        path: path on its host.
        kind: ``temporary folder``, ``shared memory``, ``lock`` or ``socket``.
        bytes: size [bytes].
        problem: why it could not be removed, or "".
    """

    path: str
    kind: str
    bytes: int
    problem: str


@dataclass(frozen=True)
class Ended:
    """Processes ended and files removed on a host; in a dry run, those that would be.

    Attributes:
        files: files that dead processes had left.
        gpus: a line of text for each process that still holds GPU memory.
        others: a line of text for each process of a run of this name in another HVD_ELASTIC_HOME,
            which is another run: they are left alone.
    """

    processes: tuple[FoundProcess, ...]
    files: tuple[LeftFile, ...]
    gpus: tuple[str, ...]
    others: tuple[str, ...] = ()


def kill_run(
    hosts: Sequence[Host],
    target: Target,
    options: SshOptions | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    dry_run: bool = False,
    fanout: int = DEFAULT_FANOUT,
) -> Iterator[HostResult[Ended]]:
    """End the current user's processes of a run, with their descendants, on every host.

    Other processes are not touched. Then files that dead processes of the user left are removed,
    except those that any process has open.

    Args:
        target: processes to end.
        grace_s: seconds between TERM and KILL.
        dry_run: only list processes and files.
        fanout: maximum number of hosts at a time.

    Yields:
        One result for each host as it is done; FAILED if a process could not be ended.
    """
    options = options or SshOptions()
    kill_s = SCRIPT_S + 5 * grace_s

    def kill(host: Host, stopper: Stopper) -> Ended:
        with connect(host, options) as connection:
            stopper.add_action(connection.close)
            found = end_processes_of(connection, target, grace_s, kill_s, dry_run)
            # Files cannot be selected by pattern, so those of all dead runs are included then.
            request = {"run": target.run, "host": host.name, "dry_run": dry_run}
            request["tmpdir"] = os.environ.get("TMPDIR", "")
            left = run_script(connection, "clear_left", request, SCRIPT_S)
            return Ended(
                tuple(FoundProcess(**entry) for entry in found["processes"]),
                tuple(LeftFile(**entry) for entry in left["removed"]),
                tuple(left["gpus"]),
                tuple(found["others"]),
            )

    limit_s = options.connect_timeout_s + kill_s + SCRIPT_S + 10.0
    return fan_out(hosts, kill, fanout, limit_s, _assess_left)


def end_processes_of(
    connection: Connection,
    target: Target,
    grace_s: float,
    limit_s: float,
    dry_run: bool,
    ours: bool = False,
) -> dict[str, Any]:
    """Find processes on a host, and end them unless it is a dry run.

    Args:
        connection: connection to the host.
        target: processes to find.
        grace_s: seconds between TERM and KILL.
        limit_s: limit for all of it [s].
        dry_run: only list them.
        ours: whether processes that our own agents left count as strays too.

    Returns:
        "processes", each with the fields of :class:`FoundProcess`; and "others", as in
        :class:`Ended`.
    """
    request = {**vars(target), "ours": ours, "grace_s": grace_s, "dry_run": dry_run}
    request["home"] = os.environ.get("HVD_ELASTIC_HOME", "")
    found: dict[str, Any] = run_script(connection, "kill_run", request, limit_s)
    return found


def _assess_left(ended: Ended) -> tuple[Outcome, str]:
    left = [str(process.pid) for process in ended.processes if process.ended == "left"]
    reasons = [f"still there after KILL: process {', '.join(left)}"] if left else []
    reasons += [f"{file.path}: {file.problem}" for file in ended.files if file.problem]
    return (Outcome.FAILED, "; ".join(reasons)) if reasons else (Outcome.OK, "")
