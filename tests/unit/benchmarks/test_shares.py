"""What the benchmark of shares makes of a journal and of a simulated workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.users import DEALINGS, Round, UseOfShares, dealt, use_of_shares
from benchmarks.sharing.accounts import journal_figures


def test_each_round_of_jobs_is_dealt_by_weight_and_the_same_seed_deals_alike() -> None:
    weights = dict(zip("abcdef", DEALINGS["uneven"], strict=True))
    jobs = [f"job{number}" for number in range(40)]
    found = dealt(jobs, weights, seed=3)
    assert found == dealt(jobs, weights, seed=3) != dealt(jobs, weights, seed=4)
    first = [found[job] for job in jobs[:17]]
    assert {user: first.count(user) for user in weights} == weights


def test_use_is_compared_with_what_the_jobs_of_a_user_could_use() -> None:
    user_of, weights = {"x": "ada", "y": "bob"}, {"ada": 1.0, "bob": 1.0}
    alone = Round(3600.0, {"x": 8}, {"x": 8})
    little = Round(3600.0, {"x": 7, "y": 1}, {"x": 8, "y": 1})
    uneven = Round(1800.0, {"x": 6, "y": 2}, {"x": 8, "y": 8})
    fair = use_of_shares([alone, little], user_of, weights)
    assert fair == UseOfShares(0.0, 0.0, 1.0), "nobody waits for slots while one job has all"
    found = use_of_shares([uneven, alone], user_of, weights)
    assert found == UseOfShares(0.5, 0.5, 0.5)
    # bob is due 4 + 1 slots and has 2 + 1, ada is due 4 + 7.
    found = use_of_shares([uneven, replace(little, seconds=1800.0)], user_of, weights)
    assert (found.lack, found.over) == pytest.approx((2 / 5, 2 / 11))


def test_a_journal_says_what_users_had_and_whether_a_limit_was_exceeded() -> None:
    def decided(t: float, **held: int) -> dict[str, Any]:
        allocations = {job[1:]: {"a": slots} for job, slots in held.items()}
        return {"t": t, "kind": "jobs_decided", "allocations": allocations}

    owner = {"1": "ada", "2": "ada", "3": "bob"}
    events = [decided(0.0, j1=1, j2=2, j3=3), {"kind": "job_submitted"}, decided(20.0, j2=1, j3=3)]
    found = journal_figures(events, owner, {"ada": 1.0, "bob": 1.0}, (10.0, 30.0))
    assert found["used"] == pytest.approx([0.4, 0.6])
    assert (found["worst"], found["most_slots"], found["most_jobs"]) == (0.2, 3, 2)
