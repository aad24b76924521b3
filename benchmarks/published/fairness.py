"""Measure finish-time fairness: completion times relative to those with an equal share.

Source: Themis, NSDI 2020, section 3. As in later work (Shockwave, NSDI 2023; Sia, SOSP 2023), the
share is that of the mean number of unfinished jobs during the job's lifetime.
"""

from __future__ import annotations

import math

from benchmarks.published.job import SimulatedJob
from benchmarks.published.profiles import Application, SubmittedJob

_LONG_S = 1e9


class EqualShares:
    """Completion times of jobs that have a share of the cluster of their own.

    The job adapts its batch, holds the same slots all the time, and does not wait. It is the same
    reference for every policy, those that keep the batch included.

    Args:
        capacity: slots of the cluster.
        per_host: slots of a host.
        pause_s: pause of the start [s].
    """

    def __init__(self, capacity: int, per_host: int, pause_s: float) -> None:
        self._capacity, self._per_host, self._pause_s = capacity, per_host, pause_s
        self._known: dict[tuple[str, int], float] = {}

    def completion_s(self, application: Application, jobs: float) -> float:
        """Return the completion time with a share of 1 in ``jobs`` of the cluster [s].

        The speed between two whole numbers of slots is interpolated; a part of one slot has that
        part of its speed.
        """
        share = min(self._capacity / jobs, application.most_slots)
        low = math.floor(share)
        if low == share:
            return self._alone_s(application, low)
        slow = 1 / self._alone_s(application, low) if low else 0.0
        fast = 1 / self._alone_s(application, low + 1)
        return 1 / (slow + (share - low) * (fast - slow))

    def _alone_s(self, application: Application, slots: int) -> float:
        key = (application.name, slots)
        if key not in self._known:
            submitted = SubmittedJob("alone", 0.0, application, 1, 1)
            job = SimulatedJob(submitted, adapts=True, per_host=self._per_host)
            whole, rest = divmod(slots, self._per_host)
            parts = [self._per_host] * whole + [rest] * (rest > 0)
            job.hold({f"host{number}": part for number, part in enumerate(parts)}, self._pause_s)
            job.train(0.0, _LONG_S)
            if job.finished_s is None:
                raise ValueError(f"{application.name} on {slots} slots does not end")
            self._known[key] = job.finished_s
        return self._known[key]
