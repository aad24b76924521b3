"""Implement the commands of the queue: submit, queue, why, cancel, requeue, priority and wait."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_elastic.cli.cluster_daemon import AsJson, ClusterOption
from hvd_elastic.cli.numbers import (
    number_option,
    parse_duration,
    parse_number,
    parse_whole_number,
    whole_number_option,
)
from hvd_elastic.cli.run_options import RunOptions
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count, duration_words

if TYPE_CHECKING:
    from hvd_elastic.jobs.job import After, Job, JobRequest
    from hvd_elastic.jobs.place import ClusterFolder
    from hvd_elastic.jobs.store import JobStore

JobsArgument = Annotated[
    list[str],
    typer.Argument(metavar="JOB...", help="numbers as in 3 or 5-9, run ids, or names of jobs"),
]
_ARRAY = re.compile(r"(\d+)-(\d+)(?::(\d+))?|(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
_UNSUITABLE = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")
_MOST_JOBS = 100_000
INDEX_VARIABLE = "HVD_ELASTIC_ARRAY_INDEX"
"""Environment variable with the index of a job in its array."""
_POLL_S = 0.1
_SHOWN = 10
"""Ended jobs that the queue shows by default."""


def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="the training command, after --", metavar="-- COMMAND [ARG]..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="name of the job (default: of the script)")
    ] = None,
    priority: Annotated[
        float, number_option("--priority", above=True, help="weight relative to other jobs")
    ] = 1.0,
    np: Annotated[
        int | None, whole_number_option("--np", "-n", help="number of slots of a --fixed job")
    ] = None,
    min_np: Annotated[int, whole_number_option("--min-np", help="fewest slots")] = 1,
    max_np: Annotated[
        int | None, whole_number_option("--max-np", help="most slots (default: all)")
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="keep to --np slots from start to end")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="any command: one process in one slot of one host")
    ] = False,
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", metavar="TIME", help="finish within, such as 6h or 90m"),
    ] = None,
    epochs: Annotated[
        float | None, number_option("--epochs", above=True, help="epochs that it will train")
    ] = None,
    target_examples: Annotated[
        float | None,
        number_option(
            "--target-examples", above=True, help="useful examples that it will train, such as 5e7"
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after", metavar="ok|any|fail:JOB", help="wait for another job; may be repeated"
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            "--array",
            metavar="0-9",
            help="a job for each index; {index} in the command stands for it",
        ),
    ] = None,
    retries: Annotated[
        int, whole_number_option("--retries", least=0, help="how often to try again if it fails")
    ] = 0,
    checkpoint_every_s: Annotated[
        float, number_option("--checkpoint-every", help="seconds between checkpoints, 0 for none")
    ] = 30.0,
    checkpoint_folder: Annotated[
        str | None,
        typer.Option("--checkpoint-dir", metavar="DIR|URL", help="folder or URL for checkpoints"),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python on every host (default: this one's path)")
    ] = None,
    failure_timeout_s: Annotated[
        float,
        number_option(
            "--failure-timeout", above=True, help="seconds of silence after which a host is lost"
        ),
    ] = 5.0,
    audit: Annotated[
        bool, typer.Option("--audit", help="record which examples were really read")
    ] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Put a job into the queue of a cluster. It runs as soon as there are slots for it.

    Its environment is that of this shell, and its folder this folder. An elastic script starts with
    few slots and gets more as its gain by them is measured; [bold]--fixed[/bold] and
    [bold]--plain[/bold] are for others.

    Examples:
      hvd-elastic submit -- python train.py --lr 0.1

      hvd-elastic submit --name resnet --priority 2 --min-np 2 --epochs 90 -- python train.py

      hvd-elastic submit --array 0-9 -- python train.py --seed {index}

      hvd-elastic submit --plain --after ok:resnet -- python evaluate.py
    """
    from hvd_elastic.jobs.messages import Submit
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.server import ask_daemon

    least, most = _bounds(np, min_np, max_np, fixed=fixed, plain=plain)
    options = RunOptions(
        command=command,
        checkpoint_every_s=checkpoint_every_s,
        checkpoint_folder=checkpoint_folder,
        python=python,
        failure_timeout_s=failure_timeout_s,
        audit=audit,
        min_np=least,
        max_np=most,
    )
    options.check()
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not valid: it has 1 to 50 of the characters A-Z a-z 0-9 . _ - and "
            "starts with a letter or a digit"
        )
    place = open_cluster(cluster)
    request = _request(
        options,
        name or _name_of(command or []),
        kind="plain" if plain else "fixed" if fixed else "elastic",
        priority=priority,
        deadline=None if deadline is None else time.time() + parse_duration("--deadline", deadline),
        epochs=epochs,
        target_examples=target_examples,
        after=_parse_after(after or [], place),
        retries=retries,
    )
    requests = [request] if array is None else _array(request, array)
    answer = ask_daemon(place, Submit(requests, dict(os.environ)))
    if as_json:
        print(json.dumps({"jobs": answer.jobs, "run_ids": answer.data, "cluster": place.name}))
        return
    for run_id in answer.data[:_SHOWN]:
        print(run_id)
    first = answer.jobs[0]
    print(f"{answer.message}: hvd-elastic queue, hvd-elastic why {first}", file=sys.stderr)


def _bounds(
    np: int | None, min_np: int, max_np: int | None, *, fixed: bool, plain: bool
) -> tuple[int, int | None]:
    if fixed and plain:
        raise UsageError("--fixed is for a training script, --plain for any command: give one")
    if plain and (np or 1, min_np, max_np or 1) != (1, 1, 1):
        raise UsageError(
            "a --plain command is one process in one slot: leave --np, --min-np and --max-np out"
        )
    if fixed and (min_np != 1 or max_np is not None):
        raise UsageError("a --fixed job has one size: give --np, not --min-np or --max-np")
    if np is not None and not (fixed or plain):
        raise UsageError(
            "--np is the size of a --fixed job; an elastic one has --min-np and --max-np"
        )
    if fixed and np is None:
        raise UsageError("--fixed needs the number of slots: give --np")
    if plain:
        return 1, 1
    return (np, np) if fixed and np is not None else (min_np, max_np)


def _request(options: RunOptions, name: str, *, kind: str, **more: Any) -> JobRequest:
    from hvd_elastic.jobs.job import JobKind, JobRequest

    fields = asdict(options.spec())
    return JobRequest(
        name=name,
        spec=fields,
        kind=JobKind(kind),
        min_np=options.min_np,
        max_np=options.max_np,
        **more,
    )


def _name_of(command: Sequence[str]) -> str:
    """Return the name of a job without a name.

    >>> _name_of(["python", "-u", "train/resnet.py", "--lr", "1"]), _name_of(["sleep", "3"])
    ('resnet', 'sleep')
    """
    scripts = [word for word in command if word.endswith(".py")]
    stem = Path(scripts[0] if scripts else command[0]).stem
    return _UNSUITABLE.sub("-", stem).strip("-.")[:50] or "job"


def _array(request: JobRequest, text: str) -> list[JobRequest]:
    from dataclasses import replace

    indices: list[int] = []
    for part in text.split(","):
        found = _ARRAY.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"--array takes indices as in 0-9, 0-20:5 or 1,4,7, not '{text}'")
        first, last, step, single = found.groups()
        if single is not None:
            indices.append(int(single))
        else:
            if int(last) < int(first) or step == "0":
                raise UsageError(f"--array: the range '{part}' is empty")
            if int(last) - int(first) > _MOST_JOBS:
                raise UsageError(f"--array: '{part}' has more than {_MOST_JOBS:,} indices")
            indices += range(int(first), int(last) + 1, int(step or 1))
    found_jobs = []
    for index in dict.fromkeys(indices):
        words = [str(word).replace("{index}", str(index)) for word in request.spec["command"]]
        found_jobs.append(
            replace(request, spec={**request.spec, "command": words}, array_index=index)
        )
    return found_jobs


def _parse_after(texts: Sequence[str], place: ClusterFolder) -> tuple[After, ...]:
    from hvd_elastic.jobs.job import After
    from hvd_elastic.jobs.store import JobStore

    found = []
    for text in texts:
        outcome, colon, job = text.partition(":")
        if outcome not in ("ok", "any", "fail") or not colon or not job:
            raise UsageError(
                f"--after {text!r} is not valid: give ok:JOB, any:JOB or fail:JOB, such as ok:12"
            )
        known = JobStore.read_only(place.database).find(job)
        if not known:
            raise UsageError(f"--after {text}: there is no job {job!r}; see: hvd-elastic queue")
        found.append(After(outcome, known[-1].number))
    return tuple(found)


# -- looking ---------------------------------------------------------------------------------


def queue(
    all_: Annotated[bool, typer.Option("--all", "-a", help="all jobs that ever were")] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of a cluster: those that run, those that wait and why, and the last ones.

    Examples:
      hvd-elastic queue

      hvd-elastic queue --all --json
    """
    place, store = _open(cluster)
    active = store.active()
    ended = store.ended(None if all_ else _SHOWN)
    alive = place.daemon_alive()
    if as_json:
        print(json.dumps([job_fields(job) for job in [*active, *ended]], indent=2))
        return
    if not alive:
        print(
            f"cluster {place.name} has no daemon; jobs that run go on, none is started. Start it "
            f"with: hvd-elastic up {place.daemon().get('hostfile', 'HOSTFILE')}",
            file=sys.stderr,
        )
    if not active and not ended:
        print(f"no job was submitted to cluster {place.name} yet")
        return
    width = max(len(job.run_id) for job in [*active, *ended])
    print(f"{'JOB':>6}  {'RUN':<{width}}  {'STATUS':<9}  SLOTS  {'AGE':<9}  REASON")
    order = sorted(active, key=lambda job: (job.status.value != "running", job.number))
    for job in [*order, *ended]:
        print(_row(job, width))
    left = 0 if all_ else store.count_ended() - len(ended)
    if left > 0:
        print(f"and {count(left, 'older job')}: hvd-elastic queue --all")


def _row(job: Job, width: int) -> str:
    now = time.time()
    age = duration_words(max(0.0, now - job.submitted_at))
    slots = str(job.slots) if job.slots else ""
    reason = job.message or job.reason
    if job.stop is not None:
        reason = f"ends: {reason}"
    elif job.eta is not None:
        what = "ends" if job.status.value == "running" else "starts"
        reason += f" ({what} in about {duration_words(max(0.0, job.eta - now))})"
    status = job.status.value
    return f"{job.number:>6}  {job.run_id:<{width}}  {status:<9}  {slots:>5}  {age:<9}  {reason}"


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
        "after": [f"{each.outcome}:{each.job}" for each in request.after],
        "array_index": request.array_index,
        "attempts": job.attempts,
        "failures": job.failures,
        "retries": request.retries,
        "stopping": job.stop.value if job.stop else None,
        "submitted": job.submitted_at,
        "started": job.started_at,
        "ended": job.ended_at,
        "command": request.words,
        "cwd": request.spec.get("cwd"),
    }


def why(
    job: Annotated[str, typer.Argument(metavar="JOB", help="number, run id or name of a job")],
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Say why a job waits, holds the slots that it holds, or has ended as it has.

    Examples:
      hvd-elastic why 12

      hvd-elastic why resnet --json
    """
    place, store = _open(cluster)
    (found,) = _find(store, place, [job])[-1:]
    if as_json:
        print(json.dumps(job_fields(found), indent=2))
        return
    for label, value in _why_rows(found):
        print(f"{label:<10} {value}")
    if not place.daemon_alive():
        print(f"{'daemon':<10} none: nothing is decided until hvd-elastic up")


def _why_rows(job: Job) -> list[tuple[str, str]]:
    request, now = job.request, time.time()
    rows = [("job", f"{job.number} ({job.run_id}), {job.status.value}")]
    rows.append(("command", shlex.join(request.words)))
    if job.reason:
        rows.append(("reason", job.reason))
    if job.message:
        rows.append(("ended", job.message))
    if job.held:
        held = ", ".join(f"{host}: {slots}" for host, slots in job.held.items())
        rows.append(("slots", held))
    if job.eta is not None:
        what = "ends" if job.status.value == "running" else "starts"
        rows.append(("expected", f"{what} in about {duration_words(max(0.0, job.eta - now))}"))
    elif job.status.value == "running":
        rows.append(
            ("expected", "end not known: nothing measured yet, or no --epochs or --target-examples")
        )
    elif job.status.value == "queued":
        rows.append(("expected", "start not known: no job before it says when it ends"))
    most = request.max_np or "all"
    limits = f"{request.min_np} to {most} slots, priority {request.priority:g}"
    if request.deadline is not None:
        left_s = request.deadline - now
        left = f"in {duration_words(left_s)}" if left_s > 0 else "over"
        limits += f", deadline {left}"
    rows.append(("asked", limits))
    if request.after:
        rows.append(("after", ", ".join(f"{each.outcome}:{each.job}" for each in request.after)))
    if job.attempts > 1 or job.failures:
        rows.append(
            ("attempts", f"{job.attempts}; failed {job.failures} of {request.retries + 1} times")
        )
    if job.attempts:
        rows.append(("more", f"hvd-elastic status {job.run_id}, logs, attach, report"))
    return rows


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="give up after, such as 90m")
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
    numbers = [job.number for job in _find(store, place, jobs)]
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while any(status.active for status in store.statuses(numbers).values()):
        if deadline is not None and time.monotonic() > deadline:
            raise RunError(f"not all jobs have ended within {timeout}; see: hvd-elastic queue")
        time.sleep(_POLL_S)
    ended = list(store.jobs(numbers).values())
    if as_json:
        print(json.dumps([job_fields(job) for job in ended], indent=2))
    else:
        for job in ended:
            print(f"job {job.number} ({job.run_id}) {job.status.value}: {job.message}")
    if any(job.status.value != "succeeded" for job in ended):
        raise typer.Exit(1)


# -- changing --------------------------------------------------------------------------------


def cancel(jobs: JobsArgument, cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Cancel jobs that wait, and end those that run, after a last checkpoint.

    Examples:
      hvd-elastic cancel 12

      hvd-elastic cancel 20-29 resnet
    """
    from hvd_elastic.jobs.messages import Cancel

    place, store = _open(cluster)
    found = [job.number for job in _find(store, place, jobs, active=True)]
    _ask(place, Cancel(found, getpass.getuser()), as_json)


def requeue(
    jobs: JobsArgument,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="ok|any|fail:JOB", help="wait for these jobs instead"),
    ] = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Put jobs back into the queue; they go on from their last checkpoint.

    A job that runs ends after a checkpoint first. A job that has ended runs with the environment
    of this shell.

    Examples:
      hvd-elastic requeue 12

      hvd-elastic requeue 12 --after ok:15
    """
    from hvd_elastic.jobs.messages import Requeue

    place, store = _open(cluster)
    found = [job.number for job in _find(store, place, jobs)]
    waits = None if after is None else list(_parse_after(after, place))
    _ask(place, Requeue(found, dict(os.environ), waits), as_json)


def priority(
    jobs: JobsArgument,
    to: Annotated[str, typer.Option("--to", metavar="NUMBER", help="the priority, above 0")],
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Change the priority of jobs that wait or run.

    Examples:
      hvd-elastic priority 12 --to 4
    """
    from hvd_elastic.jobs.messages import SetPriority

    wanted = parse_number("--to", to, above=True)
    place, store = _open(cluster)
    found = [job.number for job in _find(store, place, jobs, active=True)]
    _ask(place, SetPriority(found, wanted), as_json)


def _ask(place: ClusterFolder, request: Any, as_json: bool) -> None:
    from hvd_elastic.jobs.server import ask_daemon

    answer = ask_daemon(place, request)
    if as_json:
        print(json.dumps({"ok": True, "message": answer.message, "jobs": answer.jobs}))
    else:
        print(answer.message)


def _open(cluster: str | None) -> tuple[ClusterFolder, JobStore]:
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.store import JobStore

    place = open_cluster(cluster)
    return place, JobStore.read_only(place.database)


def _find(
    store: JobStore, place: ClusterFolder, texts: Sequence[str], *, active: bool = False
) -> list[Job]:
    """Return the jobs that a user names.

    Args:
        store: the queue.
        place: the cluster, for messages.
        texts: numbers, ranges of numbers, run ids or names.
        active: whether a name stands for its jobs that wait or run only.

    Raises:
        RunError: there is no such job.
    """
    found: dict[int, Job] = {}
    for text in texts:
        first, dash, last = text.partition("-")
        if dash and first.isdigit() and last.isdigit():
            least = parse_whole_number("JOB", first)
            most = parse_whole_number("JOB", last, least)
            jobs = list(store.between(least, most).values())
        else:
            jobs = store.find(text)
        if active and len(jobs) > 1:
            jobs = [job for job in jobs if job.status.active] or jobs[-1:]
        if not jobs:
            raise RunError(
                f"cluster {place.name} has no job {text!r}; see: hvd-elastic queue --all"
            )
        found |= {job.number: job for job in jobs}
    return list(found.values())
