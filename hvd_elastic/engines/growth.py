"""Ask whoever owns the machines for further hosts, and give them back.

A leader calls this for its run, over three acts of an :class:`Owner`: list, ask and cancel.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_elastic.engines.base import repeating
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary, take_events
from hvd_elastic.run_events import (
    AgentStarted,
    HostDraining,
    HostLost,
    HostReturned,
    ReadEvent,
    RunStarted,
    Warned,
    WorkerJoined,
    WorkerLeft,
    WorkerStandby,
    WorkerStarted,
)

START_S = 60.0
"""Least time that a host must be there before it is left again [s]: workers have to start."""
_LOST_S = 60.0
"""How long a lost host may be gone before another one is asked for [s]."""
_LONGEST_PAUSE_S = 7200.0


@dataclass(frozen=True)
class Grant:
    """A further host that was asked for, and may be granted.

    Attributes:
        grant_id: what its owner calls it, such as the number of a job.
        state: the owner's word for its state.
        host: name of the host; empty while it waits.
        left_s: time until the host is taken away [s].
        asked: the host that was asked for by name; empty: any.
        runs: whether the host can be used.
    """

    grant_id: str
    state: str
    host: str = ""
    left_s: float = math.inf
    asked: str = ""
    runs: bool = False


class Owner(Protocol):
    """Owns the machines: lists, grants and takes back further hosts, and has the run use them."""

    host_word: str
    grant_word: str
    start_s: float | None
    """Time that a host took from the request until it could be used [s]; None: not measured."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts that the run has."""

    def list(self) -> Sequence[Grant]:
        """Return the run's grants that wait or run.

        Raises:
            RunError: the owner does not answer.
        """

    def ask(self, without: Sequence[str], named: str) -> None:
        """Ask for one more host.

        Args:
            without: hosts that the run has.
            named: the host to ask for; empty: any.

        Raises:
            RunError: the owner refuses.
        """

    def cancel(self, grant_ids: Sequence[str]) -> None:
        """Give hosts back, or do not wait for them any longer.

        Raises:
            RunError: the owner does not answer.
        """

    def join_host(self, grant: Grant) -> None:
        """Give the run the host of a grant."""

    def leave_host(self, grant_id: str, *, is_lost: bool) -> None:
        """Take the host of a grant from the run, which then leaves it.

        Args:
            is_lost: whether the host is of no use, since the run lost it for good.
        """

    def in_use(self, grant_id: str) -> bool:
        """Return whether the run is still connected to the host of a grant."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a run's growth.

    Attributes:
        most: most hosts, those that the run began with included.
        slots_per_host: number of processes on each further host.
        leave_before_s: how long before a host is taken away the run leaves it [s].
        give_back_after_s: how long a policy leaves a host unused before it is given back [s].
        named: hosts to ask for by name before any other.
        least: hosts that the run keeps whatever its policy wants.
        most_pending: most grants that are waited for at a time.
        look_s: time between two looks at what is asked for [s].
    """

    most: int
    slots_per_host: int
    leave_before_s: float
    give_back_after_s: float
    named: Sequence[str] = ()
    least: int = 0
    most_pending: int = 4
    look_s: float = 5.0


class Growth:
    """Asks for further hosts of a run, and gives them back.

    Without a policy, a run has as many hosts as its user allows. With ``--policy goodput`` it asks
    for one more whenever all of its hosts are in use; a host that the policy leaves unused is given
    back, and the next one is asked for after a pause, which doubles each time.

    Args:
        limits: how far the run grows.
        tell: called with what is done, in words.
    """

    def __init__(
        self,
        owner: Owner,
        limits: Limits,
        spec: RunSpec,
        tell: Callable[[str], None],
    ) -> None:
        self.run = RunSummary()
        self.look_s = limits.look_s
        self.first: tuple[str, ...] = owner.hosts
        """Hosts that the run began with."""
        self._owner, self._limits, self._spec, self._tell = owner, limits, spec, tell
        self._joined: dict[str, str] = {}
        """Further hosts in the run, by grant."""
        self._leaving: dict[str, str] = {}
        """Hosts that the run has left or not taken, by grant, until they end."""
        self._lost: dict[str, float] = {}
        """When hosts were lost, by name [monotonic s]."""
        self._draining: set[str] = set()
        """Hosts that the run is leaving, for which others are asked at once."""
        self.at_risk: set[str] = set()
        """Hosts that a cloud may take away soon: others are asked for before they go."""
        self._unused: dict[str, float] = {}
        """Since when hosts are unused, by name [monotonic s]."""
        self._warming: set[tuple[str, int]] = set()
        """Workers that have started and are not warm, by host and slot: theirs cannot be used."""
        self._lacking = 1
        """Number of hosts to ask for at a time while all are in use."""
        self._pause_s = 5 * limits.give_back_after_s
        self._not_before = 0.0

    def read_event(self, event: ReadEvent, now: float) -> None:
        """Take an event of the run."""
        take_events(self.run, [event])
        match event:
            case RunStarted():
                self._warming.clear()  # of an earlier leader, which may have told no end
            case WorkerStarted(host=host, local_rank=slot):
                self._warming.add((host, slot))
            case (
                WorkerStandby(host=host, local_rank=slot)
                | WorkerJoined(host=host, local_rank=slot)
                | WorkerLeft(host=host, local_rank=slot)
            ):
                self._warming.discard((host, slot))
            case HostLost(host=host):
                self._lost.setdefault(host, now)
                self._warming = {each for each in self._warming if each[0] != host}
            case AgentStarted(host=host):
                self._lost.pop(host, None)
                self._draining.discard(host)  # of the same name as one that was drained
            case HostDraining(host=host) if self._has(host):
                self._draining.add(host)
            case HostReturned(host=host):
                self._draining.discard(host)
            case Warned(host_at_risk=host) if self._has(host):
                self.at_risk.add(host)

    def _has(self, host: str) -> bool:
        """Return whether the run has a host; an event may be read after the host has left."""
        return host in self.first or host in self._joined.values()

    def note_use(
        self,
        used: Collection[str],
        lost: Collection[str],
        now: float,
        *,
        waiting: int,
        elastic: bool,
    ) -> None:
        """Take what a cluster of jobs uses, in place of the events of a run.

        Args:
            used: hosts on which jobs have processes.
            lost: hosts that cannot be used.
            waiting: number of further hosts that jobs wait for; no host counts as unused then.
            elastic: whether jobs may use further hosts.
        """
        self._lost = {name: self._lost.get(name, now) for name in lost}
        self.run.generation_hosts = self._names(now) if waiting else [*used]
        self.run.size, self._lacking = int(waiting > 0 or elastic), max(1, waiting)

    def adopt(self) -> None:
        """Take the hosts into the run that its last leader has left.

        Raises:
            RunError: as of :meth:`look_at_grants`.
        """
        self._take_started({grant.grant_id: grant for grant in self._grants()}, time.monotonic())

    def look_at_grants(self, now: float) -> None:
        """Look at what is granted, and do what is due.

        Raises:
            RunError: the owner does not answer, or refuses.
        """
        grants = {grant.grant_id: grant for grant in self._grants()}
        self._leaving = {each: host for each, host in self._leaving.items() if each in grants}
        for grant_id in [grant_id for grant_id in self._joined if grant_id not in grants]:
            self._leave(grant_id, f"its {self._owner.grant_word} has ended")
        for grant in grants.values():
            if grant.grant_id in self._joined and grant.left_s <= self._limits.leave_before_s:
                self._leave(grant.grant_id, _nearly_over(grant))
        self._take_started(grants, now)
        self._note_use(now)
        for grant_id in self._unwanted(now):
            is_lost = self._is_lost(self._joined[grant_id], now)
            self._leave(grant_id, "it is given back", is_lost=is_lost)
        for grant_id in self._leaving.keys() & grants.keys():
            if not self._owner.in_use(grant_id):
                self._owner.cancel([grant_id])
        self._ask_for_more(
            [grant for grant in grants.values() if grant.grant_id not in self._leaving], now
        )

    def _grants(self) -> list[Grant]:
        """Return the grants; those with most time come first."""
        return sorted(self._owner.list(), key=lambda grant: grant.left_s, reverse=True)

    # -- hosts that come and go ------------------------------------------------------------

    def _take_started(self, grants: Mapping[str, Grant], now: float) -> None:
        """Take the hosts that were granted into the run, or give them back."""
        ending = {*self._leaving.values()}
        ending |= {host for each, host in self._joined.items() if not self._lasts(grants[each])}
        for grant in grants.values():
            if not grant.runs or grant.grant_id in self._joined or grant.grant_id in self._leaving:
                continue
            if not self._lasts(grant):
                self._cancel(grant, _nearly_over(grant))
            elif grant.host in ending:
                pass  # it is taken when the other grant of the same host has ended
            elif grant.host in self._names(now) or grant.host in self._draining:
                # Two that waited were granted on one host, which has room for both.
                self._cancel(grant, f"{grant.host} is in the run already")
            else:
                self._join(grant)

    def _join(self, grant: Grant) -> None:
        self._owner.join_host(grant)  # first: where it fails, the next look tries it again
        self.first = tuple(name for name in self.first if name != grant.host)  # lost, and back
        self._lost.pop(grant.host, None)
        self._joined[grant.grant_id] = grant.host
        self._tell(f"{grant.host} joins: {self._name(grant.grant_id)} has started")

    def _lasts(self, grant: Grant) -> bool:
        """Return whether there is time to train on a host before it is left again."""
        return grant.left_s >= self._limits.leave_before_s + START_S

    def _cancel(self, grant: Grant, why: str) -> None:
        self._tell(f"{self._name(grant.grant_id)} is cancelled: {why}")
        self._leaving[grant.grant_id] = grant.host

    def _leave(self, grant_id: str, why: str, *, is_lost: bool = False) -> None:
        self._owner.leave_host(grant_id, is_lost=is_lost)  # first, as in _join
        host = self._joined.pop(grant_id)
        self._lost.pop(host, None)
        self._unused.pop(host, None)
        self._draining.discard(host)
        self.at_risk.discard(host)
        self._leaving[grant_id] = host
        self._tell(f"the run leaves {host}: {why} ({self._name(grant_id)})")

    def _note_use(self, now: float) -> None:
        unused = {*self._names(now)} - {*self.run.generation_hosts}
        warming = {host for host, _ in self._warming}
        self._unused = {
            name: now if name in warming else self._unused.get(name, now) for name in unused
        }

    def _names(self, now: float) -> list[str]:
        """Return the hosts of the run that stay: neither drained nor lost for good at its start."""
        return [*self._of_first(now), *self._staying.values()]

    @property
    def _staying(self) -> dict[str, str]:
        """Further hosts in the run that it will keep, by grant."""
        going = self._draining | self.at_risk
        return {each: host for each, host in self._joined.items() if host not in going}

    def _is_lost(self, host: str, now: float) -> bool:
        """Return whether a host is lost for good."""
        return now - self._lost.get(host, now) >= _LOST_S

    def _of_first(self, now: float) -> list[str]:
        return [
            name
            for name in self.first
            if not self._is_lost(name, now) and name not in self._draining | self.at_risk
        ]

    # -- how many --------------------------------------------------------------------------

    def _unwanted(self, now: float) -> list[str]:
        """Return the grants to give back: lost for good, unused by the policy, too many."""
        found = []
        # An unused host is kept at least as long as another one would take to start.
        keep_s = max(self._limits.give_back_after_s, self._owner.start_s or 0.0)
        for grant_id, host in self._joined.items():
            idle_s = now - self._unused.get(host, now)
            if self._is_lost(host, now):
                found.append(grant_id)
            elif (
                self._spec.policy != "fixed"
                and idle_s >= keep_s
                and len(self._names(now)) - len(found) > self._limits.least
            ):
                found.append(grant_id)
                self._not_before = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        kept = [grant_id for grant_id in self._staying if grant_id not in found]
        return found + kept[self.wanted(now) :]

    def wanted(self, now: float) -> int:
        """Return how many further hosts the run should have."""
        first = len(self._of_first(now))
        limit = self._limits.most
        processes = self.run.scaled_to or self._spec.np or self._spec.max_np
        if self._spec.policy != "fixed":
            uses_all = self.run.size > 0 and not self._unused and now >= self._not_before
            in_use = first + len(self._staying) + uses_all * self._lacking
            limit = min(limit, max(in_use, self._limits.least))
        elif processes is not None:
            all_processes = processes + self._spec.spares
            enough = math.ceil(all_processes / self._limits.slots_per_host)
            limit = min(limit, max(enough, self._limits.least))  # the run begins with the fewest
        return max(0, limit - first)

    def _ask_for_more(self, grants: list[Grant], now: float) -> None:
        pending = [grant for grant in grants if not grant.runs]
        coming = [grant for grant in grants if grant.grant_id not in self._joined]
        missing = self.wanted(now) - len(self._staying) - len(coming)
        for grant in pending[: max(0, -missing)]:
            self._owner.cancel([grant.grant_id])
            word, name = self._owner.host_word, self._name(grant.grant_id)
            self._tell(f"no further {word} is needed: {name} is cancelled")
        new = min(missing, self._limits.most_pending - len(pending))
        hosts = self._names(now)
        there = {*hosts, *(grant.asked for grant in coming)}
        named = [name for name in self._limits.named if name not in there]
        for number in range(new):
            self._owner.ask(hosts, named[number] if number < len(named) else "")
        if new > 0:
            self._tell(f"{count(new, f'further {self._owner.host_word}')} asked for")

    def _name(self, grant_id: str) -> str:
        return f"{self._owner.grant_word} {grant_id}"


def _nearly_over(grant: Grant) -> str:
    return f"its time limit is {duration_words(grant.left_s)} away"


@contextlib.contextmanager
def growing(growth: Growth, folder: RunFolder, warn: Callable[[str], None]) -> Iterator[None]:
    """Have a run grow until the end of the block.

    Args:
        warn: called once with each reason for which it cannot grow for now.
    """
    follower = folder.follow_events()

    def note() -> None:
        for event in follower.poll():
            growth.read_event(event, time.monotonic())

    with asking(growth, note, warn):
        yield


@contextlib.contextmanager
def asking(growth: Growth, note: Callable[[], None], warn: Callable[[str], None]) -> Iterator[None]:
    """Ask for hosts and give them back until the end of the block.

    Args:
        note: called before each look, to tell ``growth`` what is used.
        warn: called once with each reason for which nothing can be asked for now.
    """
    said = ""

    def look() -> bool:
        nonlocal said
        try:
            note()
            growth.look_at_grants(time.monotonic())
            said = ""
        except (RunError, OSError) as error:  # tried again at the next look
            if str(error) != said:
                warn(f"the run does not grow for now: {error}")
            said = str(error)
        return False

    with repeating("growth", growth.look_s, look):
        yield
