"""Implement the commands of the queue: queue, why, wait, and those that change jobs in it."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from hvd_elastic.cli.jobs.daemon import ClusterOption, warn_of_no_daemon
from hvd_elastic.cli.jobs.naming import find_numbers, is_own, need_one, submitted_last
from hvd_elastic.cli.options import AsJson, argument, option, parse_duration, parse_number
from hvd_elastic.cli.output import print_json
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import bounds_words, count, duration_words
from hvd_elastic.jobs.job import (
    After,
    Cancel,
    Hold,
    Job,
    JobStatus,
    Release,
    Requeue,
    SetPriority,
    StopReason,
)
from hvd_elastic.jobs.place import ClusterFolder, open_cluster
from hvd_elastic.jobs.rights import open_queue, user_name
from hvd_elastic.jobs.secrets import JobSecrets
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.records.wording import attempts_words

JobsArgument = Annotated[
    list[str], argument("numbers as in 3 or 5-9, run ids, or names of jobs", "JOB...")
]
_POLL_S = 0.1
_COMMAND_COLUMNS = 32
"""Columns of a terminal that the command of a job may take in the queue."""
_SHOWN, _SHOWN_WAITING = 10, 50
"""Jobs that have ended, and that wait, which the queue shows by default."""


# -- looking ---------------------------------------------------------------------------------


def queue(
    all_: Annotated[bool, option("all jobs that ever were", "--all", "-a")] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of a cluster: those that run, those that wait and why, and the last ones.

    ETA is the time until a job that runs is expected to end.

    Examples:
      hvd-elastic queue

      hvd-elastic queue --all --json
    """
    place, store = _open(cluster)
    waits = None if all_ or as_json else _SHOWN_WAITING
    # In the order of a job's life: one that starts or ends meanwhile is read twice, and not missed.
    waiting = store.with_status(JobStatus.QUEUED, waits)
    running = store.with_status(JobStatus.RUNNING)
    ended = store.ended(None if all_ else _SHOWN)
    newest = {job.number: job for job in (*waiting, *running, *ended)}
    active = [job for job in (*running, *waiting) if newest[job.number] is job]
    alive = place.daemon_alive()
    if as_json:
        print_json([job_fields(job) for job in [*active, *ended]])
        return
    if not alive:
        warn_of_no_daemon(place)
    if not active and not ended:
        print(f"no job was submitted to cluster {place.name} yet")
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in queue_lines([*active, *ended], time.time(), columns):
        print(line)
    left = sum(store.counts().values()) - len(active) - len(ended)
    if left > 0 and not all_:
        print(f"and {count(left, 'other job')}: hvd-elastic queue --all")


def queue_lines(jobs: Sequence[Job], now: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of the queue: two for each job.

    Args:
        now: present time [Unix s].
        columns: width of the terminal, to which lines are cut; None: they are not.
    """
    width = max(len(job.run_id) for job in jobs)
    heads = (
        f"{'JOB':>5}  {'RUN':<{width}}  {'STATUS':<9}  SLOTS  PRIO  {'AGE':<8}  {'ETA':<8}  HOSTS"
    )
    yield _cut(heads, columns)
    for job in jobs:
        until = now if job.ended_at is None else job.ended_at
        age = duration_words(max(0.0, until - job.submitted_at))
        ends = job.eta if job.status is JobStatus.RUNNING else None
        eta = "" if ends is None else duration_words(max(0.0, ends - now))
        hosts = ", ".join(f"{host}: {slots}" for host, slots in job.held.items())
        line = (
            f"{job.number:>5}  {job.run_id:<{width}}  {_status(job):<9}  {job.slots or '':>5}  "
            f"{job.request.priority:>4g}  {age:<8}  {eta:<8}  {hosts}"
        )
        yield _cut(line.rstrip(), columns)
        reason = job.message or _reason(job)
        command = _cut(_command(job), columns and _COMMAND_COLUMNS)
        if job.request.user is not None:
            command = f"{user_name(job.request.user)}: {command}"
        yield _cut(f"{'':5}  {command}" + (f" · {reason}" if reason else ""), columns)


def _command(job: Job) -> str:
    return shlex.join(job.request.words) or "(private)"


def _status(job: Job) -> str:
    return "held" if job.request.hold and job.status is JobStatus.QUEUED else job.status.value


def _reason(job: Job) -> str:
    """Return why a job that has not ended waits, has its slots, or is being ended."""
    if job.stop is StopReason.REQUEUE:
        return f"goes back into the queue: {job.reason}"
    return job.reason


def _cut(text: str, columns: int | None) -> str:
    r"""Return text as one line of at most so many columns.

    >>> _cut("python train.py", 9), _cut("a\nb", None)
    ('python t…', 'a b')
    """
    line = " ".join(text.splitlines()) if "\n" in text else text
    return line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…"


def job_fields(job: Job) -> dict[str, Any]:
    """Return a job as JSON."""
    request = job.request
    return {
        "job": job.number,
        "name": job.name,
        "run_id": job.run_id,
        "status": job.status.value,
        "kind": request.kind.value,
        "reason": job.reason,
        "message": job.message,
        "eta": job.eta,
        "slots": job.slots,
        "hosts": dict(job.held),
        "priority": request.priority,
        "min_np": request.min_np,
        "max_np": request.max_np,
        "deadline": request.deadline,
        "time_limit_s": request.time_limit_s,
        "asked_hosts": request.wish.words or None,
        "after": [f"{each.outcome}:{each.job}" for each in request.after],
        "array_index": request.array_index,
        "attempts": job.attempts,
        "failures": job.failures,
        "retries": request.retries,
        "held_by": request.hold or None,
        "stopping": job.stop.value if job.stop else None,
        "submitted": job.submitted_at,
        "started": job.started_at,
        "ended": job.ended_at,
        "command": request.words,
        "user": None if request.user is None else user_name(request.user),
        "cwd": request.spec.get("cwd"),
    }


def why(
    job: Annotated[str, argument("number, run id or name of a job", "JOB")],
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Say why a job waits, holds the slots that it holds, or has ended as it has.

    Examples:
      hvd-elastic why 12

      hvd-elastic why resnet --json
    """
    place, store = _open(cluster)
    jobs = store.jobs(find_numbers(store, place, [job]))
    need_one(job, [each.run_id for each in jobs.values()])
    (found,) = jobs.values()
    if as_json:
        print_json(job_fields(found))
        return
    awaited = store.statuses([each.job for each in found.request.after]).values()
    awaits, own = any(status.active for status in awaited), is_own(place, found)
    for label, value in why_rows(found, awaits, time.time(), is_own=own):
        print(f"{label:<10} {value}")
    if not place.daemon_alive():
        print(f"{'daemon':<10} none: nothing is decided until hvd-elastic up")


def why_rows(job: Job, awaits: bool, now: float, *, is_own: bool = True) -> list[tuple[str, str]]:
    """Return what is known of a job: label and text of each row.

    Args:
        awaits: whether a job that it is to start after still runs.
        is_own: whether it is this user's, so that more can be looked at.
        now: present time [Unix s].
    """
    request = job.request
    rows = [("job", f"{job.number} ({job.run_id}), {_status(job)}")]
    if request.user is not None:
        rows.append(("user", user_name(request.user)))
    rows.append(("command", _command(job)))
    if job.reason:
        rows.append(("reason", _reason(job)))
    if job.message:
        rows.append(("ended", job.message))
    if job.held:
        held = ", ".join(f"{host}: {slots}" for host, slots in job.held.items())
        rows.append(("slots", held))
    if job.eta is not None:
        in_s = duration_words(max(0.0, job.eta - now))
        if job.status is JobStatus.RUNNING:
            rows.append(("expected", f"ends in about {in_s}"))
        else:
            bound = "earliest" if awaits else "latest"
            rows.append(("expected", f"starts in about {in_s} at the {bound}"))
    elif job.stop is not None:
        pass  # the reason says it
    elif job.status.value == "running" and request.kind.value == "plain":
        rows.append(("expected", "end not known: nobody can say how long a plain command takes"))
    elif job.status.value == "running":
        rows.append(
            (
                "expected",
                "end not known: nothing measured now, or no --epochs or --target-examples",
            )
        )
    elif job.status.value == "queued" and not request.hold:
        which = "that it waits for" if awaits else "before it"
        rows.append(("expected", f"start not known: no job {which} has a known end"))
    limits = bounds_words(request.min_np, request.max_np, "slot")
    limits += f", priority {request.priority:g}"
    if request.deadline is not None:
        left_s = request.deadline - now
        left = f"in {duration_words(left_s)}" if left_s > 0 else "over"
        limits += f", deadline {left}"
    if request.time_limit_s is not None:
        limits += f", time limit {duration_words(request.time_limit_s)}"
        if job.status.active:
            left_s = max(0.0, request.time_limit_s - job.run_s(now))
            limits += f" ({duration_words(left_s)} left)"
    if hosts := request.wish.words:
        limits += f", {hosts}"
    rows.append(("asked", limits))
    if request.after:
        rows.append(("after", ", ".join(f"{each.outcome}:{each.job}" for each in request.after)))
    if job.attempts > 1:
        rows.append(("attempts", attempts_words(job.attempts, job.failures, request.retries)))
    if job.attempts and is_own:
        rows.append(("more", f"hvd-elastic status {job.run_id}, logs, attach, report"))
    return rows


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        str | None, option("give up after, such as 90m", "--timeout", metavar="TIME")
    ] = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Wait until jobs have ended; the exit status is 0 if all of them succeeded, else 1.

    Examples:
      hvd-elastic wait 12 13

      hvd-elastic wait resnet --timeout 2h
    """
    limit_s = None if timeout is None else parse_duration("--timeout", timeout)
    place, store = _open(cluster)
    numbers = find_numbers(store, place, jobs)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while any(status.active for status in store.statuses(numbers).values()):
        if deadline is not None and time.monotonic() > deadline:
            within = duration_words(limit_s or 0.0)
            raise RunError(f"not all jobs have ended within {within}; see: hvd-elastic queue")
        time.sleep(_POLL_S)
    ended = list(store.jobs(numbers).values())
    if as_json:
        print_json([job_fields(job) for job in ended])
    else:
        for job in ended:
            print(f"job {job.number} ({job.run_id}) {job.status.value}: {job.message}")
    if any(job.status.value != "succeeded" for job in ended):
        raise typer.Exit(1)


# -- changing --------------------------------------------------------------------------------


def cancel(jobs: JobsArgument, cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Cancel jobs that wait, and end those that run: after a last checkpoint, if they train.

    Examples:
      hvd-elastic cancel 12

      hvd-elastic cancel 20-29 resnet
    """
    place, store = _open(cluster)
    found = find_numbers(store, place, jobs, active=True)
    _ask(place, Cancel(found, getpass.getuser()), as_json)


def requeue(
    jobs: JobsArgument,
    after: Annotated[
        list[str] | None,
        option("wait for these jobs instead", "--after", metavar="ok|any|fail:JOB"),
    ] = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Put jobs back into the queue; they continue from a checkpoint, plain ones start again.

    A job that runs ends after a checkpoint first. A job that has ended runs with the environment
    of this shell.

    Examples:
      hvd-elastic requeue 12

      hvd-elastic requeue 12 --after ok:15
    """
    place, store = _open(cluster)
    found = find_numbers(store, place, jobs)
    waits = None if after is None else list(parse_after(after, place))
    if place.is_others:
        secrets = JobSecrets(place)
        for job in store.jobs(found).values():
            if (name := job.request.secret) is not None:  # a job of this user
                secrets.write(name, secrets.read(name)[0], os.environ)
    _ask(place, Requeue(found, {} if place.is_others else dict(os.environ), waits), as_json)


def hold(jobs: JobsArgument, cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Hold jobs back until they are released; those that train end after a checkpoint first.

    Examples:
      hvd-elastic hold 12

      hvd-elastic hold 20-29
    """
    place, store = _open(cluster)
    found = find_numbers(store, place, jobs, active=True)
    _ask(place, Hold(found, getpass.getuser()), as_json)


def release(jobs: JobsArgument, cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Release held jobs; they continue from their last checkpoint.

    Examples:
      hvd-elastic release 12
    """
    place, store = _open(cluster)
    found = find_numbers(store, place, jobs, active=True)
    _ask(place, Release(found), as_json)


def priority(
    jobs: JobsArgument,
    to: Annotated[str, option("the priority, above 0", "--to", metavar="NUMBER")],
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Change the priority of jobs that wait or run.

    Examples:
      hvd-elastic priority 12 --to 4
    """
    wanted = parse_number("--to", to, above=True)
    place, store = _open(cluster)
    found = find_numbers(store, place, jobs, active=True)
    _ask(place, SetPriority(found, wanted), as_json)


def _ask(place: ClusterFolder, request: Any, as_json: bool) -> None:
    from hvd_elastic.jobs.server import ask_daemon

    answer = ask_daemon(place, request)
    if answer.needs_keeper:
        _start_keeper(place)
    if as_json:
        print(json.dumps({"ok": True, "message": answer.message, "jobs": answer.jobs}))
    else:
        print(answer.message)


def _open(cluster: str | None) -> tuple[ClusterFolder, JobStore]:
    place = open_cluster(cluster)
    return place, open_queue(place, lambda: _start_keeper(place))


def _start_keeper(place: ClusterFolder) -> None:
    from hvd_elastic.cli.jobs.keeper import start_keeper

    start_keeper(place)


def parse_after(texts: Sequence[str], place: ClusterFolder) -> tuple[After, ...]:
    """Return what values of ``--after`` say, such as ``ok:12``.

    Raises:
        UsageError: one is not valid, or names no job.
    """
    found = []
    for text in texts:
        outcome, colon, job = text.partition(":")
        if outcome not in ("ok", "any", "fail") or not colon or not job:
            raise UsageError(
                f"--after {text!r} is not valid: give ok:JOB, any:JOB or fail:JOB, such as ok:12"
            )
        known = open_queue(place).find(job)
        if not known:
            raise UsageError(f"--after {text}: there is no job {job!r}; see: hvd-elastic queue")
        found += [After(outcome, each.number) for each in submitted_last(known)]
    return tuple(found)
