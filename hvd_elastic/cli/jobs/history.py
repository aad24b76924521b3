"""Implement ``hvd-elastic history``: what the jobs of a cluster took."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Annotated

from hvd_elastic.cli.jobs.daemon import ClusterOption
from hvd_elastic.cli.options import AsJson, option, parse_duration
from hvd_elastic.cli.output import print_json, table_lines
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import date_words, duration_words
from hvd_elastic.jobs.history import PastJob, Total, past_jobs, totals
from hvd_elastic.jobs.place import open_cluster

_KEYS: dict[str, Callable[[PastJob, float], str]] = {
    "user": lambda job, _: job.user,
    "month": lambda job, now: date_words(now if job.ended is None else job.ended)[:7],
}


def history(
    since: Annotated[
        str | None,
        option("leave out jobs that ended longer ago, such as 7d", "--since", metavar="TIME"),
    ] = None,
    user: Annotated[str | None, option("only the jobs of this user", "--user")] = None,
    by: Annotated[str, option("a line for each: job, user or month (of the end)", "--by")] = "job",
    as_csv: Annotated[bool, option("Print comma-separated values instead of text", "--csv")] = (
        False
    ),
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Say what the jobs of a cluster took: wait, time, slot-hours, what failures cost, and money.

    Examples:
      hvd-elastic history --since 7d

      hvd-elastic history --by month --csv
    """
    if by != "job" and by not in _KEYS:
        raise UsageError(f"--by {by!r} is not known; valid: job, {', '.join(_KEYS)}")
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of output: give one of them")
    now = time.time()
    earliest = 0.0 if since is None else now - parse_duration("--since", since)
    place = open_cluster(cluster)
    jobs = past_jobs(place, now, earliest)
    if user is not None:
        jobs = [job for job in jobs if job.user == user]
    keys = {} if by == "job" else {job.job: _KEYS[by](job, now) for job in jobs}
    rows: Sequence[PastJob | Total] = jobs if by == "job" else totals(jobs, keys)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif as_csv:
        kind = PastJob if by == "job" else Total
        table = csv.DictWriter(sys.stdout, [field.name for field in fields(kind)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    elif not rows:
        whose = "" if user is None else f" of {user}"
        print(f"cluster {place.name} has no job{whose} in that time")
    else:
        for line in history_lines(rows, by):
            print(line)


def history_lines(rows: Sequence[PastJob | Total], by: str) -> list[str]:
    """Return the lines of the table, the head first."""
    cells = [_head(by), *(_cells(row) for row in rows)]
    last = len(cells[0]) - 1
    return table_lines(cells, left={*range(last - 5), last})


def _head(by: str) -> list[str]:
    first = ["JOB", "RUN", "USER", "SUBMITTED"] if by == "job" else [by.upper()]
    return [*first, "WAIT", "TIME", "SLOT-H", "LOST", "COST", "END" if by == "job" else "JOBS"]


def _cells(row: PastJob | Total) -> list[str]:
    numbers = [
        duration_words(row.wait_s),
        duration_words(row.run_s),
        f"{row.slot_h:.2f}",
        _amount(row.lost_slot_h),
        # The hosts of a job that has had none may have no price either.
        _amount(row.cost if isinstance(row, Total) or row.started is not None else None),
    ]
    if isinstance(row, Total):
        failed = f", {row.failed} failed" if row.failed else ""
        return [row.key, *numbers, f"{row.jobs}{failed}"]
    message = " ".join(row.message.split())
    end = f"{row.status}: {message}" if message else row.status
    run = row.run_id or f"{row.name}-{row.job}"
    return [str(row.job), run, row.user, date_words(row.submitted)[:16], *numbers, end]


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
