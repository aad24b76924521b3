"""Simulate one job: its slots, and what a policy may read of it."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_elastic.policy.schedule.jobs import Job


class JobInTime(ABC):
    """A job in virtual time, and what a policy may read of it.

    Args:
        name: its name.
        submitted_s: when it is submitted [s].

    Attributes:
        held: its slots on each host.
        left: slots that it does not hold any more, as (host, slots, time until which its processes
            live there [s]).
        noise: relative error of the goodput that a policy reads.
        finished_s: when it finished [s]; None: it has not.
        attained_slot_s: slots times seconds that it has had.
        rescales: number of changes of its slots after the first.
        priority: weight relative to other jobs.
        min_slots: fewest slots.
    """

    def __init__(self, name: str, submitted_s: float) -> None:
        self.name, self.submitted_s = name, submitted_s
        self.held: dict[str, int] = {}
        self.left: list[tuple[str, int, float]] = []
        self._takes_time = False
        self.noise = 0.0
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.finished_s: float | None = None
        self.attained_slot_s = 0.0
        self.rescales = -1
        self.priority, self.min_slots = 1.0, 1
        self._pause_s = 0.0

    @property
    @abstractmethod
    def max_slots(self) -> int:
        """Most slots of the job for now: twice as many as were measured (Pollux, section 4.1)."""

    @property
    def most_slots(self) -> int:
        """Most slots that it takes once it has been measured."""
        return self.max_slots

    @property
    @abstractmethod
    def remaining_examples(self) -> float:
        """Useful examples that are left, of the number that the job has declared."""

    @abstractmethod
    def goodput(self) -> np.ndarray | None:
        """Return the predicted useful examples per second by number of slots; None: unknown."""

    def measured_goodput(self) -> np.ndarray | None:
        """Return :meth:`goodput` with the error of a measurement."""
        found = self.goodput()
        if found is None or not self.noise:
            return found
        return found * np.exp(self.noise * self._rng.standard_normal(found.shape))

    @property
    def occupied(self) -> dict[str, int]:
        """Slots of each host in which its processes live; empty if they leave slots at once."""
        if not self._takes_time:
            return {}
        found = dict(self.held)
        for host, slots, _ in self.left:
            found[host] = found.get(host, 0) + slots
        return found

    def leave(self, hosts: Mapping[str, int], now: float, leave_s: float) -> None:
        """Note the slots that it gives up for others; its processes take some time [s] to go."""
        self.left = [each for each in self.left if each[2] > now]
        self._takes_time = leave_s > 0
        if self._takes_time:
            self.left += [
                (host, slots - hosts.get(host, 0), now + leave_s)
                for host, slots in self.held.items()
                if slots > hosts.get(host, 0)
            ]

    def hold(self, hosts: Mapping[str, int], pause_s: float) -> None:
        """Change its slots; it trains on after a pause [s]."""
        if dict(hosts) == self.held:
            return
        self.held = dict(hosts)
        if self.held:
            self._rescaled()
            self._pause_s = pause_s
            self.rescales += 1

    def train(self, now: float, seconds: float) -> None:
        """Train from ``now`` [s] for so many seconds."""
        if not self.held or self.finished_s is not None:
            return
        pause = min(self._pause_s, seconds)
        self._pause_s -= pause
        self.attained_slot_s += pause * sum(self.held.values())
        self._train(now + pause, seconds - pause)

    @abstractmethod
    def _train(self, now: float, seconds: float) -> None:
        """Train without a pause."""

    def _rescaled(self) -> None:  # noqa: B027  (not every job adapts)
        """Adapt to other slots."""


def as_jobs(jobs: Sequence[JobInTime], rescale_s: float, *, tells_length: bool) -> list[Job]:
    """Return what the scheduler sees of simulated jobs."""
    return [
        Job(
            job.name,
            job.submitted_s,
            job.measured_goodput(),
            job.remaining_examples if tells_length else None,
            job.held,
            job.attained_slot_s,
            rescale_s,
            job.min_slots,
            job.max_slots,
            job.priority,
            rescales=max(job.rescales, 0),
            occupied=job.occupied,
            noise=job.noise,
            is_held_back=job.max_slots < job.most_slots,
        )
        for job in jobs
    ]
