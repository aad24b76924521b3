"""Know the hosts of a cluster: their slots, who holds or occupies them, and which are left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.jobs.job import Job, JobKind, JobStatus
from hvd_elastic.jobs.operator_state import HEALTH, Drained, OperatorState
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import RunHosts, RunProgress
from hvd_elastic.jobs.rights import user_name
from hvd_elastic.jobs.slot_plan import Slots
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.wording import removed_host_words
from hvd_elastic.run_events import HostFaults


@dataclass(frozen=True)
class Expansion:
    """What a cluster may grow to, if it asks for hosts.

    Attributes:
        hosts: all hosts that it may have at a time, under names of no meaning.
        preemption: what ``--preemption`` is on them unless a job says otherwise; None: nothing.
    """

    hosts: tuple[Host, ...] = ()
    preemption: str | None = None


@dataclass(frozen=True)
class Use:
    """Slots of the hosts that a job uses.

    Attributes:
        occupied: slots of each host in which processes of its run live or start.
        lost: hosts that its run has lost.
    """

    job: Job
    occupied: Slots
    lost: Collection[str] = ()

    def taken(self, host: str) -> int:
        """Return the slots of a host that nobody else may have."""
        return max(self.job.held.get(host, 0), self.occupied.get(host, 0))


class ClusterHosts:
    """The hosts of a cluster, also those that were taken out of its hostfile and are still used.

    Args:
        hostfile: the hostfile; it is read again whenever it is saved.
        warn: called with the reason when it cannot be used.

    Raises:
        HostfileError: the hostfile cannot be used.
    """

    def __init__(self, hostfile: Path, warn: Callable[[str], None]) -> None:
        self._watch = HostfileWatch(hostfile.absolute(), warn)
        self._watch.read()
        self._removed: dict[str, Host] = {}

    @property
    def listed(self) -> Mapping[str, Host]:
        """Hosts of the hostfile that have slots, by name."""
        return self._watch.hosts

    @property
    def known(self) -> Mapping[str, Host]:
        """The same, and hosts that were taken out of the hostfile."""
        return {**self._removed, **self.listed}

    def changed(self) -> bool:
        """Read the hostfile if it was saved; return whether that succeeded."""
        before = self.listed
        if not self._watch.changed(time.monotonic()):
            return False
        self.remember(before.values())
        return True

    def remember(self, hosts: Iterable[Host]) -> None:
        """Note hosts that a job may still use, although the hostfile has them no more."""
        self._removed |= {host.name: host for host in hosts}

    def slots(self, uses: Iterable[Use], closed: Collection[str] = ()) -> dict[str, int]:
        """Return the slots of each host that may be held.

        A plain command cannot move, so it keeps its slot until it ends, whatever the hostfile says.

        Args:
            uses: what each job that runs uses.
            closed: hosts that are drained.
        """
        kept: Counter[str] = Counter()
        for use in uses:
            if use.job.request.kind is JobKind.PLAIN:
                kept.update({h: n for h, n in use.job.held.items() if h not in use.lost})
        found = {name: host.slots for name, host in self.listed.items() if name not in closed}
        return {host: max(found.get(host, 0), kept[host]) for host in {**found, **kept}}

    def rows(
        self,
        uses: Iterable[Use],
        lost: Mapping[str, str],
        silent: Mapping[str, str] | None = None,
        drained: Mapping[str, Drained] | None = None,
        faults: Mapping[str, HostFaults] | None = None,
        barred: Collection[tuple[int | None, str]] = (),
    ) -> list[dict[str, Any]]:
        """Return what there is to say of each host that has slots or is used.

        Args:
            lost: hosts that cannot be used, with the cause.
            silent: hosts of which it is not known whether they are lost, with the cause.
            drained: hosts that are drained or will be.
            faults: faults of the hardware of hosts.
            barred: users, and hosts on which their jobs can start nothing.
        """
        drained, now = drained or {}, time.time()
        away = {host: ("silent", cause) for host, cause in (silent or {}).items()}
        away |= {host: ("lost", cause) for host, cause in lost.items()}
        uses = [*uses]
        names = dict.fromkeys(self.listed)
        names |= dict.fromkeys(h for use in uses for h in [*use.job.held, *use.occupied])
        rows = []
        for name in names:
            row = self._row(name, uses, away.get(name))
            told, why = (faults or {}).get(name), drained.get(name)
            row["faults"] = [fault.text for fault in told.faults] if told is not None else []
            words = [] if row["cause"] is None else [row["cause"]]
            if row["faults"] and (why is None or why.by != HEALTH):  # else they are the reason
                words.append(f"unhealthy: {'; '.join(row['faults'])}")
            words += [barred_words(name, user) for user, host in barred if host == name]
            if why is not None:
                words.insert(0, why.words(now))
                if why.at <= now:
                    used = row["jobs"] or row["occupied"]
                    row |= {"free": 0, "state": "leaving" if used else "drained"}
            row["cause"] = "; ".join(words) or None
            rows.append(row)
        return rows

    def _row(self, name: str, uses: Iterable[Use], away: tuple[str, str] | None) -> dict[str, Any]:
        here = [use for use in uses if use.taken(name)]
        host = self.listed.get(name)
        slots = 0 if host is None else host.slots
        free = max(0, slots - sum(use.taken(name) for use in here))
        state, cause = away or ("up", None)
        if away is not None:
            free = 0
        elif host is None:
            ends = [use.job.run_id for use in here if use.job.request.kind is JobKind.PLAIN]
            leaves = [use.job.run_id for use in here if use.job.request.kind is not JobKind.PLAIN]
            state, cause = "leaving", removed_host_words(ends, leaves)
        return {
            "host": name,
            "slots": slots,
            "state": state,
            "free": free,
            "users": sorted({user_name(use.job.request.user) for use in here}),
            "jobs": {use.job.run_id: use.job.held[name] for use in here if use.job.held.get(name)},
            "occupied": {
                use.job.run_id: use.occupied[name] for use in here if use.occupied.get(name)
            },
            "cause": cause,
        }


class BarredHosts:
    """Hosts on which runs of a user can start nothing, for lack of a key for example.

    What one job finds holds for all jobs of the user with the same interpreter, unless one of them
    has processes there: that another interpreter is missing is the fault of its job alone.

    Args:
        jobs: jobs that have begun, and the hosts of their runs.
        usable: hosts that others can use.
        now: present time [Unix s].

    Attributes:
        causes: why runs of a user, by id, can start nothing on a host where it has no processes.
    """

    def __init__(
        self, jobs: Iterable[tuple[Job, RunHosts]], usable: Collection[str], now: float
    ) -> None:
        self._of_job: dict[int, Collection[str]] = {}
        found: dict[tuple[_Way, str], str] = {}
        used = set()
        for job, hosts in jobs:
            way = _way(job)
            used |= {(way, host) for host in hosts.occupied}
            if barred := {h: why for h, why in hosts.barred(now).items() if h in usable}:
                self._of_job[job.number] = barred.keys()
                found |= {(way, host): cause for host, cause in barred.items()}
        self._of_way = found.keys() - used
        used_by = {(user, host) for (user, _), host in used}
        self.causes = {
            (user, host): cause
            for ((user, _), host), cause in found.items()
            if (user, host) not in used_by
        }

    def of(self, job: Job) -> frozenset[str]:
        """Return the hosts of which a job gets no slots."""
        mine = _way(job)
        theirs = (host for way, host in self._of_way if way == mine)
        return frozenset({*theirs, *self._of_job.get(job.number, ())})


_Way = tuple[int | None, str]
"""A user, and the interpreter of the agents of a job."""


def _way(job: Job) -> _Way:
    return job.request.user, str(job.request.spec.get("python", ""))


def barred_words(host: str, user: int | None, why: str = "") -> str:
    """Return that jobs of a user can start nothing on a host, and why or how to find out."""
    name = user_name(user)
    why = why or f"{name} sees why with: checkclust"
    return f"host {host} starts nothing of user {name} ({why})"


def rows_without_daemon(place: ClusterFolder) -> list[dict[str, Any]]:
    """Return the rows of the hosts while nobody watches them: their state is not known.

    Raises:
        HostfileError: the hostfile of the last daemon cannot be used.
        RunError: there was none.
    """
    hostfile = place.daemon().get("hostfile")
    if hostfile is None:
        raise RunError(f"cluster {place.name} has no daemon: hvd-elastic up HOSTFILE starts one")
    store = JobStore.read_only(place.database)
    uses = []
    for job in store.with_status(JobStatus.RUNNING):
        progress = RunProgress()
        progress.add(RunFolder(runs_folder() / job.run_id).iter_events())
        progress.poll()
        uses.append(Use(job, progress.hosts.occupied, progress.hosts.lost))
    store.close()
    drained = OperatorState(place.operator_state).drained
    rows = ClusterHosts(Path(hostfile), lambda _: None).rows(uses, {}, drained=drained)
    return [{**row, "state": "unknown" if row["state"] == "up" else row["state"]} for row in rows]
