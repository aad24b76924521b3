"""Have a cluster of jobs ask for machines of a cloud as its jobs need them, and give them back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvd_elastic.engines.cloud.engine import CloudHosts, using
from hvd_elastic.engines.cloud.provider import CloudError
from hvd_elastic.engines.cloud.records import CloudFolder
from hvd_elastic.engines.growth import asking
from hvd_elastic.formatting import duration_words
from hvd_elastic.jobs.hosts import rows_without_daemon
from hvd_elastic.jobs.job import Hosts, JobKind, JobStatus
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.leader.spec import RunSpec

_AS_NEEDED = RunSpec((), "/", policy="goodput")
"""In place of a run: one more machine while all are in use, and none that stays unused."""


class ClusterMachines(CloudHosts):
    """The machines of a cloud as hosts of a cluster.

    Attributes:
        used: addresses of those on which jobs have processes.
    """

    used: frozenset[str] = frozenset()
    may_be_none = False  # the daemon reads the hostfile as if a user had written it

    def in_use(self, grant_id: str) -> bool:
        machine = self._there.get(grant_id)
        return machine is not None and machine.address in self.used


@contextlib.contextmanager
def cloud_cluster(
    place: ClusterFolder, cloud: CloudFolder, hostfile: Path, tell: Callable[[str], None]
) -> Iterator[None]:
    """Write a hostfile with the fewest machines, then change it as the jobs need, to the end.

    Machines that the cluster has asked for are ended with it; if jobs continue without their
    daemon, they stay up to their deadline.

    Args:
        place: the cluster, whose daemon serves in the block.

    Raises:
        RunError: somebody else uses the cloud, or no machine can be had.
    """
    by = f"cluster {place.name}"
    with using(cloud, by, hostfile, _AS_NEEDED, tell, ClusterMachines) as (hosts, growth):

        def note_use() -> None:
            rows = ask_daemon(place, Hosts()).data
            hosts.used = frozenset(row["host"] for row in rows if row["jobs"] or row["occupied"])
            lost = {row["host"] for row in rows if row["state"] == "lost"}
            slots = sum(row["slots"] for row in rows if row["state"] == "up")
            waiting, elastic = _needs(place, slots, hosts.slots)
            now = time.monotonic()
            growth.note_use(hosts.used, lost, now, waiting=waiting, elastic=elastic)

        try:
            hosts.begin_with(growth)
            with asking(growth, note_use, tell):
                yield
        finally:
            rows = rows_without_daemon(place) if place.daemon() else ()
            if any(row["jobs"] or row["occupied"] for row in rows):
                _leave(hosts, place.name, tell)
            else:
                hosts.end()


def _leave(hosts: CloudHosts, cluster: str, tell: Callable[[str], None]) -> None:
    """Have the machines stay for the jobs that continue, and report which will not."""
    name = hosts.machines.definition.name
    try:
        failed = hosts.stay()
    except CloudError as error:
        failed, lost = {"": str(error)}, "the machines"
    else:
        lost = f"machine{'s' * (len(failed) > 1)} {', '.join(failed)}"
    if failed:
        tell(
            f"jobs continue, but {lost} will end within "
            f"{duration_words(hosts.machines.lease_s)}, since the lease could not be renewed: "
            f"{'; '.join(dict.fromkeys(failed.values()))}. Start the daemon again before then: "
            f"hvd-elastic up --cloud {name} --name {cluster}"
        )
    else:
        tell(f"jobs continue, so their machines stay: hvd-elastic cloud down {name}")


def _needs(place: ClusterFolder, slots: int, slots_per_host: int) -> tuple[int, bool]:
    """Return how many hosts waiting jobs lack, and whether running ones may use further hosts.

    Jobs that somebody holds back do not wait. Any other lacks one host at least.
    """
    store = JobStore.read_only(place.database)
    try:
        queued = [job.request for job in store.with_status(JobStatus.QUEUED)]
        lacking = [-(-(each.min_np - slots) // slots_per_host) for each in queued if not each.hold]
        kinds = {job.request.kind for job in store.with_status(JobStatus.RUNNING)}
        return max([1, *lacking]) if lacking else 0, bool(kinds - {JobKind.PLAIN})
    finally:
        store.close()
