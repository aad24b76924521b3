"""Who may do and see what, where several users share a cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import structs

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import one_line
from hvd_elastic.hosts.hostfile import expand_hosts
from hvd_elastic.jobs import job as ask
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.job import After, Job, JobKind, JobRequest, JobStatus, Request
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.queue import OUTCOMES
from hvd_elastic.jobs.secrets import JobSecrets, ToldSpec, shown_words
from hvd_elastic.jobs.server import ask_daemon
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.records.json_lines import (
    Follower,
    LineFollower,
    Record,
    decode_record,
    decoded,
)
from hvd_elastic.records.run_folder import check_run_id

_MOST_BYTES = 16 << 10
"""Bytes of what the daemon keeps of a job of another user."""
_MOST_AFTER = 500
"""Jobs that a job of another user may wait for."""
_MOST_SHOWN = 100
"""Characters of a command's first word that others see."""
_MOST_PRIORITY = 1000.0
"""Largest priority that a user may give jobs beside those of others."""
_MOST_NUMBER = 2**31
"""Most slots or retries of a job, and largest index in an array."""
_MOST_LIST = 4096
"""Characters of a list of hosts."""
_MOST_LENGTH = 1e18
"""Most examples or epochs of a job, and longest time [s]."""


def user_name(uid: int | None) -> str:
    """Return the name of a user; None is the daemon's own."""
    uid = os.getuid() if uid is None else uid
    try:
        return _account_name(uid)
    except KeyError:
        return str(uid)


@functools.lru_cache(maxsize=1024)
def _account_name(uid: int) -> str:
    """Return a user's name: a daemon asks for those of all jobs at each decision."""
    return pwd.getpwuid(uid).pw_name


def user_id(name: str) -> int:
    """Return the id of a user.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UsageError(f"this machine has no user {name!r}; see: getent passwd") from None


def of_user(
    request: Request, user: int, operators: Collection[int], jobs: Mapping[int, Job]
) -> Request:
    """Return a request as this user may ask for it.

    Args:
        user: who asks, another one than the daemon's.
        jobs: the jobs that it names, as far as there are any.

    Raises:
        RunError: the user may not.
        UsageError: it asks for what no job can have.
    """
    match request:
        case ask.Submit(wanted, _):
            return ask.Submit([_job_of(each, user) for each in wanted], {})
        case ask.Cancel(numbers, _, cause):
            request = ask.Cancel(numbers, user_name(user), cause)
        case ask.Hold(numbers, _):
            request = ask.Hold(numbers, user_name(user))
        case ask.Requeue(numbers, _, after):
            _check_after(after or ())
            request = ask.Requeue(numbers, {}, after)
        case ask.SetPriority(_, priority):
            _check_priority(priority)
        case ask.DrainHost() | ask.UndrainHost() if user in operators:
            request = structs.replace(request, by=user_name(user))
        case ask.Pause(by) if user in operators:
            request = ask.Pause(user_name(user) if by else "")
        case ask.Hosts() | ask.ShowLimits() | ask.Look() | ask.Release():
            pass
        case _ if user not in operators:
            raise RunError(
                f"the daemon belongs to user {user_name(None)}, who ends and pauses it and drains "
                "hosts, as may operators (hvd-elastic up --operators)"
            )
    for job in jobs.values():
        if job.request.user != user and user not in operators:
            raise RunError(
                f"job {job.number} ({job.run_id}) belongs to user {user_name(job.request.user)}, "
                "who may change it, as may operators (hvd-elastic up --operators). Nothing was "
                "changed"
            )
    return request


def numbers_of(request: Request) -> list[int]:
    """Return the jobs that a request would change."""
    return [] if isinstance(request, ask.Submit) else getattr(request, "jobs", [])


def _job_of(request: JobRequest, user: int) -> JobRequest:
    check_run_id(request.name)
    if request.secret is None:
        raise UsageError("a job of another user than the daemon's is submitted by its own submit")
    check_run_id(request.secret)
    _check_priority(request.priority)
    _check_after(request.after)
    lengths = (
        *(request.epochs, request.target_examples, request.deadline, request.time_limit_s),
        request.notify_held_s,
    )
    if any(each is not None and not 0 < each < _MOST_LENGTH for each in lengths):
        raise UsageError(f"job {request.name}: a length, a deadline or a time limit is not valid")
    least, most = request.min_np, request.max_np
    numbers = (*(least, request.retries + 1, request.array_index or 1, most or least),)
    is_valid = all(1 <= number <= _MOST_NUMBER for number in numbers)
    if request.kind is not JobKind.ELASTIC:
        is_valid &= least == most
    if request.kind is JobKind.PLAIN:
        is_valid &= least == 1
    if not is_valid or (most is not None and most < least):
        raise UsageError(f"job {request.name}: its numbers of slots or retries are not valid")
    try:
        told = msgspec.convert(request.spec, ToldSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"job {request.name}: its specification is not valid: {error}") from None
    command = [one_line(word, _MOST_SHOWN) for word in shown_words(request)]
    spec = {"command": command, **structs.asdict(told)}
    hold = user_name(user) if request.hold else ""
    _check_wish(request.wish)
    made = replace(request, spec=spec, user=user, hold=hold, held_at=None, cancelled=None)
    if len(msgspec.json.encode(made)) > _MOST_BYTES:
        raise UsageError(f"job {request.name}: all that is said of it has over {_MOST_BYTES} bytes")
    return made


def _check_after(after: Collection[After]) -> None:
    if len(after) > _MOST_AFTER:
        raise UsageError(f"--after names {len(after)} jobs, and may name {_MOST_AFTER}")
    for each in after:
        if each.outcome not in OUTCOMES:
            raise UsageError(f"--after {each.outcome!r} is not known; valid: {', '.join(OUTCOMES)}")


def _check_wish(wish: HostWish) -> None:
    texts = (wish.only, wish.exclude, *wish.labels)
    if sum(map(len, texts)) > _MOST_LIST or len(wish.labels) > _MOST_LIST:
        raise UsageError(f"a list of hosts or labels has at most {_MOST_LIST} characters")
    if wish.gpu_memory_gb is not None and not 0 < wish.gpu_memory_gb < _MOST_LENGTH:
        raise UsageError("--gpu-memory is not valid: give GB, above 0")
    for text in filter(None, (wish.only, wish.exclude)):
        expand_hosts(text, labels=True)


def _check_priority(priority: float) -> None:
    if not 0 < priority <= _MOST_PRIORITY:
        raise UsageError(
            f"a priority is above 0 and at most {_MOST_PRIORITY:g} where users share a cluster"
        )


# -- reading the queue ---------------------------------------------------------------------------

_READS = {
    "with_status": list[Job],
    "ended": list[Job],
    "counts": dict[JobStatus, int],
    "numbers": list[int],
    "find": list[Job],
    "jobs": dict[int, Job],
    "statuses": dict[int, JobStatus],
}
"""Methods of the store that others may call over the socket, and what they return."""


_BY_NUMBER = ("jobs", "statuses")
"""Those of them that take numbers of jobs, and return something for each."""
_MOST_ROWS = 1000
"""Jobs that are told in one answer, so that the daemon has time for its other work."""


def _bounded(limit: int | None) -> int:
    return _MOST_ROWS if limit is None else max(0, min(limit, _MOST_ROWS))


def read_for(store: JobStore, look: ask.Look, user: int) -> Any:
    """Return what a user may see of the queue.

    Raises:
        UsageError: the request is not valid.
    """
    if look.what not in (*_READS, _EVENTS):
        raise UsageError(f"{look.what!r} cannot be read; what can: {', '.join(_READS)}")
    values = look.values
    try:
        if look.what == _EVENTS:
            return _events_for(store, user, *values)
        if look.what == "with_status":
            values = [JobStatus(values[0]), _bounded(values[1]), *values[2:]]
        elif look.what == "ended":
            values = [_bounded(values[0]), *values[1:]]
        elif look.what in _BY_NUMBER and len(values[0]) > _MOST_ROWS:
            raise UsageError(f"at most {_MOST_ROWS} jobs can be named in one request")
        elif look.what == "find":
            values = [values[0], user]
        found = getattr(store, look.what)(*values)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise UsageError(f"the request is not valid: {error}") from None
    if isinstance(found, list):
        found = [_seen(each, user) if isinstance(each, Job) else each for each in found]
    elif look.what == "jobs":
        found = {number: _seen(job, user) for number, job in found.items()}
    return msgspec.to_builtins(found, str_keys=True)


def _seen(job: Job, user: int) -> Job:
    """Return a job as another user sees it: without its output and what only its owner says."""
    if job.request.user == user:
        return job
    request = replace(job.request, spec={"command": shown_words(job.request)}, secret=None)
    reason, message = _seen_reason(job.reason), _seen_message(job.status, job.message)
    return replace(job, request=request, reason=reason, message=message, environment=None)


def _seen_reason(reason: str) -> str:
    return one_line("is tried again after a failure" if reason.startswith("failed") else reason)


def _seen_message(status: str, message: str) -> str:
    return message if status == JobStatus.CANCELLED else ""


_EVENTS = "events"
"""What is asked for to read the events of the cluster, from an offset on."""
_PART_BYTES = 256 << 10
"""About how many bytes of events are read for one request."""
_SEEN_EVENTS = frozenset(
    {
        *("cluster_hosts", "host_lost", "host_back", "host_drained", "host_undrained"),
        *("job_submitted", "job_started", "job_requeued", "job_finished", "time_limit_near"),
        "jobs_decided",
    }
)
"""Kinds of events that others may see."""


def _events_for(store: JobStore, user: int, offset: int) -> dict[str, Any]:
    """Return the events from an offset on as a user may see them, and the offset of the next."""
    lines = LineFollower(ClusterFolder(store.path.parent).events, offset=max(0, offset))
    records = [*decoded(lines.poll(_PART_BYTES), decode_record)]
    numbers = {int(each["job"]) for each in records if "job" in each}
    numbers |= {int(number) for each in records for number in each.get("reasons", ())}
    jobs = store.jobs(numbers)
    own = {str(number) for number, job in jobs.items() if job.request.user == user}
    private = {str(number) for number, job in jobs.items() if job.request.private}
    seen = [_seen_event(each, own, private) for each in records if each["kind"] in _SEEN_EVENTS]
    return {"events": seen, "offset": lines.offset}


def _seen_event(record: Record, own: Collection[str], private: Collection[str]) -> Record:
    number = str(record.get("job"))
    if number in own:
        return record
    seen = dict(record)
    if "command" in seen:
        seen["command"] = [] if number in private else seen["command"][:1]
    if "reasons" in seen:
        told = seen["reasons"].items()
        seen["reasons"] = {each: why if each in own else _seen_reason(why) for each, why in told}
    if "job" in seen and "reason" in seen:
        seen["reason"] = _seen_reason(seen["reason"])
    if "message" in seen:
        seen["message"] = _seen_message(seen["status"], seen["message"])
    return seen


class ClusterEvents:
    """The events of a cluster as they come; those of another user's daemon over its socket."""

    def __init__(self, place: ClusterFolder) -> None:
        self._place = place
        self._follower = None if place.is_others else Follower(place.events, decode_record)
        self._offset = 0

    def poll(self) -> list[Record]:
        """Return the next ones; empty: there are no more now.

        Raises:
            RunError: the daemon of another user is not there.
        """
        if self._follower is not None:
            return self._follower.poll()
        while True:
            data = ask_daemon(self._place, ask.Look(_EVENTS, [self._offset])).data
            is_all, self._offset = data["offset"] == self._offset, data["offset"]
            if data["events"] or is_all:
                return list(data["events"])

    def __iter__(self) -> Iterator[Record]:
        """Yield those that there are now."""
        while records := self.poll():
            yield from records


class _OverSocket:
    """What can be read of a store whose daemon is that of another user.

    Args:
        start_keeper: called once if this user's keeper is to be there and is not.
    """

    def __init__(self, place: ClusterFolder, start_keeper: Callable[[], object]) -> None:
        self._place = place
        self._start_keeper: Callable[[], object] | None = start_keeper

    def __getattr__(self, name: str) -> Any:
        if name not in _READS:
            raise AttributeError(name)
        return partial(self._by_parts if name in _BY_NUMBER else self._read, name)

    def with_status(self, status: JobStatus, limit: int | None = None) -> list[Job]:
        """Return the jobs of a state, oldest first."""
        return self._pages(limit, lambda most, last: ["with_status", status, most, last], 0)

    def ended(self, limit: int | None = None) -> list[Job]:
        """Return jobs that have ended, the last submitted first."""
        return self._pages(limit, lambda most, last: ["ended", most, last], 2**62)

    def _pages(
        self, limit: int | None, asked: Callable[[int, int], list[Any]], first: int
    ) -> list[Job]:
        """Return jobs that are read a part at a time, each from the number of the last one on."""
        found: list[Job] = []
        while limit is None or len(found) < limit:
            most = _bounded(None if limit is None else limit - len(found))
            page = self._read(*asked(most, found[-1].number if found else first))
            found += page
            if len(page) < most:
                break
        return found

    def _by_parts(self, name: str, numbers: Iterable[int]) -> Any:
        wanted = [*numbers]
        parts = range(0, max(1, len(wanted)), _MOST_ROWS)
        found: dict[int, Any] = {}
        for first in parts:
            found |= self._read(name, wanted[first : first + _MOST_ROWS])
        return found

    def _read(self, name: str, *values: Any) -> Any:
        plain = [
            [*each] if isinstance(each, Iterable) and not isinstance(each, str) else each
            for each in values
        ]
        answer = ask_daemon(self._place, ask.Look(name, plain))
        if answer.needs_keeper and self._start_keeper is not None:
            start, self._start_keeper = self._start_keeper, None
            start()
        found = msgspec.convert(answer.data, _READS[name], strict=False)
        if isinstance(found, list):
            return [self._whole(each) if isinstance(each, Job) else each for each in found]
        if name == "jobs":
            return {number: self._whole(job) for number, job in found.items()}
        return found

    def _whole(self, job: Job) -> Job:
        """Add what this user's files alone say of an own job."""
        if job.request.secret is not None:
            with contextlib.suppress(RunError):  # it was removed
                spec = JobSecrets(self._place).read(job.request.secret)[0]
                return replace(job, request=replace(job.request, spec=spec))
        return job

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""


def open_queue(place: ClusterFolder, start_keeper: Callable[[], object] = lambda: None) -> JobStore:
    """Return the queue of a cluster for reading; that of another user's daemon over its socket.

    Args:
        start_keeper: called once if this user has jobs there and no keeper.

    Raises:
        StoreError: it cannot be used, or there is none.
    """
    if place.is_others:
        return cast("JobStore", _OverSocket(place, start_keeper))
    return JobStore.read_only(place.database)
