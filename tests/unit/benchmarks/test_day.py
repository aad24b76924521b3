"""What a day's comparison of screens finds: each screen may be right, and may be wrong."""

from __future__ import annotations

from typing import Any

from benchmarks.sharing.screens import (
    State,
    Truth,
    wrong_hosts,
    wrong_page,
    wrong_queue,
    wrong_why,
)

HOSTS = """\
HOST  STATE    SLOTS  FREE  JOBS
a     up           2     {free}  {jobs}
"""


def state(jobs: list[dict[str, Any]], *, slots: dict[str, int], lives: dict[str, int]) -> State:
    grants = {"job-1": {"a": 1}}
    truth = Truth(slots, {"job-1": lives}, grants, frozenset({"job-1"}), True, frozenset())
    return State(truth, jobs, 100.0)


def job(number: int, status: str, reason: str = "", **more: Any) -> dict[str, Any]:
    held = {"a": 1} if status == "running" else {}
    told = {"job": number, "run_id": f"job-{number}", "status": status, "reason": reason}
    fields = {"hosts": held, "after": [], "min_np": 1, "kind": "elastic", "name": "job"}
    return {**told, **fields, "ended": None, "message": "", **more}


def test_hosts_are_wrong_if_a_slot_is_free_in_which_a_process_lives() -> None:
    seen = state([], slots={"a": 2}, lives={"a": 2})
    assert not [*wrong_hosts(seen, HOSTS.format(free=0, jobs="job-1: 1 and 1 leaving"))]
    ((what, _),) = wrong_hosts(seen, HOSTS.format(free=1, jobs="job-1: 1"))
    assert what == "hosts: free slots of a"
    gone = state([], slots={"b": 2}, lives={"a": 1})
    found = {what for what, _ in wrong_hosts(gone, "HOST\nb     up           2     2\n")}
    assert found == {"hosts: a is missing"}


def test_the_queue_is_wrong_if_a_job_waits_beside_empty_slots() -> None:
    jobs = [job(1, "running", "keeps 1 slot on 1 host"), job(2, "queued", "waits: all is taken")]
    assert not [*wrong_queue(state(jobs, slots={"a": 1}, lives={"a": 1}), jobs)]
    ((what, _),) = wrong_queue(state(jobs, slots={"a": 2}, lives={"a": 1}), jobs)
    assert what == "queue: job 2 waits"
    jobs = [job(1, "running", "keeps 2 slots on 1 host")]
    ((what, _),) = wrong_queue(state(jobs, slots={"a": 1}, lives={"a": 1}), jobs)
    assert what == "queue: reason of job 1"


def test_why_and_the_page_are_wrong_if_they_differ_from_the_queue() -> None:
    jobs = [job(1, "running", "keeps 1 slot")]
    seen = state(jobs, slots={"a": 1}, lives={"a": 1})
    assert not [*wrong_why(seen, {1: "job  1 (job-1), running\nslots  a: 1"})]
    ((what, _),) = wrong_why(seen, {1: "job  1 (job-1), running\nslots  b: 1"})
    assert what == "why: slots of job 1"
    row = (
        '<tr><td class="n">1</td><td class="job">job</td><td><span class="pill on">running</span>'
        '</td><td class="n">{}</td><td class="w">keeps 1 slot</td></tr>'
    )
    assert not [*wrong_page(seen, row.format(1))]
    assert [what for what, _ in wrong_page(seen, row.format(2))] == ["page: slots of job 1"]
    assert [what for what, _ in wrong_page(seen, "")] == ["page: job 1 is missing"]
