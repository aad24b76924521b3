"""Know the hosts of a cluster: their slots, who holds or occupies them, and which are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.jobs.job import Job, JobKind, JobStatus
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import RunProgress
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.wording import removed_host_words

Slots = Mapping[str, int]
"""Number of slots on each host."""


@dataclass(frozen=True)
class Claim:
    """The slots of one job.

    Attributes:
        occupied: slots in which processes of its run live.
    """

    wanted: Slots
    held: Slots
    occupied: Slots
    min_slots: int = 1


def grant_slots(claims: Mapping[str, Claim], hosts: Slots) -> dict[str, dict[str, int]]:
    """Return the slots that each job may have now, on the way to those it is to have.

    A job that shrinks does so at once. A job grows into a slot when no process of another job is
    left in it. A job that moves keeps its minimum until its new slots are free.

    Args:
        claims: the jobs, those that come first in case of doubt first.
        hosts: slots of the cluster; jobs lose their slots on other hosts.

    >>> shrinks = Claim({"a": 1}, {"a": 2}, {"a": 2})
    >>> grows = Claim({"a": 1}, {}, {})
    >>> grant_slots({"one": shrinks, "two": grows}, {"a": 2})
    {'one': {'a': 1}, 'two': {}}
    """
    kept = {name: _kept(claim, hosts) for name, claim in claims.items()}
    free = dict(hosts)
    for name, claim in claims.items():
        for host in {*kept[name], *claim.occupied} & free.keys():
            free[host] -= max(kept[name].get(host, 0), claim.occupied.get(host, 0))
    granted = {}
    for name, claim in claims.items():
        now = dict(kept[name])
        for host, wanted in claim.wanted.items():
            has = now.get(host, 0)
            own = max(0, claim.occupied.get(host, 0) - has)  # it is about to leave them
            more = min(wanted - has, own + max(0, free.get(host, 0)))
            if more > 0:
                now[host] = has + more
                free[host] -= max(0, more - own)
        enough = sum(min(now.get(host, 0), slots) for host, slots in claim.wanted.items())
        if enough >= claim.min_slots:  # what was kept for the move is not needed any more
            now = {host: min(slots, claim.wanted.get(host, 0)) for host, slots in now.items()}
        granted[name] = {host: slots for host, slots in now.items() if slots}
    return granted


def awaited_slots(
    claims: Mapping[str, Claim], granted: Mapping[str, Slots]
) -> dict[str, dict[str, list[str]]]:
    """Return for each job that has to wait for slots which jobs have to leave them, by host.

    >>> claims = {"one": Claim({"a": 1}, {"a": 2}, {"a": 2}), "two": Claim({"a": 1}, {}, {})}
    >>> awaited_slots(claims, grant_slots(claims, {"a": 2}))
    {'two': {'a': ['one']}}
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, claim in claims.items():
        for host, wanted in claim.wanted.items():
            if granted[name].get(host, 0) < wanted:
                found.setdefault(name, {})[host] = [
                    other
                    for other, theirs in claims.items()
                    if other != name
                    and max(granted[other].get(host, 0), theirs.occupied.get(host, 0))
                    > theirs.wanted.get(host, 0)
                ]
    return found


def _kept(claim: Claim, hosts: Slots) -> dict[str, int]:
    """Return what a job keeps of the slots that it holds."""
    held = {host: min(slots, hosts.get(host, 0)) for host, slots in claim.held.items()}
    kept = {host: min(slots, claim.wanted.get(host, 0)) for host, slots in held.items()}
    missing = claim.min_slots - sum(kept.values()) if any(claim.wanted.values()) else 0
    for host, slots in held.items():
        more = max(0, min(missing, slots - kept[host]))
        kept[host] += more
        missing -= more
    return {host: slots for host, slots in kept.items() if slots}


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
        if not self._watch.changed():
            return False
        self.remember(before.values())
        return True

    def remember(self, hosts: Iterable[Host]) -> None:
        """Note hosts that a job may still use, although the hostfile has them no more."""
        self._removed |= {host.name: host for host in hosts}

    def slots(self, uses: Iterable[Use]) -> dict[str, int]:
        """Return the slots of each host that may be held.

        A plain command cannot move, so it keeps its slot until it ends, whatever the hostfile says.

        Args:
            uses: what each job that runs uses.
        """
        kept: Counter[str] = Counter()
        for use in uses:
            if use.job.request.kind is JobKind.PLAIN:
                kept.update({h: n for h, n in use.job.held.items() if h not in use.lost})
        found = {host.name: host.slots for host in self.listed.values()}
        return {host: max(found.get(host, 0), kept[host]) for host in {**found, **kept}}

    def rows(
        self,
        uses: Iterable[Use],
        lost: Mapping[str, str],
        silent: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """Return what there is to say of each host that has slots or is used.

        Args:
            lost: hosts that cannot be used, with the cause.
            silent: hosts of which it is not known whether they are lost, with the cause.
        """
        away = {host: ("silent", cause) for host, cause in (silent or {}).items()}
        away |= {host: ("lost", cause) for host, cause in lost.items()}
        uses = [*uses]
        names = dict.fromkeys(self.listed)
        names |= dict.fromkeys(h for use in uses for h in [*use.job.held, *use.occupied])
        return [self._row(name, uses, away.get(name)) for name in names]

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
            "jobs": {use.job.run_id: use.job.held[name] for use in here if use.job.held.get(name)},
            "occupied": {
                use.job.run_id: use.occupied[name] for use in here if use.occupied.get(name)
            },
            "cause": cause,
        }


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
    rows = ClusterHosts(Path(hostfile), lambda _: None).rows(uses, {})
    return [{**row, "state": "unknown" if row["state"] == "up" else row["state"]} for row in rows]
