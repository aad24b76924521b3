"""Define the requests that commands send to the daemon, and its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from hvd_elastic.jobs.job import After, JobRequest


class Submit(msgspec.Struct, tag="submit"):
    """Add jobs, all with the same environment."""

    jobs: list[JobRequest]
    environment: dict[str, str]


class Cancel(msgspec.Struct, tag="cancel"):
    """Cancel jobs; those that run end after a last checkpoint."""

    jobs: list[int]
    by: str


class Requeue(msgspec.Struct, tag="requeue"):
    """Put jobs back into the queue; they go on from their last checkpoint.

    ``after`` replaces the jobs that they wait for, unless it is None.
    """

    jobs: list[int]
    environment: dict[str, str]
    after: list[After] | None = None


class SetPriority(msgspec.Struct, tag="priority"):
    """Change the priority of jobs."""

    jobs: list[int]
    priority: float


class Down(msgspec.Struct, tag="down"):
    """End the daemon.

    ``leave_jobs``: jobs go on without it; otherwise they end and are queued.
    """

    leave_jobs: bool


class Hosts(msgspec.Struct, tag="hosts"):
    """Ask for the hosts and who holds their slots."""


Request = Submit | Cancel | Requeue | SetPriority | Down | Hosts


class Answer(msgspec.Struct):
    """The answer to a request.

    Attributes:
        message: text for the user.
        ok: whether the request was granted.
        exit_status: exit status of the command, if it was not.
        jobs: numbers of the jobs that were added or changed.
        data: what was asked for.
    """

    message: str
    ok: bool = True
    exit_status: int = 1
    jobs: list[int] = []
    data: Any = None
