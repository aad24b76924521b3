"""How many jobs and slots one user may have at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus
from hvd_elastic.jobs.limits import Limit, Limits, within_limits
from hvd_elastic.jobs.slot_plan import Candidate, plan_slots
from hvd_elastic.policy.schedule.jobs import HostSlots

ADA, BOB = 4001, 4002
HOSTS = [HostSlots("a", 4), HostSlots("b", 4)]


def job(number: int, user: int | None = ADA, held: int = 0, **more: Any) -> Job:
    request = JobRequest("train", {"command": ["x"]}, user=user, **more)
    status = JobStatus.RUNNING if held else JobStatus.QUEUED
    return Job(number, request, f"train-{number}", status, held={"a": held} if held else {})


def admitted(jobs: list[Job], limits: Limits, bound: tuple[Job, ...] = ()) -> dict[int, int | None]:
    """Most slots of each job that may hold some, by number."""
    found, _ = within_limits([Candidate(each) for each in jobs], bound, limits)
    return {each.job.number: each.job.request.max_np for each in found}


def test_a_user_has_as_many_jobs_at_a_time_as_allowed_and_is_told_why_others_wait() -> None:
    jobs = [job(1), job(2, held=1), job(3), job(4, BOB), job(5, priority=2.0)]
    limits = Limits(Limit(most_jobs=2))
    assert admitted(jobs, limits).keys() == {2, 5, 4}
    _, held = within_limits([Candidate(each) for each in jobs], (), limits)
    assert held.keys() == {1, 3}
    assert held[1] == "waits: 4001 may have 2 jobs at a time; see: hvd-elastic limits"
    assert admitted([job(1)], limits, bound=(job(2, held=1), job(3, held=1))) == {}
    assert admitted(jobs, Limits(user={"4002": Limit(most_jobs=1)})).keys() == {1, 2, 3, 4, 5}


def test_slots_beyond_the_fewest_are_dealt_out_evenly_to_those_that_can_take_them() -> None:
    limits = Limits(Limit(most_slots=6))
    assert admitted([job(1)], limits) == {1: 6}
    assert admitted([job(1), job(2)], limits) == {1: 3, 2: 3}
    assert admitted([job(1, max_np=1), job(2), job(3, max_np=2)], limits) == {1: 1, 3: 2, 2: 3}
    assert admitted([job(1, min_np=4), job(2, min_np=3), job(3)], limits) == {1: 5, 3: 1}
    assert admitted([job(1, min_np=2)], limits, bound=(job(2, held=3),)) == {1: 3}
    assert admitted([job(1, held=4, min_np=4), job(2, held=4, min_np=4)], limits) == {1: 4, 2: 4}


def test_no_plan_gives_a_user_more_slots_than_allowed() -> None:
    jobs = [*(job(n) for n in range(1, 5)), *(job(n, BOB) for n in range(5, 7))]
    found, _ = within_limits([Candidate(each) for each in jobs], (), Limits(Limit(most_slots=3)))
    plan = plan_slots(found, HOSTS, 10_000.0)
    for user in (ADA, BOB):
        own = [each.number for each in jobs if each.request.user == user]
        assert 1 <= sum(sum(plan.slots.get(n, {}).values()) for n in own) <= 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[each]\nmost_slots = 0\n", "most_slots"),
        ("[each]\nmost_gpus = 3\n", "most_gpus"),
        ("[user]\nroot = 3\n", "user"),
        ("[user.no-such-user]\nmost_jobs = 3\n", "no user 'no-such-user'"),
        ("each = ", "limits in"),
    ],
)
def test_limits_that_make_no_sense_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "limits.toml"
    assert Limits.read(path) == Limits()
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        Limits.read(path)
    path.write_text("[each]\nmost_jobs = 4\n[user.root]\nmost_slots = 8\n")
    assert Limits.read(path).user == {"root": Limit(most_slots=8)}
