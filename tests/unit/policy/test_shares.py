"""Users who share a cluster by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.jobs import Assignment, Job
from hvd_elastic.policy.schedule.shares import Shares, fair_slots, useful_slots
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.sim.jobs.run import JobInTime, as_jobs, run_jobs

HOSTS = [HostOffer(f"host{number}", 4) for number in range(4)]
CAPACITY = 16


def shares(**weights: float) -> Shares:
    made = Shares(half_life_s=1000.0)
    made.weights = weights
    return made


def jobs(**numbers: int) -> list[Job]:
    """Jobs of users that wait, and take up to four slots each."""
    goodput = np.array([0.0, 1.0, 1.8, 2.5, 3.0])
    return [
        Job(f"{user}{number}", 0.0, goodput, 1e6, max_slots=4, user=user)
        for user in numbers
        for number in range(numbers[user])
    ]


def decided(made: Shares, wanted: Sequence[Job]) -> Mapping[str, Assignment]:
    return made.policy(decide)(wanted, HOSTS, 0.0)


def test_slots_that_a_user_cannot_use_go_to_the_others_by_weight() -> None:
    weights = {"ada": 3.0, "bob": 1.0, "eve": 1.0}
    asked = {"ada": 64, "bob": 64, "eve": 64}
    assert fair_slots(asked, weights, 10) == {"ada": 6.0, "bob": 2.0, "eve": 2.0}
    asked = {"ada": 2, "bob": 64, "eve": 0}
    assert fair_slots(asked, weights, 10) == {"ada": 2, "bob": 8.0, "eve": 0}
    assert fair_slots({}, {}, 10) == {}


def test_a_job_asks_for_as_many_slots_as_make_it_faster() -> None:
    (job,) = jobs(ada=1)
    assert useful_slots(job) == 4
    assert useful_slots(replace(job, goodput=np.array([0.0, 1.0, 1.8, 1.7, 1.6]))) == 2
    assert useful_slots(replace(job, goodput=None)) == 4
    assert useful_slots(replace(job, goodput=np.array([0.0, 1.0]), min_slots=3)) == 4


def test_use_counts_half_after_the_half_life() -> None:
    made = shares(ada=1.0, bob=1.0)
    made.count_use(0.0, {"ada": 4})
    made.count_use(1000.0, {"ada": 4})
    used = made.uses["ada"].used
    assert used == pytest.approx(4 * 1000 / 2 / np.log(2))
    made.count_use(2000.0, {})
    assert made.uses["ada"].used == pytest.approx(used / 2)
    assert made.uses["bob"].used == 0.0


def test_who_has_had_slots_that_nobody_else_wanted_owes_nothing() -> None:
    made = shares(ada=1.0, bob=1.0)
    decided(made, jobs(ada=4))
    made.count_use(0.0, {})
    made.count_use(500.0, {"ada": CAPACITY})
    assert made.factors(CAPACITY) == {"ada": 1.0, "bob": 1.0}
    decided(made, jobs(ada=4, bob=4))
    made.count_use(600.0, {"ada": CAPACITY})
    assert made.lags(CAPACITY)["ada"] == pytest.approx(-made.lags(CAPACITY)["bob"])
    factors = made.factors(CAPACITY)
    assert factors["ada"] == 1.0 < factors["bob"], "who lacked comes first, nobody is set back"


def test_priorities_count_among_the_jobs_of_one_user() -> None:
    made = shares(ada=1.0, bob=1.0)
    both = jobs(ada=4, bob=4)
    raised = [replace(job, priority=1000.0 if job.user == "ada" else 1.0) for job in both]
    assert decided(made, raised) == decided(made, both)
    one = [replace(job, priority=4.0 if job.name == "ada0" else 1.0) for job in both]
    found = decided(made, one)
    assert sum(found["ada0"].hosts.values()) > sum(found["ada1"].hosts.values())


def test_a_job_is_told_that_its_user_had_more_than_the_share() -> None:
    made = shares(ada=1.0, bob=1.0)
    both = jobs(ada=20, bob=4)
    decided(made, both)
    made.count_use(0.0, {})
    made.count_use(900.0, {"ada": CAPACITY})
    found = decided(made, both)
    waiting = [each for name, each in found.items() if name[:3] == "ada" and not each.hosts]
    assert waiting
    assert all(each.reason.endswith("; ada had more than the share") for each in waiting)
    assert not any("share" in found[f"bob{number}"].reason for number in range(4))


def test_jobs_of_equal_worth_take_few_turns() -> None:
    made = Shares()
    made.weights = {"ada": 1.0, "bob": 1.0, "eve": 1.0}
    waiting = [replace(job, max_slots=1, goodput=None) for job in jobs(ada=12, bob=12, eve=12)]
    held: dict[str, Mapping[str, int]] = {}
    starts = 0
    for at in range(0, 3600, 30):
        made.count_use(float(at), Counter(name[:3] for name, slots in held.items() if slots))
        found = decided(made, [replace(job, held=held.get(job.name, {})) for job in waiting])
        starts += sum(bool(each.hosts) and not held.get(name) for name, each in found.items())
        held = {name: each.hosts for name, each in found.items()}
    assert starts <= 6 * CAPACITY
    parts = [use.used / use.fair for use in made.uses.values()]
    assert parts == pytest.approx([1.0] * 3, abs=0.3)


class Steady(JobInTime):
    """A job that gains by each slot, less by further ones."""

    max_slots = 8

    def __init__(self, name: str, submitted_s: float, length_s: float) -> None:
        super().__init__(name, submitted_s)
        self.user, self._left = name[:3], length_s
        self._curve = np.append(0.0, np.arange(1, 9) ** 0.8)

    @property
    def remaining_examples(self) -> float:
        return self._left

    def goodput(self) -> np.ndarray:
        return self._curve

    def _train(self, now: float, seconds: float) -> None:
        slots = sum(self.held.values())
        rate = float(self._curve[slots])
        if rate * seconds >= self._left:
            self.finished_s = now + self._left / rate
        self._left -= rate * seconds
        self.attained_slot_s += slots * seconds


def test_users_have_their_shares_over_hours_of_virtual_time() -> None:
    """Who submits more jobs does not have more of the slots, and no slot stays empty."""
    rng = np.random.default_rng(0)
    weights = {"ada": 2.0, "bob": 1.0, "eve": 1.0}
    numbers = {"ada": 14, "bob": 14, "eve": 30}
    submitted = [
        Steady(f"{user}{number}", float(rng.uniform(0, 600)), float(rng.uniform(2000, 9000)))
        for user in weights
        for number in range(numbers[user])
    ]
    made = Shares(half_life_s=86400.0)
    used = Counter[str]()
    held: Mapping[str, int] = {}
    rounds = 0

    def choose(active: Sequence[Steady], now: float) -> Mapping[str, Assignment]:
        nonlocal held, rounds
        made.count_use(now, held)
        asked = Counter(job.user for job in active)
        made.weights = {user: weights[user] for user in asked}
        found = made.policy(decide)(as_jobs(active, 1.0, tells_length=True), HOSTS, now)
        slots = Counter[str]()
        for job in active:
            slots[job.user] += sum(found[job.name].hosts.values())
        held = slots
        if all(8 * asked[user] >= CAPACITY for user in weights):  # all could use all slots
            rounds += 1
            used.update(held)
        return found

    run_jobs(submitted, choose, 90.0, 1.0, {host.name: 4 for host in HOSTS})
    assert rounds > 100
    assert sum(used.values()) == rounds * CAPACITY
    for user, weight in weights.items():
        assert used[user] / (rounds * CAPACITY) == pytest.approx(weight / 4, rel=0.05)
