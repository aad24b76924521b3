"""Deal the jobs of a published workload to users, and compare what they had with their shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from benchmarks.published.job import SimulatedJob
from benchmarks.published.policies import PolicyEntry
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment
from hvd_elastic.policy.schedule.policies import Policy
from hvd_elastic.policy.schedule.shares import Shares, fair_slots, useful_slots
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.jobs.run import as_jobs

DEALINGS = {"even": (1, 1, 1, 1, 1, 1), "uneven": (10, 3, 1, 1, 1, 1)}
"""Jobs of each of six users, relative to each other, which are their weights too."""
Weights = Mapping[str, float]


def dealt(jobs: Sequence[str], weights: Weights, seed: int) -> dict[str, str]:
    """Return the user of each job: in each round of so many jobs as weights, in a random order."""
    return dict(zip(jobs, islice(_cards(weights, seed), len(jobs)), strict=True))


def _cards(weights: Weights, seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    cards = [user for user, weight in weights.items() for _ in range(int(weight))]
    while True:
        yield from (cards[number] for number in rng.permutation(len(cards)))


@dataclass
class Round:
    """A time between two decisions.

    Attributes:
        held: slots of each job.
        could_use: most slots that each job could use.
    """

    seconds: float
    held: Mapping[str, int]
    could_use: Mapping[str, int]


@dataclass
class SharedRun:
    """The policy by goodput, with shares by weight or without, and what it has decided.

    Attributes:
        user_of: user of each job; empty: without shares.
    """

    user_of: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    rounds: list[Round] = field(default_factory=list)
    _began: float = 0.0

    def entry(self) -> PolicyEntry:
        """Return the policy."""
        return PolicyEntry(self._decide, True, "measurements, and the length that a job declares")

    def _decide(
        self,
        jobs: Sequence[SimulatedJob],
        hosts: Sequence[HostOffer],
        now: float,
        rescale_s: float,
    ) -> Mapping[str, Assignment]:
        if self.rounds:
            self.rounds[-1].seconds = now - self._began
        choose: Policy = decide
        if self.user_of:
            for job in jobs:
                job.user = self.user_of[job.name]
            held = Counter[str]()
            for name, slots in self.rounds[-1].held.items() if self.rounds else ():
                held[self.user_of[name]] += slots
            self.shares.count_use(now, held)
            self.shares.weights = {job.user: self.weights[job.user] for job in jobs}
            choose = self.shares.policy(decide)
        seen = as_jobs(jobs, rescale_s, tells_length=True)
        found = choose(seen, hosts, now)
        self._began = now
        held_now = {name: sum(each.hosts.values()) for name, each in found.items()}
        self.rounds.append(Round(0.0, held_now, {job.name: useful_slots(job) for job in seen}))
        return found


@dataclass(frozen=True)
class UseOfShares:
    """What users had, relative to their fair shares, while jobs could use more than there was.

    The fair share is weighted max-min: at each moment the slots in use are dealt out by weight, to
    nobody more than the user's jobs could use.

    Attributes:
        lack: largest part of the fair share that a user did not have.
        over: largest part that a user had beyond it.
        contended_h: time that counts [h].
    """

    lack: float
    over: float
    contended_h: float


def use_of_shares(
    rounds: Sequence[Round], user_of: Mapping[str, str], weights: Weights
) -> UseOfShares:
    """Return what users had of the slots that jobs held."""
    used, fair = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    contended_s = 0.0
    for each in rounds:
        held, could_use = Counter[str](), Counter[str]()
        for job, slots in each.held.items():
            held[user_of[job]] += slots
            could_use[user_of[job]] += each.could_use[job]
        if could_use.total() <= held.total():
            continue
        contended_s += each.seconds
        shares = fair_slots(could_use, {user: weights[user] for user in could_use}, held.total())
        for user, share in shares.items():
            used[user] += each.seconds * held[user]
            fair[user] += each.seconds * share
    parts = [used[user] / fair[user] - 1 for user in weights if fair[user]] or [0.0]
    return UseOfShares(max(0.0, -min(parts)), max(0.0, *parts), contended_s / 3600)
