"""Who may do and see what, where several users share a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hvd_elastic.errors import HvdElasticError, RunError
from hvd_elastic.jobs import rights
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.job import (
    After,
    Answer,
    Cancel,
    CancelCause,
    Cancelled,
    Down,
    DrainHost,
    Job,
    JobKind,
    JobRequest,
    JobStatus,
    Look,
    Pause,
    Request,
    Requeue,
    SetPriority,
    Submit,
    UndrainHost,
)
from hvd_elastic.jobs.notify import ClusterRecord
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.queue import JobQueue
from hvd_elastic.jobs.rights import of_user, read_for, user_name
from hvd_elastic.jobs.secrets import INDEX_VARIABLE, JobSecrets
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder

BOB, EVE = 4001, 4002
ASKED = JobRequest("train", {"command": ["python", "t.py", "--key", "k"], "cwd": "/"}, secret="ab")
OF_BOB = {7: Job(7, replace(ASKED, user=BOB), "train-7-00ff")}


def test_what_a_user_submits_is_theirs_and_without_what_the_daemon_need_not_know() -> None:
    asked = of_user(Submit([replace(ASKED, user=EVE)], {"TOKEN": "t"}), BOB, (), {})
    assert isinstance(asked, Submit)
    (job,) = asked.jobs
    assert (job.user, job.words, asked.environment) == (BOB, ["python"], {})
    assert job.spec.keys() == {"command", "input_hosts", "leader_grace_s", "python"}
    shown = of_user(Submit([replace(ASKED, spec={"command": ["a\n2 x\x1b"]})], {}), BOB, (), {})
    assert isinstance(shown, Submit)
    assert shown.jobs[0].words == ["a 2 x?"], "it looks like no other line of the queue"


@pytest.mark.parametrize(
    "change",
    [
        *({"name": "../../x"}, {"name": ""}, {"secret": None}, {"secret": "../../x"}),
        *({"min_np": 0}, {"min_np": 3, "max_np": 2}, {"retries": -1}),
        *({"time_limit_s": float("nan")}, {"epochs": 1e300}, {"max_np": 10**30}),
        *({"array_index": 10**30}, {"retries": 10**30}),
        *({"kind": JobKind.PLAIN, "min_np": 2, "max_np": 2}, {"kind": JobKind.PLAIN}),
        {"kind": JobKind.FIXED, "max_np": 2},
        *({"priority": 0.0}, {"priority": 1e9}, {"epochs": -1.0}, {"deadline": 0.0}),
        {"after": (After("never", 1),)},
        *({"wish": HostWish("gpu[3-1]")}, {"wish": HostWish(exclude="a" * 5000)}),
        *({"wish": HostWish(gpu_memory_gb=float("nan"))}, {"notify_held_s": -1.0}),
        {"spec": {"command": ["x"], "leader_grace_s": "long"}},
        {"spec": {"command": ["x"], "input_hosts": 3}},
        {"spec": {"command": ["x"], "input_hosts": ["h" * 20_000]}},
        *({"after": (After("ok", 1),) * 501}, {"token": "t" * 20_000}),
    ],
)
def test_what_no_job_can_have_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(HvdElasticError):
        of_user(Submit([replace(ASKED, **change)], {}), BOB, (), {})


@pytest.mark.parametrize("request_", [Cancel([7], "x"), Requeue([7], {}), SetPriority([7], 2.0)])
def test_a_job_is_changed_by_its_user_and_operators_alone(request_: Request) -> None:
    with pytest.raises(RunError, match=r"job 7 \(train-7-00ff\) belongs to user 4001"):
        of_user(request_, EVE, (), OF_BOB)
    for user, operators in ((BOB, ()), (EVE, (EVE,))):
        of_user(request_, user, operators, OF_BOB)


def test_a_job_is_cancelled_in_the_own_name_with_its_cause() -> None:
    asked = of_user(Cancel([7], "root", CancelCause.AT_RUNG), BOB, (), OF_BOB)
    assert asked == Cancel([7], user_name(BOB), CancelCause.AT_RUNG)
    ended = replace(ASKED, cancelled=Cancelled("root"))
    found = of_user(Submit([ended], {}), BOB, (), {})
    assert isinstance(found, Submit)
    assert found.jobs[0].cancelled is None


def test_the_cluster_is_changed_by_operators_alone_and_in_their_own_name() -> None:
    drain = DrainHost("a", "bad DIMM", "ann", 1.0)
    for request in (Down(leave_jobs=True), drain, UndrainHost("a", "ann"), Pause("ann"), Pause("")):
        with pytest.raises(RunError, match="the daemon belongs to user"):
            of_user(request, BOB, (EVE,), {})
        asked: Any = of_user(request, EVE, (EVE,), {})
        if getattr(request, "by", ""):
            assert asked == structs.replace(request, by=str(EVE))


def test_others_see_of_a_job_what_the_queue_shows(tmp_path: Path) -> None:
    store = JobStore.create(tmp_path / "queue.sqlite")
    (job,) = store.add_jobs([replace(ASKED, user=BOB)], {}, 1.0)
    store.save([replace(job, status=JobStatus.FAILED, message="its last line of output")])
    (own,) = read_for(store, Look("find", ["train"]), BOB)
    (others,) = read_for(store, Look("find", ["train"]), EVE)
    assert (own["message"], own["request"]["secret"]) == ("its last line of output", "ab")
    assert (others["message"], others["request"]["secret"]) == ("", None)
    assert others["request"]["spec"] == {"command": ["python"]}
    store.add_jobs([replace(ASKED, user=EVE), replace(ASKED, user=None)], {}, 2.0)
    users = (BOB, EVE, None)
    named = [[job.number for job in store.find("train", user)] for user in users]
    assert named == [[1], [2], [3]], "a name is that of one's own jobs"
    assert [each["number"] for each in read_for(store, Look("find", ["train"]), BOB)] == [1]
    assert read_for(store, Look("jobs", [[1, 10**30, -(10**30)]]), EVE).keys() == {"1"}
    wrong: list[tuple[str, list[Any]]] = [("add_jobs", []), ("jobs", [3]), ("find", [])]
    wrong += [("with_status", ["odd", 1]), ("ended", [1, 10**30]), ("events", ["x"])]
    for what, values in wrong:
        with pytest.raises(HvdElasticError):
            read_for(store, Look(what, values), EVE)


def test_a_daemon_of_another_user_decides_sizes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    (tmp_path / "queue").mkdir()
    secrets = JobSecrets(ClusterFolder(tmp_path / "queue", shared=True))
    told = secrets.keep(replace(ASKED, secret=None), {"TOKEN": "t"})
    assert told.spec == {"command": ["python"]}
    fields = {"command": ["evil"], "python": "/evil", "min_np": 2}
    bad = {"LD_PRELOAD": "/evil.so", INDEX_VARIABLE: "3"}
    spec, environment = secrets.complete(told.secret or "", fields, bad)
    assert spec == {**ASKED.spec, "min_np": 2}
    assert environment == {"TOKEN": "t", INDEX_VARIABLE: "3"}
    assert secrets.allows("train-1-00ff")
    RunFolder.create("mine", {"command": ["x"]})
    RunFolder.create("other-1-00ff", {"cluster": "other", "job": 1})
    assert not secrets.allows("mine")
    assert not secrets.allows("other-1-00ff")
    with pytest.raises(RunError, match="Submit the job again"):
        secrets.complete("../../mine/run.json", {}, {})


def test_a_private_job_tells_others_neither_its_name_nor_its_command(tmp_path: Path) -> None:
    private = replace(ASKED, name="private", private=True)
    asked = of_user(Submit([replace(private, user=EVE)], {}), BOB, (), {})
    assert isinstance(asked, Submit)
    assert asked.jobs[0].words == []
    store = JobStore.create(tmp_path / "queue.sqlite")
    store.add_jobs([replace(private, user=None)], {}, 1.0)  # of the daemon's user, in its database
    (seen,) = read_for(store, Look("find", ["1"]), EVE)
    assert seen["request"]["spec"] == {"command": []}


def test_others_see_of_the_events_what_the_queue_shows(tmp_path: Path) -> None:
    store = JobStore.create(tmp_path / "queue.sqlite")
    queue = JobQueue(store, ClusterRecord(ClusterFolder(tmp_path), "").emit)
    private = replace(ASKED, name="private", private=True)
    first, _ = queue.add_jobs([replace(ASKED, user=BOB), private], {})
    queue.put_back(first, "failed, and is tried again: its last line")
    queue.ended(first, JobStatus.FAILED, "its last line")
    with EventLog(tmp_path / "events.jsonl") as log:
        log.append("jobs_decided", {"reasons": {"1": "failed: its last line", "2": "alone"}})
        log.append("unknown", {"secret": "x"})

    def told(user: int) -> dict[str, list[dict[str, Any]]]:
        events: dict[str, list[dict[str, Any]]] = {}
        for event in read_for(store, Look("events", [0]), user)["events"]:
            events.setdefault(event["kind"], []).append(event)
        return events

    own, others = told(BOB), told(EVE)
    assert [each["command"] for each in others["job_submitted"]] == [["python"], []]
    assert own["job_submitted"][0]["command"] == ASKED.words
    assert "its last line" in str(own)
    assert "its last line" not in str(others)
    assert others["jobs_decided"][0]["reasons"]["2"] == "alone"
    assert "unknown" not in own
    size = (tmp_path / "events.jsonl").stat().st_size
    assert read_for(store, Look("events", [size]), EVE) == {"events": [], "offset": size}


def test_many_jobs_are_read_over_the_socket_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(rights, "_MOST_ROWS", 3)
    store = JobStore.create(tmp_path / "queue.sqlite")
    jobs = store.add_jobs([replace(ASKED, user=BOB)] * 10, {}, 1.0)
    store.save([replace(job, status=JobStatus.FAILED) for job in jobs[7:]])
    asked: list[Look] = []

    def answer(_place: ClusterFolder, look: Look) -> Answer:
        asked.append(look)
        return Answer("", data=read_for(store, look, EVE))

    monkeypatch.setattr(rights, "ask_daemon", answer)
    read: Any = rights._OverSocket(ClusterFolder(tmp_path), lambda: None)
    queued = read.with_status(JobStatus.QUEUED)
    assert [job.number for job in queued] == [*range(1, 8)]
    assert [job.number for job in read.with_status(JobStatus.QUEUED, 5)] == [*range(1, 6)]
    assert [job.number for job in read.ended()] == [10, 9, 8]
    assert [job.number for job in read.ended(1)] == [10]
    assert [*read.jobs(range(1, 9))] == [*range(1, 9)]
    assert read.statuses([1, 10]) == {1: JobStatus.QUEUED, 10: JobStatus.FAILED}
    assert read.jobs([]) == {}
    assert len(asked) > 10
    with pytest.raises(HvdElasticError, match="at most 3 jobs"):
        read_for(store, Look("jobs", [[1, 2, 3, 4]]), EVE)
    assert len(read_for(store, Look("ended", [None]), EVE)) == 3
