"""Ending what a run left on its hosts (``killclust``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvd_elastic.cluster.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.cluster.hostfile import Host
from hvd_elastic.cluster.scripts import run_script
from hvd_elastic.cluster.ssh import SshOptions, connect

__all__ = ["FoundProcess", "kill_run"]

DEFAULT_GRACE_S = 5.0
SCRIPT_S = 60.0


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


def kill_run(
    hosts: Sequence[Host],
    run: str | None,
    options: SshOptions,
    grace_s: float = DEFAULT_GRACE_S,
    dry_run: bool = False,
    fanout: int = DEFAULT_FANOUT,
    strays: bool = False,
) -> Iterator[HostResult[tuple[FoundProcess, ...]]]:
    """Ends the caller's own processes of a run, with their descendants, on every host.

    They are found by HVD_ELASTIC_RUN_ID in their environment; nothing else is touched.

    Args:
        hosts: where.
        run: run id; None ends every run's.
        options: how to connect.
        grace_s: seconds between TERM and KILL.
        dry_run: only list them.
        fanout: hosts at a time.
        strays: instead of a run, workers of torchrun, mpirun and horovodrun (known by their
            environment) that no living launcher holds any more.

    Yields:
        One result a host as it ends; FAILED when a process could not be ended.
    """

    def kill(host: Host, stopper: Stopper) -> tuple[FoundProcess, ...]:
        with connect(host, options) as connection:
            stopper.add(connection.close)
            request = {
                "run": run,
                "strays": strays,
                "ours": False,
                "grace_s": grace_s,
                "dry_run": dry_run,
            }
            answer = run_script(connection, "kill_run", request, SCRIPT_S + 5 * grace_s)
            return tuple(FoundProcess(**entry) for entry in answer["processes"])

    limit_s = options.connect_timeout_s + SCRIPT_S + 5 * grace_s + 10.0
    return fan_out(hosts, kill, fanout, limit_s, _judge_left)


def _judge_left(found: tuple[FoundProcess, ...]) -> tuple[Outcome, str]:
    left = [str(process.pid) for process in found if process.ended == "left"]
    if not left:
        return Outcome.OK, ""
    return Outcome.FAILED, f"still there after KILL: process {', '.join(left)}"
