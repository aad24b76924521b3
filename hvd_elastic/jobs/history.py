"""What the jobs of a cluster took: waiting, time, slots, money, and what failures cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.hostfile import Host, parse_hostfile
from hvd_elastic.jobs.job import JobStatus
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.rights import ClusterEvents, open_queue, user_name
from hvd_elastic.records.cluster import ClusterSummary, summarize_cluster
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import summarize


@dataclass(frozen=True)
class PastJob:
    """What one job took; or several, in a sum.

    Attributes:
        job: its number.
        user: whose account it ran as.
        status: ``queued``, ``running``, or how it has ended.
        submitted, started, ended: times [Unix s]; None: not yet.
        wait_s: from its submission to its first start, or until now [s].
        run_s: how long it held slots [s].
        slot_h: slots times hours that it held.
        lost_slot_h: the part of them that failures took, as its run tells; None: its run folder is
            gone.
        cost: price of its part of the hosts, in the currency of the hostfile; None: a host that it
            used has no ``price=`` there now.
        message: how it ended.
    """

    job: int
    run_id: str
    name: str
    user: str
    status: str
    submitted: float
    started: float | None
    ended: float | None
    wait_s: float
    run_s: float
    slot_h: float
    lost_slot_h: float | None
    cost: float | None
    message: str


@dataclass(frozen=True)
class Total:
    """What several jobs took together; see :class:`PastJob`.

    Attributes:
        key: the user or the month that they have in common.
        failed: how many of the jobs failed.
    """

    key: str
    jobs: int
    failed: int
    wait_s: float
    run_s: float
    slot_h: float
    lost_slot_h: float | None
    cost: float | None


def past_jobs(place: ClusterFolder, now: float, since: float = 0.0) -> list[PastJob]:
    """Return the jobs of a cluster that have not ended before a time, oldest first.

    Args:
        now: the present time [Unix s].
        since: that time [Unix s].

    Raises:
        RunError: the events of the cluster cannot be read.
    """
    owner = user_name(place.path.stat().st_uid)
    users = {}
    if place.is_others or place.database.exists():
        with contextlib.closing(open_queue(place)) as store:
            # In the order of a job's life, so that none is missed that moves on meanwhile.
            active = (JobStatus.QUEUED, JobStatus.RUNNING)
            jobs = [*(job for each in active for job in store.with_status(each)), *store.ended()]
            for job in jobs:
                uid = job.request.user
                users[job.number] = owner if uid is None else user_name(uid)
    summary = summarize_cluster(ClusterEvents(place), place.name)
    hosts: dict[str, Host] = {}
    with contextlib.suppress(HvdElasticError):  # else costs are not known
        hosts = {host.name: host for host in parse_hostfile(place.daemon().get("hostfile", ""))}
    return [
        _with_losses(job)
        for job in jobs_of(summary, hosts, users, now)
        if job.ended is None or job.ended >= since
    ]


def jobs_of(
    summary: ClusterSummary, hosts: Mapping[str, Host], users: Mapping[int, str], now: float
) -> Iterator[PastJob]:
    """Yield what the jobs of a cluster took, without what failures cost.

    Args:
        hosts: hosts of its hostfile, for their prices and slots.
        users: whose account each ran as, by number; others were of this user.
        now: the present time [Unix s].
    """
    began = summary.started or now
    now_s = max(0.0, now - began)
    costs: dict[str, float | None] = {}
    for hold in summary.all_holds(now_s):
        host, before = hosts.get(hold.host), costs.get(hold.job, 0.0)
        if before is None or host is None or host.price is None or not host.slots:
            costs[hold.job] = None
            continue
        hours = (hold.end_s - hold.begin_s) / 3600
        costs[hold.job] = before + hours * host.price * hold.slots / host.slots
    for job in summary.jobs.values():
        run_s, slot_s = summary.slot_s_of(job, now_s)
        yield PastJob(
            int(job.job),
            job.run_ids[-1] if job.run_ids else "",
            job.name,
            users.get(int(job.job), user_name(None)),
            job.status,
            began + job.submitted_s,
            None if job.started_s is None else began + job.started_s,
            None if job.ended_s is None else began + job.ended_s,
            job.wait_s(now_s),
            run_s,
            slot_s / 3600,
            None,
            costs.get(job.job, 0.0),
            job.message if job.ended_s is not None else job.reason,
        )


def totals(jobs: Iterable[PastJob], keys: Mapping[int, str]) -> list[Total]:
    """Return what jobs took together, for each key, in the order of the keys.

    A sum of which a part is not known is not known.

    Args:
        keys: key of each job, by number.
    """
    groups: dict[str, list[PastJob]] = {}
    for job in jobs:
        groups.setdefault(keys[job.job], []).append(job)
    return [
        Total(
            key,
            len(group),
            sum(job.status == "failed" for job in group),
            sum(job.wait_s for job in group),
            sum(job.run_s for job in group),
            sum(job.slot_h for job in group),
            _sum(job.lost_slot_h for job in group),
            _sum(job.cost for job in group),
        )
        for key, group in sorted(groups.items())
    ]


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _with_losses(job: PastJob) -> PastJob:
    """Add what failures cost a job, from the events of its run."""
    if not job.run_id:
        return replace(job, lost_slot_h=0.0)
    folder = RunFolder(runs_folder() / job.run_id)
    if not folder.events.exists():
        return job
    spent = summarize(folder.iter_events()).spending.by_cause["failures"]
    return replace(job, lost_slot_h=spent.slot_s / 3600)
