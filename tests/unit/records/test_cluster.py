"""What the events of a queue tell about a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_elastic.records.cluster import ClusterSummary, Hold, summarize_cluster


def events() -> list[dict[str, Any]]:
    """Two jobs: the second shrinks the first, goes back to the queue, and ends; one waits."""
    return [
        {"t": 100.0, "kind": "cluster_hosts", "hosts": {"a": 2, "b": 2}},
        {"t": 100.0, "kind": "job_submitted", "job": 1, "name": "long", "min_np": 1,
         "command": ["python", "train.py"], "priority": 1.0, "max_np": None, "deadline": None},
        {"t": 101.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2, "b": 2}},
         "reasons": {"1": "all alone"}, "queued": []},
        {"t": 101.5, "kind": "job_started", "job": 1, "run_id": "long-1"},
        {"t": 110.0, "kind": "job_submitted", "job": 2, "name": "short", "min_np": 1,
         "command": ["python", "b.py"], "priority": 2.0, "max_np": 2, "deadline": 999.0},
        {"t": 111.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2}, "2": {"b": 2}},
         "reasons": {"1": "shrinks", "2": "starts"}, "queued": []},
        {"t": 112.0, "kind": "job_started", "job": 2, "run_id": "short-2"},
        {"t": 115.0, "kind": "job_requeued", "job": 2, "reason": "its host failed"},
        {"t": 117.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2}, "2": {"b": 1}},
         "reasons": {"2": "starts again"}, "queued": []},
        {"t": 117.5, "kind": "job_started", "job": 2, "run_id": "short-2"},
        {"t": 120.0, "kind": "job_finished", "job": 2, "status": "succeeded", "message": ""},
        {"t": 121.0, "kind": "job_submitted", "job": 3, "name": "big", "min_np": 9},
        {"t": 121.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2}},
         "reasons": {"3": "needs 9 slots"}, "queued": [3]},
    ]  # fmt: skip


def test_each_job_has_its_wait_its_slots_and_its_end() -> None:
    cluster = summarize_cluster(events(), "gpus")
    long, short, big = cluster.jobs.values()
    assert (cluster.slots, cluster.duration_s) == (4, 21.0)
    assert (long.status, long.held, long.run_ids) == ("running", {"a": 2}, ["long-1"])
    assert long.wait_s(21.0) == 1.5
    assert cluster.slot_s_of(long, 21.0) == (20.0, 2 * 20.0 + 2 * 10.0)
    assert cluster.slot_s_of(long, 31.0) == (30.0, 80.0), "it goes on"
    assert (short.status, short.requeues, short.run_ids) == ("succeeded", 1, ["short-2"])
    assert (short.run_s, short.slot_s, short.deadline) == (4.0 + 3.0, 8.0 + 3.0, 999.0)
    assert (big.status, big.reason, big.wait_s(21.0)) == ("queued", "needs 9 slots", 0.0)
    assert cluster.waiting == [(0.0, 1), (1.5, 0), (10.0, 1), (12.0, 0), (15.0, 1), (17.5, 0),
                               (21.0, 1)]  # fmt: skip


def test_a_slot_is_held_from_decision_to_decision() -> None:
    cluster = summarize_cluster(events())
    assert Hold("1", "b", 2, 1.0, 11.0) in cluster.holds
    assert Hold("2", "b", 1, 17.0, 20.0) in cluster.holds
    assert Hold("1", "a", 2, 1.0, 30.0) in cluster.all_holds(30.0), "unchanged, so in one piece"
    made = [(each.job, each.before, each.after, each.reason) for each in cluster.decisions]
    assert made[:3] == [("1", 0, 4, "all alone"), ("1", 4, 2, "shrinks"), ("2", 0, 2, "starts")]


def test_events_that_make_no_sense_are_skipped() -> None:
    cluster = ClusterSummary()
    for record in (
        {"kind": "job_submitted", "job": 1},
        {"t": "soon", "kind": "cluster_hosts", "hosts": {"a": 2}},
        {"t": 1.0, "kind": "cluster_hosts", "hosts": {"a": -2, "b": True, "c": 1}},
        {"t": 1.0, "kind": "job_finished", "job": 7, "status": "failed"},
        {"t": 1.0, "kind": "jobs_decided", "allocations": {"7": {"a": 1}}},
        {"t": 1.0, "kind": "jobs_decided", "allocations": [1], "reasons": "none"},
        {"t": 1.0, "kind": "something_new"},
    ):
        cluster.take_event(record)
    assert cluster.hosts == {"c": 1}
    assert not cluster.jobs
    assert not cluster.all_holds(5.0)


def test_json_has_the_times_of_jobs_that_go_on() -> None:
    found = summarize_cluster(events(), "gpus").as_json()
    assert found["jobs"][0]["run_s"] == pytest.approx(20.0)
    assert found["decisions"][0]["reason"] == "all alone"


HELD: list[dict[str, Any]] = [
    {"t": 1000.0, "kind": "cluster_hosts", "hosts": {"a": 2}},
    {"t": 1000.0, "kind": "job_submitted", "job": 1, "name": "one", "min_np": 1},
    {"t": 1000.0, "kind": "jobs_decided", "allocations": {"1": {"a": 2}}, "reasons": {}},
    {"t": 1000.0, "kind": "job_started", "job": 1, "run_id": "one-1"},
]
HOUR = 3600.0


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("job_finished", {"status": "succeeded", "message": ""}), ("job_requeued", {"reason": "x"})],
)
def test_a_job_that_ended_while_no_daemon_was_there_ended_then(
    kind: str, fields: dict[str, Any]
) -> None:
    end = {"t": 1000.0 + 61 * HOUR, "kind": kind, "job": 1, "ended": 1000.0 + 2 * HOUR, **fields}
    cluster = summarize_cluster([*HELD, end])
    job = cluster.jobs["1"]
    assert (job.run_s, job.slot_s) == (2 * HOUR, 4 * HOUR)
    assert job.ended_s == (2 * HOUR if kind == "job_finished" else None)
    assert cluster.holds == [Hold("1", "a", 2, 0.0, 2 * HOUR)]
    assert cluster.waiting[-1] == ((0.0, 0) if kind == "job_finished" else (61 * HOUR, 1))


def test_no_time_is_negative_after_the_clock_was_set_back() -> None:
    end = {"kind": "job_finished", "job": 1, "status": "succeeded", "message": ""}
    for ended in ({}, {"ended": 1000.0 - HOUR}):
        cluster = summarize_cluster(
            [
                *HELD[:2],
                *({**each, "t": 1000.0 + HOUR} for each in HELD[2:]),
                {**end, "t": 1000.0, **ended},
            ]
        )
        job = cluster.jobs["1"]
        assert (job.run_s, job.slot_s, job.ended_s) == (0.0, 0.0, HOUR)
