"""Describe a job of the queue, and the requests that commands send to the daemon."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hvd_elastic.errors import UsageError
from hvd_elastic.jobs.host_wish import HostWish


class JobStatus(str, enum.Enum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def active(self) -> bool:
        """Return whether the job still waits or runs."""
        return self in (JobStatus.QUEUED, JobStatus.RUNNING)


class JobKind(str, enum.Enum):
    """Kinds of jobs, by what the scheduler may do with them.

    ELASTIC: change its slots while it trains. FIXED: the script is elastic, the number of slots is
    not. PLAIN: any command, one process on one host.
    """

    ELASTIC = "elastic"
    FIXED = "fixed"
    PLAIN = "plain"


class CancelCause(str, enum.Enum):
    """Why a job is cancelled, as words before whoever does it.

    Of a search: TRAINED: the trial is done, so its job succeeds. AT_RUNG: others went on from its
    rung. STUDY: the study ended before it.
    """

    USER = "cancelled by"
    TRAINED = "trained to the last rung of"
    AT_RUNG = "stopped at a rung by"
    STUDY = "ended with its study by"

    @property
    def status(self) -> JobStatus:
        """The state in which it leaves the job."""
        return JobStatus.SUCCEEDED if self is CancelCause.TRAINED else JobStatus.CANCELLED


@dataclass(frozen=True)
class Cancelled:
    """Who has cancelled a job, and why."""

    by: str
    cause: CancelCause = CancelCause.USER

    def __str__(self) -> str:
        return f"{self.cause.value} {self.by}"


class StopReason(str, enum.Enum):
    """Why the daemon ends the run of a job."""

    CANCEL = "cancel"
    REQUEUE = "requeue"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class After:
    """A job that another one waits for.

    Attributes:
        outcome: ``ok``: it has to succeed; ``fail``: it has to fail, and a cancelled job
            has not failed; ``any``: it has to end.
    """

    outcome: str
    job: int

    def met(self, status: JobStatus) -> bool | None:
        """Return whether the condition is met; None: the other job has not ended yet.

        >>> After("ok", 1).met(JobStatus.FAILED), After("any", 1).met(JobStatus.RUNNING)
        (False, None)
        """
        if status.active:
            return None
        if self.outcome == "any":
            return True
        return status is (JobStatus.SUCCEEDED if self.outcome == "ok" else JobStatus.FAILED)


@dataclass(frozen=True)
class JobRequest:
    """A user's request for a job.

    Attributes:
        name: name of the job, the first part of its run id.
        spec: specification of its run, as in run.json, but for the hostfile.
        min_np, max_np: bounds of its slots; ``max_np`` None: all slots of the cluster.
        priority: weight relative to other jobs, above 0.
        deadline: when it has to be finished [Unix s]; None: no deadline.
        epochs, target_examples: length of training as the user states it; None: not stated.
        retries: how often it is run again if it fails.
        array_index: its index in an array of jobs; None: it is not of an array.
        user: id of the user whose job it is; None: of the daemon's. The daemon sets it.
        secret: name of the file with its specification and environment, which its user's keeper
            has; None: the daemon has them.
        hold: who holds it back, so that it is not started; empty: nobody.
        time_limit_s: how long it may run, all its attempts together [s]; None: no limit.
        wish: which hosts it may have.
        notify: whether a command of its user is told of events; it is in the specification.
        notify_held_s: how long it is held until that is told [s]; None: it is not.
        held_at: since when it is held [Unix s]; None: since it was submitted.
        private: whether other users, and a daemon of another user, are told no command.
        cancelled: who has cancelled it, and why; None: nobody.
        token: if not empty, a second request of its user with this name and token adds no job.
    """

    name: str
    spec: dict[str, Any]
    kind: JobKind = JobKind.ELASTIC
    min_np: int = 1
    max_np: int | None = None
    priority: float = 1.0
    deadline: float | None = None
    epochs: float | None = None
    target_examples: float | None = None
    after: tuple[After, ...] = ()
    retries: int = 0
    array_index: int | None = None
    user: int | None = None
    secret: str | None = None
    hold: str = ""
    time_limit_s: float | None = None
    wish: HostWish = field(default_factory=HostWish)
    notify: bool = False
    notify_held_s: float | None = None
    held_at: float | None = None
    private: bool = False
    cancelled: Cancelled | None = None
    token: str = ""

    @property
    def words(self) -> list[str]:
        """The command with its arguments."""
        return [str(word) for word in self.spec.get("command", ())]


@dataclass(frozen=True)
class Job:
    """A job of the queue.

    Attributes:
        reason: why it waits, or holds the slots that it holds, in words.
        message: how it ended; empty: it has not.
        submitted_at, queued_at, started_at, ended_at: times [Unix s]; None: not yet.
            ``queued_at`` is when it last began to wait for slots alone, ``started_at`` when its
            present or last attempt started.
        eta: when it is expected to start, or to end if it runs [Unix s]; None: not known.
        attempts: how often its run was started or resumed.
        ran_s: how long it ran before its present or next attempt [s].
        stop: why its run is being ended; None: it is not.
        held: slots on each host that its run may use.
        environment: number of its environment in the store; None: it was removed.
    """

    number: int
    request: JobRequest
    run_id: str
    status: JobStatus = JobStatus.QUEUED
    reason: str = ""
    message: str = ""
    submitted_at: float = 0.0
    queued_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    eta: float | None = None
    attempts: int = 0
    failures: int = 0
    stop: StopReason | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    environment: int | None = None
    ran_s: float = 0.0

    def run_s(self, now: float) -> float:
        """Return how long it has run, its present attempt included [s]."""
        if self.status is not JobStatus.RUNNING or self.started_at is None:
            return self.ran_s
        return self.ran_s + max(0.0, now - self.started_at)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.request.name

    @property
    def slots(self) -> int:
        """Number of slots that its run may use."""
        return sum(self.held.values())


class Submit(msgspec.Struct, tag="submit"):
    """Add jobs, all with the same environment."""

    jobs: list[JobRequest]
    environment: dict[str, str]


class Cancel(msgspec.Struct, tag="cancel"):
    """Cancel jobs; those that run end after a last checkpoint."""

    jobs: list[int]
    by: str
    cause: CancelCause = CancelCause.USER


class Requeue(msgspec.Struct, tag="requeue"):
    """Put jobs back into the queue; they resume from their last checkpoint.

    ``after`` replaces the jobs that they wait for, unless it is None.
    """

    jobs: list[int]
    environment: dict[str, str]
    after: list[After] | None = None


class Hold(msgspec.Struct, tag="hold"):
    """Hold jobs back; those that train end after a checkpoint, and keep their place."""

    jobs: list[int]
    by: str


class Release(msgspec.Struct, tag="release"):
    """Release held jobs."""

    jobs: list[int]


class SetPriority(msgspec.Struct, tag="priority"):
    """Change the priority of jobs."""

    jobs: list[int]
    priority: float


class DrainHost(msgspec.Struct, tag="drain"):
    """Have jobs leave a host, and keep them off it.

    ``at``: from when on [Unix s].
    """

    host: str
    reason: str
    by: str
    at: float


class UndrainHost(msgspec.Struct, tag="undrain"):
    """Give a drained host back to the jobs."""

    host: str
    by: str


class Pause(msgspec.Struct, tag="pause"):
    """Start no job; or start them again, if ``by`` is empty."""

    by: str


class Down(msgspec.Struct, tag="down"):
    """End the daemon.

    ``leave_jobs``: jobs continue without it; otherwise they end and are queued.
    """

    leave_jobs: bool


class Hosts(msgspec.Struct, tag="hosts"):
    """Ask for the hosts and who holds their slots."""


class ShowLimits(msgspec.Struct, tag="limits"):
    """Ask for the limits and shares of users, and what they have now."""


class Look(msgspec.Struct, tag="look"):
    """Read the queue: a method of the store with its arguments."""

    what: str
    values: list[Any] = []


_OfJobs = Submit | Cancel | Requeue | Hold | Release | SetPriority
Request = _OfJobs | DrainHost | UndrainHost | Pause | Down | Hosts | ShowLimits | Look


class Answer(msgspec.Struct):
    """The answer to a request.

    Attributes:
        jobs: numbers of the jobs that were added or changed.
        needs_keeper: whether the user who asked has to start a keeper for them.
        ask_again: whether the answer is not known yet, and nothing was done.
    """

    message: str
    ok: bool = True
    exit_status: int = 1
    jobs: list[int] = []
    data: Any = None
    needs_keeper: bool = False
    ask_again: bool = False


def encode_job(value: Any) -> bytes:
    """Return a request, or another description of a job, as JSON.

    Raises:
        UsageError: a word in it is not UTF-8.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{error.object!r} is not UTF-8, as all of a job has to be. Rename it, or name a link"
        ) from None
