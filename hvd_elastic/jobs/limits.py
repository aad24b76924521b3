"""Limits of users on a cluster: how many jobs and slots one may have at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus
from hvd_elastic.jobs.rights import user_id, user_name
from hvd_elastic.jobs.slot_plan import Candidate
from hvd_elastic.replaced_files import file_stamp

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may have at a time; None: as much as there is."""

    most_slots: _AtLeastOne | None = None
    most_jobs: _AtLeastOne | None = None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of all users, as the file ``limits.toml`` in the cluster's folder has them.

    Attributes:
        each: of each user who has none of their own.
        user: of users by name; they replace those of ``each``.
    """

    each: Limit = Limit()
    user: dict[str, Limit] = {}

    @classmethod
    def read(cls, path: Path) -> Limits:
        """Return the limits of a file; none if there is no such file.

        Raises:
            UsageError: the file cannot be used; says why.
        """
        try:
            found = msgspec.toml.decode(path.read_bytes(), type=cls)
            for name in found.user:
                user_id(name)
            return found
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError, UsageError) as error:
            raise UsageError(
                f"the limits in {path} cannot be used: {error}. Valid are most_slots and "
                "most_jobs, of at least 1, under [each] and [user.NAME]"
            ) from error

    def of(self, job: Job) -> Limit:
        """Return the limit of a job's user."""
        return self.user.get(user_name(job.request.user), self.each)


class LimitsFile:
    """The limits of a cluster as they are now: its file is read again whenever it is saved.

    Args:
        path: the file; there need be none.
        warn: called with the reason when it cannot be used; the earlier limits stay then.

    Raises:
        UsageError: it cannot be used at the start.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._stamp = self._present_stamp()
        self.limits = Limits.read(path)

    def changed(self) -> bool:
        """Read the file if it was saved; return whether it was."""
        stamp = self._present_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.limits = Limits.read(self._path)
        except UsageError as error:
            self._warn(f"{error}; the earlier ones stay")
        return True

    def _present_stamp(self) -> tuple[int, int, int] | None:
        try:
            return file_stamp(self._path)
        except OSError:  # there is none
            return None


@dataclass
class _Use:
    """What the jobs of one user are to have: their number, and their fewest slots together."""

    jobs: int = 0
    least: int = 0
    members: list[Candidate] = field(default_factory=list)
    """Those whose slots can be changed."""


def within_limits(
    candidates: Iterable[Candidate], bound: Iterable[Job], limits: Limits
) -> tuple[list[Candidate], dict[int, str]]:
    """Return the jobs that may hold slots, and why the others have to wait.

    No job may have more slots than let all of its user fit together into the user's limit. Those
    that run already stay within it as soon as their fewest slots allow.

    Args:
        candidates: jobs that run, and jobs that wait for nothing but slots.
        bound: jobs that run and whose slots cannot be changed now.
    """
    uses: dict[int | None, _Use] = {}
    for job in bound:
        use = uses.setdefault(job.request.user, _Use())
        use.jobs += 1
        use.least += job.slots
    held: dict[int, str] = {}
    for each in sorted(candidates, key=_first):
        job = each.job
        use = uses.setdefault(job.request.user, _Use())
        if why := "" if job.status is JobStatus.RUNNING else _why_not(job, use, limits.of(job)):
            held[job.number] = why
            continue
        use.jobs += 1
        use.least += job.request.min_np
        use.members.append(each)
    return [each for use in uses.values() for each in _capped(use, limits)], held


def _first(each: Candidate) -> tuple[bool, float, int]:
    """Sort jobs that run before those that wait, and these as they are to start."""
    job = each.job
    return job.status is not JobStatus.RUNNING, -job.request.priority, job.number


def _why_not(job: Job, use: _Use, limit: Limit) -> str:
    if limit.most_jobs is not None and use.jobs >= limit.most_jobs:
        allowed = count(limit.most_jobs, "job")
    elif limit.most_slots is not None and use.least + job.request.min_np > limit.most_slots:
        allowed = count(limit.most_slots, "slot")
    else:
        return ""
    name = user_name(job.request.user)
    return f"waits: {name} may have {allowed} at a time; see: hvd-elastic limits"


def _capped(use: _Use, limits: Limits) -> list[Candidate]:
    """Return the jobs of a user, with what is left beyond their fewest slots dealt out evenly."""
    if not use.members or (most := limits.of(use.members[0].job).most_slots) is None:
        return use.members
    left = max(0, most - use.least)
    found = []
    # Those that can take least come first, and leave the rest of their part to the others.
    members = sorted(use.members, key=lambda each: _wish(each.job.request))
    for number, each in enumerate(members):
        more = int(min(_wish(each.job.request), -(-left // (len(members) - number))))
        left -= more
        request = replace(each.job.request, max_np=each.job.request.min_np + more)
        found.append(replace(each, job=replace(each.job, request=request)))
    return found


def _wish(request: JobRequest) -> float:
    """Return how many slots a job can take beyond its fewest."""
    return math.inf if request.max_np is None else max(0, request.max_np - request.min_np)
