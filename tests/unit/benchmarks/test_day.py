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


def state(
    jobs: list[dict[str, Any]],
    *,
    slots: dict[str, int],
    lives: dict[str, int],
    cut_off: bool = False,
) -> State:
    grants = {"job-1": {"a": 1}}
    leaders, silent = frozenset({"job-1"}), frozenset("a" if cut_off else ())
    since = {"job-1": 90.0} if cut_off else {}
    truth = Truth(slots, {"job-1": lives}, grants, leaders, True, silent, since)
    return State(truth, jobs, 100.0)


def job(number: int, status: str, reason: str = "", **more: Any) -> dict[str, Any]:
    held = {"a": 1} if status == "running" else {}
    told = {"job": number, "run_id": f"job-{number}", "status": status, "reason": reason}
    fields = {"hosts": held, "after": [], "min_np": 1, "kind": "elastic", "name": "job"}
    return {**told, **fields, "ended": None, "message": "", "stopping": None, "eta": None, **more}


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
    told = "job  1 (job-1), running\nreason  keeps 1 slot\nslots  a: 1"
    assert not [*wrong_why(seen, {1: told})]
    ((what, _),) = wrong_why(seen, {1: told.replace("a: 1", "b: 1")})
    assert what == "why: slots of job 1"
    ((what, _),) = wrong_why(seen, {1: told.replace("keeps", "grows to")})
    assert what == "why: reason of job 1"
    ((what, _),) = wrong_why(seen, {1: f"{told}\nexpected  ends in about 5 s"})
    assert what == "why: end or start of job 1"
    row = (
        '<tr><td class="n">1</td><td class="job">job</td><td><span class="pill on">running</span>'
        '</td><td class="n">{}</td><td class="w">keeps 1 slot</td></tr>'
    )
    assert not [*wrong_page(seen, row.format(1))]
    assert [what for what, _ in wrong_page(seen, row.format(2))] == ["page: slots of job 1"]
    assert [what for what, _ in wrong_page(seen, "")] == ["page: job 1 is missing"]


def test_screens_are_wrong_if_they_say_that_a_run_trains_which_hears_from_no_host() -> None:
    seen = state([], slots={"a": 2}, lives={"a": 1}, cut_off=True)
    silent = HOSTS.format(free=0, jobs="job-1: 1").replace("up    ", "silent")
    assert not [*wrong_hosts(seen, silent)]
    found = {what for what, _ in wrong_hosts(seen, HOSTS.format(free=1, jobs="job-1: 1"))}
    assert found == {"hosts: state of a"}
    told = "its leader hears from none of its hosts since 14:00:58"
    assert not [*wrong_queue(seen, [job(1, "running", told)])]
    ((what, _),) = wrong_queue(seen, [job(1, "running", "keeps 1 slot on 1 host")])
    assert what == "queue: reason of job 1"
    ((what, _),) = wrong_queue(seen, [job(1, "running", told, eta=200.0)])
    assert what == "queue: end of job 1"
    ((what, _),) = wrong_queue(state([], slots={"a": 1}, lives={"a": 1}), [job(1, "running", told)])
    assert what == "queue: reason of job 1"
