"""Share a cluster between users by weight: the jobs of who has had less than the share come first.

The fair share of a user is weighted max-min: slots that others cannot use are shared as well, and
nobody who had them has to give anything back. Source: Demers et al., SIGCOMM 1989 (fair queueing);
Goyal et al., SIGCOMM 1996 (no debt for capacity that others left).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.schedule.policies import Policy
from hvd_elastic.policy.snapshot import HostOffer

_LAG = 1 / 1000
"""Time without a slot of the share that multiplies the worth of a user's jobs by e, as a part of
the half-life. Less makes jobs wait longer; more lets use and share differ for longer."""
_LEAST_LAG_S = 60.0
"""The least such time [s]: jobs keep their slots for about as long."""
_SLACK = 1.0
"""How far the lag of a user may move, in such times, until the worth of the user's jobs follows:
else jobs of equal worth would take turns at each decision."""
_MOST = 16.0
"""Largest such factor."""
_FORGOTTEN_SLOT_S = 1.0
"""Use that is left of a user without jobs until nothing is kept any more [slot seconds]."""
_OVER = 0.1
"""Part of that time beyond the share from which the reasons say that a user has had more."""


def fair_slots(
    asked: Mapping[str, float], weights: Mapping[str, float], slots: float
) -> dict[str, float]:
    """Return the weighted max-min fair slots of users: nobody has more than is asked for.

    Args:
        asked: slots that each user can use.
        slots: slots to share.

    >>> fair_slots({"ada": 9, "bob": 9, "eve": 1}, {"ada": 2, "bob": 1, "eve": 1}, 10)
    {'eve': 1, 'ada': 6.0, 'bob': 3.0}
    """
    found = {}
    weight = sum(weights[user] for user in asked)
    for user in sorted(asked, key=lambda user: asked[user] / weights[user]):
        found[user] = min(asked[user], slots * weights[user] / weight)
        slots -= found[user]
        weight -= weights[user]
    return found


def useful_slots(job: Job) -> int:
    """Return on how many slots a job is fastest: as many as it could use now."""
    if job.goodput is None or job.fixed:
        return job.max_slots
    within = np.asarray(job.goodput)[job.min_slots : job.max_slots + 1]
    return job.min_slots + int(np.argmax(within)) if within.size else job.max_slots


@dataclass
class Use:
    """What a user had of the slots; both count less the older they are.

    Attributes:
        used: slots times seconds.
        fair: the same of the fair share of the slots in use.
    """

    used: float = 0.0
    fair: float = 0.0


class Shares:
    """What users had of slots that they share by weight, and what their jobs are worth for it.

    Attributes:
        half_life_s: time after which use counts half [s].
        weights: weight of each user who has jobs; empty: nothing is shared by weight.
        uses: what each user had.
    """

    def __init__(self, half_life_s: float = 7 * 86400.0) -> None:
        self.half_life_s = half_life_s
        self.weights: Mapping[str, float] = {}
        self.uses: dict[str, Use] = {}
        self._asked: Mapping[str, int] = {}
        """Slots that the jobs of each user could use at the last decision."""
        self._followed: dict[str, float] = {}
        """Lag by which the jobs of each user are worth more; at most the slack off the real one."""
        self._at: float | None = None

    def count_use(self, now: float, held: Mapping[str, int]) -> None:
        """Count the slots that users held since the last call.

        Args:
            now: present time [s].
            held: slots of each user.
        """
        seconds = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept = 2 ** (-seconds / self.half_life_s)
        span_s = (1 - kept) * self.half_life_s / math.log(2)
        fair = self._fair(held)
        for user in {*self.uses, *fair}:
            use = self.uses.setdefault(user, Use())
            use.used = kept * use.used + span_s * (held.get(user, 0) if user in fair else 0)
            use.fair = kept * use.fair + span_s * fair.get(user, 0.0)
            if user not in fair and max(use.used, use.fair) < _FORGOTTEN_SLOT_S:
                del self.uses[user]

    def _fair(self, held: Mapping[str, int]) -> dict[str, float]:
        """Return the fair share of the slots that are held."""
        # Who holds slots has asked for them, also if nothing can be decided about them now.
        asked = {user: max(self._asked.get(user, 0), held.get(user, 0)) for user in self.weights}
        return fair_slots(asked, self.weights, sum(held.get(user, 0) for user in asked))

    def lags(self, capacity: int) -> dict[str, float]:
        """Return for how long each user had no slot of the share, relative to the time that counts.

        Below 0: the user had more than the share.

        Args:
            capacity: slots of the cluster.
        """
        together = sum(self.weights.values())
        lag_s = max(_LEAST_LAG_S, _LAG * self.half_life_s)
        found = {}
        for user, weight in self.weights.items():
            use = self.uses.get(user, Use())
            found[user] = (use.fair - use.used) / (capacity * weight / together) / lag_s
        return found

    def factors(self, capacity: int) -> dict[str, float]:
        """Return by how much more the jobs of each user are worth, for what the user lacked.

        Whoever had more is not set back: it does no harm unless somebody lacks it, and that user
        comes first. So a user with few jobs may have them done sooner than by the share.

        Args:
            capacity: slots of the cluster.
        """
        before = self._followed
        self._followed = {
            user: min(max(before.get(user, 0.0), lag - _SLACK), lag + _SLACK)
            for user, lag in self.lags(capacity).items()
        }
        most = math.log(_MOST)
        return {user: math.exp(min(max(lag, 0.0), most)) for user, lag in self._followed.items()}

    def policy(self, choose: Policy) -> Policy:
        """Return a policy that gives users their shares: ``choose`` with other priorities.

        The priorities of jobs count among those of one user only.
        """

        def choose_by_share(
            jobs: Sequence[Job], hosts: Sequence[HostOffer], now: float
        ) -> Mapping[str, Assignment]:
            asked, numbers, priorities = Counter[str](), Counter[str](), Counter[str]()
            for job in jobs:
                asked[job.user] += useful_slots(job)
                numbers[job.user] += 1
                priorities[job.user] += job.priority  # type: ignore[assignment]
            self._asked = asked
            capacity = sum(host.slots for host in hosts) or 1
            factors, lags = self.factors(capacity), self.lags(capacity)
            weighed = []
            for job in jobs:
                mean = priorities[job.user] / numbers[job.user]
                weighed.append(replace(job, priority=job.priority / mean * factors[job.user]))
            found = dict(choose(weighed, hosts, now))
            for job in jobs:
                slots = sum(found[job.name].hosts.values())
                if lags[job.user] < -_OVER and slots < job.max_slots:
                    reason = f"{found[job.name].reason}; {job.user} had more than the share"
                    found[job.name] = replace(found[job.name], reason=reason)
            return found

        return choose_by_share
