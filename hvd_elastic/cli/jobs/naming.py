"""Find the jobs, and the runs of jobs, that a user names on the command line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.jobs.job import Job
from hvd_elastic.jobs.place import ClusterFolder, likely_clusters
from hvd_elastic.own_files import user_words
from hvd_elastic.records.run_folder import RunFolder

if TYPE_CHECKING:
    from hvd_elastic.jobs.store import JobStore


def find_numbers(
    store: JobStore, place: ClusterFolder, texts: Sequence[str], *, active: bool = False
) -> list[int]:
    """Return the numbers of the jobs that a user names.

    Args:
        texts: numbers, ranges of numbers, run ids or names.
        active: whether a name stands for all its jobs that wait or run, and not for those that
            were submitted last under it.

    Raises:
        RunError: there is no such job.
    """
    found: dict[int, None] = {}
    for text in texts:
        first, dash, last = text.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            numbers = store.numbers(int(first), int(last))
        else:
            jobs = store.find(text)
            if len(jobs) > 1:
                going = [job for job in jobs if job.status.active]
                jobs = going if active and going else submitted_last(jobs)
            numbers = [job.number for job in jobs]
        if not numbers:
            raise RunError(
                f"cluster {place.name} has no job {text!r}; see: hvd-elastic queue --all"
            )
        found |= dict.fromkeys(numbers)
    return list(found)


def submitted_last(jobs: Sequence[Job]) -> list[Job]:
    """Return the last one of jobs, with those that were submitted together with it as an array."""
    return [job for job in jobs if job.submitted_at == jobs[-1].submitted_at]


def open_run(words: str | None) -> RunFolder:
    """Return the run that a user names by its id, or by the number or name of its job.

    Args:
        words: what the user has written; None: the newest run. A run id comes first.

    Raises:
        UsageError: this can be neither a run id nor a job.
        RunError: there is no such run, it has not begun, or several are meant.
    """
    if words is None or RunFolder.find(words) is not None:
        return RunFolder.open(words)
    return run_of_job(words) or RunFolder.open(words)  # the latter says which runs there are


def run_of_job(words: str) -> RunFolder | None:
    """Return the run of the job that a user names by number or name; None: there is no such job.

    A name stands for the job that was submitted last under it, in the clusters of
    :func:`~hvd_elastic.jobs.place.likely_clusters`.

    Raises:
        RunError: it has not begun, or several are meant.
    """
    named = _jobs_named(words)
    own = [(place, job) for place, job in named if is_own(place, job)]
    named = own or named
    need_one(words, [job.run_id for _, job in named])
    for place, job in named:
        if not own:
            uid = job.request.user
            owner = user_words(place.path.stat().st_uid if uid is None else uid)
            raise RunError(
                f"job {job.number} ({job.run_id}) belongs to {owner}; its logs, run folder "
                f"and processes are for that user alone. What others see: hvd-elastic why "
                f"{job.number} --cluster {place.name}"
            )
        if not job.attempts:
            raise RunError(
                f"job {job.number} ({job.run_id}) has not begun to run; see: hvd-elastic why "
                f"{job.number}"
            )
        return RunFolder.open(job.run_id)
    return None


def need_one(words: str, run_ids: Sequence[str]) -> None:
    """Raise RunError if words of a user stand for several jobs, whose run ids these are."""
    if len(run_ids) > 1:
        ids = ", ".join(run_ids[:5]) + (", …" if len(run_ids) > 5 else "")
        raise RunError(
            f"{words!r} stands for {len(run_ids)} jobs. Name the run of one of them: {ids}"
        )


def run_id_of(words: str) -> str:
    """Return the id of the run that a user names as for :func:`open_run`.

    Words that name nothing here may be the id of a run that another machine has led.

    Raises:
        UsageError: as of :func:`open_run`.
        RunError: as of :func:`run_of_job`.
    """
    run = RunFolder.find(words) or run_of_job(words)
    return words if run is None else run.run_id


def source_of(words: str) -> str:
    """Return a source of weights as it is named, or the run folder of the job that is named.

    Raises:
        RunError: as of :func:`run_of_job`.
    """
    if Path(words).exists() or (runs_folder() / words).is_dir():
        return words
    run = run_of_job(words)
    return words if run is None else str(run.path)


def is_own(place: ClusterFolder, job: Job) -> bool:
    """Return whether a job of a cluster is this user's."""
    return job.request.user == (os.getuid() if place.is_others else None)


def _jobs_named(words: str) -> list[tuple[ClusterFolder, Job]]:
    from hvd_elastic.jobs.rights import open_queue  # takes time, and most words are run ids

    found: list[tuple[ClusterFolder, Job]] = []
    for place in likely_clusters():
        with contextlib.suppress(RunError):  # a queue that cannot be read says so to its own verbs
            store = open_queue(place)
            with contextlib.closing(store):
                jobs = store.find(words)
                found += [(place, job) for job in submitted_last(jobs)] if jobs else []
    return found
