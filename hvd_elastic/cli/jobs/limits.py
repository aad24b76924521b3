"""Implement ``hvd-elastic limits``: what each user of a cluster has, and may have at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hvd_elastic.cli.jobs.daemon import ClusterOption
from hvd_elastic.cli.options import AsJson
from hvd_elastic.cli.output import print_json

_LIMITS = ("most_jobs", "most_slots")


def limits(cluster: ClusterOption = None, as_json: AsJson = False) -> None:
    """Show how many jobs and slots each user of a cluster has now, and may have at a time.

    The daemon reads the limits from limits.toml in the folder of the cluster, whenever it is saved.

    Examples:
      hvd-elastic limits
    """
    from hvd_elastic.jobs.job import JobStatus
    from hvd_elastic.jobs.limits import Limits
    from hvd_elastic.jobs.place import open_cluster
    from hvd_elastic.jobs.rights import open_queue, user_name

    place = open_cluster(cluster)
    known = Limits.read(place.limits)
    owner = place.path.stat().st_uid
    jobs, slots = Counter[str](), Counter[str]()
    for job in open_queue(place).with_status(JobStatus.RUNNING):
        name = user_name(owner if job.request.user is None else job.request.user)
        jobs[name] += 1
        slots[name] += job.slots
    rows = []
    for name in sorted({*known.user, *jobs}):
        limit = known.user.get(name, known.each)
        used: dict[str, Any] = {"user": name, "jobs": jobs[name], "slots": slots[name]}
        rows.append(used | {name: getattr(limit, name) for name in _LIMITS})
    if as_json:
        each = {name: getattr(known.each, name) for name in _LIMITS}
        print_json({"each": each, "users": rows})
        return
    each_other = {"user": "each other", "jobs": "", "slots": ""}
    rows.append(each_other | {name: getattr(known.each, name) for name in _LIMITS})
    width = max(len(str(row["user"])) for row in rows)
    print(f"{'USER':<{width}}  JOBS  AT MOST  SLOTS  AT MOST")
    for row in rows:
        most_jobs, most_slots = row["most_jobs"] or "-", row["most_slots"] or "-"
        print(
            f"{row['user']:<{width}}  {row['jobs']:>4}  {most_jobs:>7}  {row['slots']:>5}  "
            f"{most_slots:>7}"
        )
