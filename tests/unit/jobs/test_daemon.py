"""A daemon beside runs that other processes lead, played by a process that only holds the lock."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hvd_elastic.cli.jobs.daemon import hosts as print_hosts
from hvd_elastic.cli.jobs.limits import limits as print_limits
from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host, parse_hostfile
from hvd_elastic.jobs import daemon as daemon_module
from hvd_elastic.jobs import keepers, requests, runs
from hvd_elastic.jobs.daemon import Daemon
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.hosts import Expansion
from hvd_elastic.jobs.job import (
    Cancel,
    Down,
    DrainHost,
    Hold,
    Hosts,
    Job,
    JobKind,
    JobRequest,
    JobStatus,
    Look,
    Pause,
    Release,
    Requeue,
    ShowLimits,
    Submit,
    UndrainHost,
)
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.queue import JobQueue
from hvd_elastic.jobs.runs import JobRuns
from hvd_elastic.jobs.server import ask_daemon
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records import json_lines
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.records.json_lines import EventLog, iter_records
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import RunStarted
from tests import other_user
from tests.paths import LIMIT_S
from tests.unit.records.made_events import write

SPEC = {"command": ["train"], "cwd": "/"}


def begin(spec: RunSpec, folder: RunFolder, environment: Mapping[str, str], resumed: bool) -> int:
    """Fork a leader that trains until it is asked to stop.

    EXIT: it ends at once. UNFIT: it cannot use host a. TRAINS: it says that it trains. CUT_OFF: and
    that it hears from no host any more. COMES_BACK: it leads again as soon as
    there is a file "grace", and reaches its host when there is "heals". FAULTS: it tells of these
    faults of its host. BEHIND: it succeeds at once, and the wall clock was set back by an hour
    before this event.
    """
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.closerange(3, 1000)  # as the real one, or it would hold the daemon's lock
    if "EXIT" in environment:
        folder.leader_log.write_text("error: no such folder\n")
        os._exit(1)
    if "KILLED" in environment and not folder.leader_log.exists():
        folder.leader_log.write_text("started\n")
        os.kill(os.getpid(), signal.SIGKILL)
    with folder.take_lead(), EventLog(folder.events) as log:
        if behind := environment.get("BEHIND"):
            for kind, ends in {"run_started": {}, "run_finished": {"status": "succeeded"}}.items():
                if kind == behind:
                    json_lines.stamps = lambda: (time.time() - 3600.0, time.monotonic())
                write(log, kind, ends)
            os._exit(0)
        write(log, "run_started", {"resumed": resumed})
        if "UNFIT" in environment and next(iter(parse_hostfile(spec.hostfile or ""))).name == "a":
            told = {"message": "host a has no Python", "unusable_host": "a", "fatal": True}
            write(log, "warning", told)
            write(log, "run_finished", {"status": "failed", "message": told["message"]})
            os._exit(1)
        if "TRAINS" in environment:
            (host,) = parse_hostfile(spec.hostfile or "").names
            begun = {"generation": 1, "from_size": 0, "to_size": 1, "hosts": [host], "slots": [1]}
            write(log, "rescale_started", begun)
            write(log, "rescale_finished", {"generation": 1, "size": 1, "pause_s": None})
        if "FAULTS" in environment:
            host = parse_hostfile(spec.hostfile or "").names[0]
            write(log, "host_faults", {"host": host, "faults": json.loads(environment["FAULTS"])})
        if "CUT_OFF" in environment:
            write(log, "leader_cut_off", {"silent_s": 5.0, "grace_s": 60.0, "tries_s": 55.0})
            if "COMES_BACK" in environment:
                while not (folder.path / "grace").exists():
                    time.sleep(0.01)
                names = parse_hostfile(spec.hostfile or "").names
                write(log, "hosts_changed", {"hosts": [[name, 1] for name in names]})
                while not (folder.path / "heals").exists():
                    time.sleep(0.01)
                write(log, "agent_started", {"host": names[0]})
        while not folder.take_requests():
            time.sleep(0.01)
        write(log, "run_finished", {"status": "stopped", "message": "asked to"})
        os._exit(0)


class Running:
    """A daemon in a process of its own."""

    def __init__(self, place: ClusterFolder, hostfile: Path, **options: Any) -> None:
        self.place = place
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                with place.lock():
                    place.describe_daemon(hostfile)
                    Daemon(place, hostfile, None, begin, **options).run()
                status = 0
            finally:
                os._exit(status)
        self.until((place.path / "daemon.sock").exists)
        self.until(lambda: ask_daemon(place, Hosts()).ok)

    def job(self, number: int) -> Job:
        store = JobStore.read_only(self.place.database)
        try:
            return store.jobs([number])[number]
        finally:
            store.close()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(RunError):  # no daemon yet
                if condition():
                    return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def down(self, *, leave_jobs: bool) -> None:
        ask_daemon(self.place, Down(leave_jobs))
        assert os.waitpid(self.pid, 0)[1] == 0

    def kill(self) -> None:
        """Kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFolder]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("a slots=1\n")
    made = ClusterFolder.create("test")
    yield made
    if made.daemon_alive():  # of a test that has failed
        os.kill(made.daemon()["pid"], signal.SIGKILL)
    for lock in (tmp_path / "runs").glob("*/leader.lock"):
        RunFolder(lock.parent).send_request("stop")


def hosts(place: ClusterFolder) -> Path:
    return place.path.parents[1] / "hosts"


def submit(place: ClusterFolder, **environment: str) -> int:
    request = JobRequest("train", SPEC, kind=JobKind.FIXED, max_np=1)
    return ask_daemon(place, Submit([request], environment)).jobs[0]


def leads(daemon: Running, number: int) -> bool:
    with contextlib.suppress(RunError):  # there is no such run yet
        return RunFolder.open(daemon.job(number).run_id).leader_alive()
    return False


def test_a_cluster_that_asks_for_hosts_refuses_only_what_it_can_never_hold(place) -> None:
    coming = tuple(Host(name, slots=1) for name in ("m1", "m2", "m3"))
    daemon = Running(place, hosts(place), expansion=Expansion(coming, "aws"))
    three = JobRequest("three", SPEC, kind=JobKind.FIXED, min_np=3, max_np=3)
    (number,) = ask_daemon(place, Submit([three], {})).jobs
    assert daemon.job(number).status is JobStatus.QUEUED
    assert daemon.job(number).request.spec["preemption"] == "aws"
    own = {**SPEC, "preemption_command": "cat /notice"}
    plain = JobRequest("plain", SPEC, kind=JobKind.PLAIN)
    for job in (replace(three, name="own", spec=own), plain):
        (number,) = ask_daemon(place, Submit([job], {})).jobs
        assert "preemption" not in daemon.job(number).request.spec
    with pytest.raises(RunError, match="job four needs 4 slots, and cluster test has 3"):
        ask_daemon(place, Submit([replace(three, name="four", min_np=4, max_np=4)], {}))
    daemon.down(leave_jobs=False)


def test_held_job_gives_its_slots_back_and_goes_on_when_released(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    daemon.until(lambda: leads(daemon, number))
    other = submit(place)
    assert ask_daemon(place, Hold([number], "ann")).message == (
        f"ending job {number} after a checkpoint; held then"
    )
    daemon.until(lambda: leads(daemon, other))
    held = daemon.job(number)
    assert held.status is JobStatus.QUEUED
    assert held.reason.startswith("held by ann")
    ask_daemon(place, Cancel([other], "ann"))
    daemon.until(lambda: not daemon.job(other).status.active)
    assert not leads(daemon, number)
    ask_daemon(place, Release([number]))
    daemon.until(lambda: leads(daemon, number))
    daemon.down(leave_jobs=True)


def test_job_at_its_time_limit_ends_and_goes_on_when_it_is_queued_again(
    place: ClusterFolder,
) -> None:
    daemon = Running(place, hosts(place))
    request = JobRequest("train", SPEC, kind=JobKind.FIXED, max_np=1, retries=3, time_limit_s=1.0)
    (number,) = ask_daemon(place, Submit([request], {})).jobs
    daemon.until(lambda: daemon.job(number).status is JobStatus.FAILED)
    ended = daemon.job(number)
    assert (ended.attempts, ended.message) == (
        1,
        "time limit of 1.0 s: hvd-elastic requeue 1 resumes it from its checkpoint",
    )
    ask_daemon(place, Requeue([number], {}))
    daemon.until(lambda: daemon.job(number).attempts == 2)
    daemon.until(lambda: daemon.job(number).status is JobStatus.FAILED)
    kinds = [record["kind"] for record in iter_records(place.events)]
    assert kinds.count("time_limit_near") == 2
    daemon.down(leave_jobs=True)


def test_limits_and_shares_are_told_and_outlive_the_daemon(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.shares._SAVE_S", 0.0)
    place.limits.write_text('[each]\nweight = 2\nmost_jobs = 1\n[all]\nlongest_time = "1s"\n')
    daemon = Running(place, hosts(place))
    request = JobRequest("train", SPEC, kind=JobKind.FIXED, max_np=1)
    first, second = ask_daemon(place, Submit([request, request], {})).jobs

    def row() -> dict[str, Any]:
        (found,) = ask_daemon(place, ShowLimits()).data["users"]
        return dict(found)

    daemon.until(lambda: "may have 1 job at a time" in place.events.read_text())
    daemon.until(lambda: daemon.job(first).status is JobStatus.FAILED)
    message = daemon.job(first).message
    assert message.startswith("time limit of 1.0 s of all users together: hvd-elastic requeue")
    daemon.until(lambda: daemon.job(second).status is JobStatus.FAILED)
    assert (row()["weight"], row()["most_jobs"], row()["jobs"]) == (2.0, 1, 0)
    assert row()["used_share"] == row()["fair_share"] == pytest.approx(1.0)
    daemon.until(lambda: "used" in place.shares.read_text())
    daemon.kill()
    daemon = Running(place, hosts(place))
    assert row()["used_share"] == pytest.approx(1.0)
    place.limits.write_text("[each]\nmost_slot = 2\n")
    daemon.until(lambda: "line 2" in ask_daemon(place, ShowLimits()).message)
    print_limits(cluster="test")
    told = capsys.readouterr()
    assert re.search(r"each other +2 ", told.out), "those that hold"
    assert re.search(r"warning: .*line 2, .*`most_slot`.*; the earlier ones stay\n", told.err)
    place.limits.unlink()
    daemon.until(lambda: not ask_daemon(place, ShowLimits()).message)
    print_limits(cluster="test")
    assert not capsys.readouterr().err
    daemon.down(leave_jobs=True)


def test_drained_host_is_left_and_kept_out_until_it_is_given_back(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    daemon.until(lambda: leads(daemon, number))
    at = time.time()
    with pytest.raises(RunError, match="no host 'b'; it has a"):
        ask_daemon(place, DrainHost("b", "why", "ann", at))
    with pytest.raises(RunError, match="host a is not drained; drained: none is"):
        ask_daemon(place, UndrainHost("a", "ann"))
    ask_daemon(place, DrainHost("a", "later", "ann", at + 3600))
    assert row(place)["state"] == "up"
    assert row(place)["cause"].startswith("will be drained: later (ann, from ")
    answer = ask_daemon(place, DrainHost("A", "bad DIMM", "ann", at))
    assert answer.message.startswith("host a is drained; it is the last host")
    assert "; this replaces: will be drained: later (ann, from " in answer.message
    daemon.until(lambda: row(place)["state"] == "drained")
    assert row(place)["cause"].startswith("drained: bad DIMM (ann, since ")
    assert row(place)["free"] == 0
    assert daemon.job(number).status is JobStatus.QUEUED
    daemon.kill()
    again = Running(place, hosts(place))
    assert row(place)["state"] == "drained"
    assert not leads(again, number)
    ask_daemon(place, UndrainHost("A", "ann"))
    again.until(lambda: leads(again, number))
    kinds = [record["kind"] for record in iter_records(place.events)]
    assert (kinds.count("host_drained"), kinds.count("host_undrained")) == (2, 1)
    ask_daemon(place, DrainHost("a", "sold", "ann", at))
    hosts(place).write_text("b slots=1\n")
    again.until(lambda: [row["host"] for row in ask_daemon(place, Hosts()).data] == ["b"])
    answer = ask_daemon(place, UndrainHost("a", "ann"))
    assert answer.message == "host a is given back to the jobs; it is not in the hostfile"
    again.down(leave_jobs=True)


BROKEN: dict[str, Any] = {
    "what": "GPU 0 Xid 79",
    "text": "GPU 0 fell off the bus",
    "is_broken": True,
}
HOT = {"what": "GPU 0 held down", "text": "GPU 0: its clocks are held down by heat"}


def test_unhealthy_host_is_shown_and_drained_if_asked_for_but_not_the_last(
    place: ClusterFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    hostfile = hosts(place)
    hostfile.write_text("a\nb\n")

    def rows() -> list[tuple[str, str]]:
        return [(row["state"], row["cause"] or "") for row in ask_daemon(place, Hosts()).data]

    def kinds() -> list[tuple[str, Any]]:
        return [
            (record["kind"], record.get("faults", record.get("by")))
            for record in iter_records(place.events)
            if record["kind"] in ("host_unhealthy", "host_drained")
        ]

    daemon = Running(place, hostfile, drains="failed")
    hot = submit(place, FAULTS=json.dumps([HOT]))
    daemon.until(lambda: rows() == [("up", f"unhealthy: {HOT['text']}"), ("up", "")])
    ask_daemon(place, Cancel([hot], "ann"))
    daemon.until(lambda: not daemon.job(hot).status.active)
    broken = submit(place, FAULTS=json.dumps([HOT, BROKEN]))
    daemon.until(lambda: rows()[0][0] == "drained")
    assert rows()[0][1].startswith("drained: GPU 0 fell off the bus (health, since ")
    daemon.until(lambda: daemon.job(broken).held == {"b": 1})
    told: list[tuple[str, Any]] = [("host_unhealthy", [HOT["text"]])]
    told += [("host_unhealthy", [HOT["text"], BROKEN["text"]]), ("host_drained", "health")]
    assert kinds() == told
    daemon.kill()
    again = Running(place, hostfile, drains="failed")
    ask_daemon(place, UndrainHost("a", "ann"))  # as it is
    other = submit(place, FAULTS=json.dumps([HOT, BROKEN]))
    again.until(lambda: BROKEN["text"] in "".join(cause for _, cause in rows()))
    assert [state for state, _ in rows()] == ["up", "up"], "its operator knew of it"
    ask_daemon(place, Cancel([other, broken], "ann"))
    worse = submit(place, FAULTS=json.dumps([{**BROKEN, "number": 2}]))
    again.until(lambda: "drained" in [state for state, _ in rows()])
    ask_daemon(place, Cancel([worse], "ann"))
    last = submit(place, FAULTS=json.dumps([{**BROKEN, "number": 9}]))
    again.until(lambda: "is not drained, since it is the last" in capfd.readouterr().err)
    for _ in range(3):  # the daemon looks again after each answer
        rows()
    assert "is not drained" not in capfd.readouterr().err, "once"
    ask_daemon(place, Cancel([last], "ann"))
    again.down(leave_jobs=False)


def row(place: ClusterFolder) -> dict[str, Any]:
    (found,) = ask_daemon(place, Hosts()).data
    return dict(found)


def test_paused_cluster_starts_no_job_also_with_another_daemon(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    runs = submit(place)
    daemon.until(lambda: leads(daemon, runs))
    ask_daemon(place, Pause("ann"))
    waits = submit(place)
    ask_daemon(place, Cancel([runs], "ann"))
    daemon.until(lambda: not daemon.job(runs).status.active)
    daemon.kill()
    again = Running(place, hosts(place))
    again.until(lambda: "ann has paused the cluster" in again.job(waits).reason)
    assert again.job(waits).status is JobStatus.QUEUED
    ask_daemon(place, Pause(""))
    again.until(lambda: leads(again, waits))
    again.down(leave_jobs=True)


def test_job_goes_on_without_a_daemon_and_the_next_one_takes_it_up(place: ClusterFolder) -> None:
    first = Running(place, hosts(place))
    number = submit(place)
    first.until(lambda: leads(first, number))
    waits = submit(place)
    first.kill()
    assert first.job(number).status is JobStatus.RUNNING
    later = Running(place, hosts(place))
    time.sleep(0.5)
    job = later.job(number)
    assert (job.status, job.attempts) == (JobStatus.RUNNING, 1)
    assert later.job(waits).status is JobStatus.QUEUED
    ask_daemon(place, Cancel([number], "me"))
    later.until(lambda: later.job(waits).status is JobStatus.RUNNING)
    assert later.job(number).status is JobStatus.CANCELLED
    assert later.job(number).message == "cancelled by me"
    later.down(leave_jobs=False)
    again = later.job(waits)
    assert (again.status, again.reason) == (JobStatus.QUEUED, "the cluster was taken down")


def test_keeper_that_is_killed_is_replaced_and_its_jobs_go_on(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, TRAINS="1")
    daemon.until(lambda: leads(daemon, number))
    (keeper,) = psutil.Process(daemon.pid).children()
    keeper.kill()
    hosts(place).write_text("a slots=2\n")
    later = submit(place)
    daemon.until(lambda: leads(daemon, later))
    assert (daemon.job(number).attempts, daemon.job(number).held) == (1, {"a": 1})
    ask_daemon(place, Cancel([number], "me"))
    daemon.until(lambda: daemon.job(number).message == "cancelled by me")
    daemon.down(leave_jobs=False)


def test_job_that_a_killed_daemon_was_about_to_start_is_started(place: ClusterFolder) -> None:
    store = JobStore.create(place.database)
    (job,) = store.add_jobs([JobRequest("train", SPEC)], {}, time.time())
    JobQueue(store, lambda *_: None).started(job, {"a": 1})
    store.close()
    daemon = Running(place, hosts(place))
    daemon.until(lambda: leads(daemon, job.number))
    assert daemon.job(1).status is JobStatus.RUNNING
    daemon.down(leave_jobs=False)


def test_leader_that_cannot_begin_fails_the_job_with_its_error(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, EXIT="1")
    daemon.until(lambda: not daemon.job(number).status.active)
    assert daemon.job(number).status is JobStatus.FAILED
    assert daemon.job(number).message == "no such folder"
    daemon.down(leave_jobs=True)


@pytest.mark.parametrize("event", ["run_started", "run_finished"])
def test_end_of_a_run_counts_although_the_clock_was_set_back(
    place: ClusterFolder, event: str
) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, BEHIND=event)
    daemon.until(lambda: not daemon.job(number).status.active)
    job = daemon.job(number)
    assert (job.status, job.attempts) == (JobStatus.SUCCEEDED, 1)
    ask_daemon(place, Requeue([number], {"EXIT": "1"}))
    daemon.until(lambda: daemon.job(number).attempts == 2)
    daemon.until(lambda: not daemon.job(number).status.active)
    job = daemon.job(number)
    assert (job.status, job.message) == (JobStatus.FAILED, "no such folder"), "not its earlier end"
    daemon.down(leave_jobs=True)


def test_leader_that_is_killed_before_it_begins_is_started_again(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, KILLED="1")
    daemon.until(lambda: leads(daemon, number) or not daemon.job(number).status.active)
    assert daemon.job(number).status is JobStatus.RUNNING
    daemon.down(leave_jobs=False)


def test_job_goes_to_another_host_if_one_lacks_python_and_fails_if_all_do(
    place: ClusterFolder,
) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, UNFIT="1")
    daemon.until(lambda: not daemon.job(number).status.active)
    assert daemon.job(number).status is JobStatus.FAILED
    assert daemon.job(number).message == "host a has no Python"
    assert [row["state"] for row in ask_daemon(place, Hosts()).data] == ["lost"]
    ask_daemon(place, DrainHost("a", "no Python", "ann", time.time()))
    answer = ask_daemon(place, UndrainHost("a", "ann"))
    assert "; it is lost (host a has no Python), and used when it answers" in answer.message
    hosts(place).write_text("a slots=1\nb slots=1\n")
    daemon.down(leave_jobs=True)
    daemon = Running(place, hosts(place))  # to which both hosts are as good
    number = submit(place, UNFIT="1")
    daemon.until(lambda: leads(daemon, number) and daemon.job(number).held == {"b": 1})
    daemon.down(leave_jobs=False)


def test_hosts_are_told_without_a_daemon(
    place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place, TRAINS="1")
    daemon.until(lambda: leads(daemon, number))
    daemon.kill()
    print_hosts(cluster="test", as_json=False)
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"a +unknown +1 +0 +train-{number}-\w+: 1", out.splitlines()[1])
    assert "has no daemon" in err


def test_silent_host_is_lost_if_other_runs_hear_from_theirs(
    place: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = tmp_path / "trial"  # that no host passes, over when there is a file "seen"
    trial.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/seen ]; do sleep 0.02; done\nexit 1\n")
    trial.chmod(0o700)
    monkeypatch.setattr("hvd_elastic.jobs.health.sys.executable", str(trial))
    hosts(place).write_text("a slots=1\nb slots=1\n")
    daemon = Running(place, hosts(place))
    number = submit(place, TRAINS="1", CUT_OFF="1")

    def rows() -> list[tuple[str, int, str | None]]:
        return [
            (row["state"], row["free"], row["cause"]) for row in ask_daemon(place, Hosts()).data
        ]

    daemon.until(lambda: rows()[0][0] == "silent")
    time.sleep(3.5)
    silent, other = rows()
    assert silent[:2] == ("silent", 0), "the network of this machine may have failed"
    assert "this machine may be cut off" in (silent[2] or "")
    assert other == ("up", 1, None)
    job = daemon.job(number)
    assert job.reason.startswith("its leader hears from none of its hosts since ")
    assert (job.held, job.eta) == ({"a": 1}, None)
    submit(place, TRAINS="1")
    daemon.until(lambda: (rows()[0][2] or "").endswith(", being tried"))
    (tmp_path / "seen").touch()
    daemon.until(lambda: [state for state, *_ in rows()] == ["lost", "up"])
    daemon.down(leave_jobs=False)


def test_run_whose_leader_leads_again_hears_from_its_hosts(place: ClusterFolder) -> None:
    hosts(place).write_text("a slots=1\nb slots=1\n")
    daemon = Running(place, hosts(place))
    number = submit(place, TRAINS="1", CUT_OFF="1", COMES_BACK="1")

    def states() -> list[str]:
        return [row["state"] for row in ask_daemon(place, Hosts()).data]

    daemon.until(lambda: states() == ["silent", "up"])
    folder = runs_folder() / daemon.job(number).run_id
    (folder / "grace").touch()
    daemon.until(lambda: "has not reached a again" in daemon.job(number).reason)
    assert states() == ["silent", "up"]
    (folder / "heals").touch()
    daemon.until(lambda: states() == ["up", "up"])
    daemon.until(lambda: "not reached" not in daemon.job(number).reason)
    daemon.down(leave_jobs=False)


def test_daemon_waits_while_it_can_write_nothing_and_no_job_fails(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:  # noqa: PTH123
        patched.setattr(sys, "stderr", full)  # its log is on the same disk
        daemon = Running(place, hosts(place))
        full.close()
    place.hostfiles.rmdir()
    place.hostfiles.write_text("no hostfile can be made in this")
    number = submit(place)
    time.sleep(2.5)  # it is tried meanwhile
    assert daemon.job(number).status.active
    place.hostfiles.unlink()
    place.hostfiles.mkdir()
    daemon.until(lambda: leads(daemon, number))
    assert daemon.job(number).status is JobStatus.RUNNING
    daemon.down(leave_jobs=False)


def test_hostfile_that_could_not_be_written_is_written_later(place: ClusterFolder) -> None:
    hosts(place).write_text("a slots=2\n")
    daemon = Running(place, hosts(place))
    request = JobRequest("train", SPEC, kind=JobKind.FIXED, min_np=1, max_np=1)
    ask_daemon(place, Submit([request], {}))
    daemon.until(lambda: leads(daemon, 1))
    run_id = daemon.job(1).run_id
    written, away = place.hostfiles / run_id, place.path / "away"
    place.hostfiles.rename(away)
    hosts(place).write_text("b slots=1\n")
    daemon.until(lambda: daemon.job(1).held == {"b": 1})
    away.rename(place.hostfiles)
    daemon.until(lambda: written.read_text().startswith("b "))
    daemon.down(leave_jobs=False)


def test_leader_that_dies_is_started_again(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    folder = RunFolder(runs_folder() / daemon.job(number).run_id)

    def started() -> list[bool]:
        return [e.resumed for e in folder.read_events() if isinstance(e, RunStarted)]

    daemon.until(lambda: started() == [False] and folder.leader().get("pid"))
    os.kill(folder.leader()["pid"], signal.SIGKILL)
    daemon.until(lambda: started() == [False, True])
    assert daemon.job(number).status is JobStatus.RUNNING
    daemon.down(leave_jobs=False)


def test_a_leader_that_could_not_be_started_again_is_when_it_can(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = JobRuns._write_hostfile, place.path / "is-full"

    def fail_once(runs: JobRuns, *arguments: Any) -> str:
        if is_full.exists():
            is_full.unlink()
            raise RunError("no space left on the disk")
        return write(runs, *arguments)

    monkeypatch.setattr(JobRuns, "_write_hostfile", fail_once)
    daemon = Running(place, hosts(place))
    number = submit(place)
    folder = RunFolder(runs_folder() / daemon.job(number).run_id)

    def started() -> list[bool]:
        return [e.resumed for e in folder.read_events() if isinstance(e, RunStarted)]

    daemon.until(lambda: started() == [False] and folder.leader().get("pid"))
    is_full.touch()
    os.kill(folder.leader()["pid"], signal.SIGKILL)
    daemon.until(lambda: started()[1:])
    assert not is_full.exists()
    assert daemon.job(number).status is JobStatus.RUNNING
    daemon.down(leave_jobs=False)


def test_a_plain_command_keeps_a_host_that_was_taken_out_until_it_ends(
    place: ClusterFolder,
) -> None:
    hosts(place).write_text("a slots=1\nb slots=1\n")
    daemon = Running(place, hosts(place))
    request = JobRequest("sleep", SPEC, kind=JobKind.PLAIN, max_np=1, wish=HostWish("a,b"))
    (number,) = ask_daemon(place, Submit([request], {"TRAINS": "1"})).jobs
    daemon.until(lambda: leads(daemon, number))
    (host,) = daemon.job(number).held
    other = "b" if host == "a" else "a"
    hosts(place).write_text(f"{other} slots=1\n")

    def rows() -> dict[str, dict[str, Any]]:
        return {row["host"]: row for row in ask_daemon(place, Hosts()).data}

    daemon.until(lambda: rows()[host]["state"] == "leaving")
    daemon.kill()
    daemon = Running(place, hosts(place))  # which finds the host in the hostfile of the job
    daemon.until(lambda: rows()[host]["state"] == "leaving")
    waits = submit(place)
    daemon.until(lambda: leads(daemon, waits))
    assert (daemon.job(number).held, daemon.job(waits).held) == ({host: 1}, {other: 1})
    assert "empty as soon as sleep-1" in rows()[host]["cause"]
    ask_daemon(place, Cancel([number], "me"))
    daemon.until(lambda: host not in rows())
    daemon.down(leave_jobs=False)


def test_events_tell_who_holds_slots_after_a_job_was_queued_again(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    daemon.until(lambda: leads(daemon, number))
    ask_daemon(place, Requeue([number], {}))
    daemon.until(lambda: daemon.job(number).attempts == 2 and leads(daemon, number))

    def held() -> dict[str, int]:
        return summarize_cluster(iter_records(place.events)).jobs[str(number)].held

    daemon.until(lambda: held() == {"a": 1})
    daemon.down(leave_jobs=False)


def as_keeper(path: Path, lines: list[str]) -> None:
    """Say lines to the daemon in place of this user's keeper, in one connection each."""
    place = ClusterFolder(path, shared=True)
    request = JobRequest("train", {"command": ["x"]}, max_np=1, secret="00")
    ask_daemon(place, Submit([request], {}))
    while lines:
        with place.connect("keepers.sock", LIMIT_S) as link, link.makefile("rb") as told:
            if not (first := told.readline()):  # that before it has not been seen to end yet
                continue
            line = lines.pop(0)
            news = {"run_id": json.loads(first)["run_id"], "attempt": 1, "type": "news"}
            more = {"offset": 0, "lines": [], "is_all": True, "led": True, "is_own": True}
            said = json.dumps({**news, **more, **json.loads(line)}).encode() + b"\n"
            for _ in range(3):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # sent away
                    link.sendall(said)
                ask_daemon(place, Hosts())  # after that the daemon has read it


@contextlib.contextmanager
def shared_place() -> Iterator[ClusterFolder]:
    """Yield the folder of a cluster of this user that the other one may use."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        Path(above).chmod(0o755)
        (Path(above) / "hosts").write_text("a slots=1\n")
        place = ClusterFolder(Path(above) / "queue", shared=True)
        place.hostfiles.mkdir(parents=True)
        os.chown(place.path, 0, other_user.UID)
        place.path.chmod(0o750)
        (Path(above) / "other").mkdir()
        os.chown(Path(above) / "other", other_user.UID, other_user.UID)
        try:
            yield place
        finally:
            if place.daemon_alive():  # the test has failed
                os.kill(place.daemon()["pid"], signal.SIGKILL)


def as_other(place: ClusterFolder, act: Callable[[], object]) -> None:
    """Act as the other user, who has a home of their own."""

    def at_home() -> None:
        os.environ["HVD_ELASTIC_HOME"] = str(place.path.parent / "other")
        act()

    other_user.call(at_home)


def saying(*events: dict[str, Any]) -> str:
    """Events as a line of :func:`as_keeper`."""
    stamped = [json.dumps({"t": 1.0, "mono": 1.0, **event}) for event in events]
    return json.dumps({"lines": stamped})


@other_user.needs_root
def test_what_a_user_makes_up_as_keeper_ends_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_APART_S", 0.02)
    with shared_place() as place:
        huge = f"1{'0' * 290}"
        done = {"generation": 1, "size": 1, "pause_s": None}
        rescale = {**done, "kind": "rescale_started", "hosts": ["a"] * 70_000, "reason": ""}
        rescale |= {"from_size": 0, "to_size": 1}
        lost = {"cause": "", "silent_s": None}
        lines = [
            r'{"lines": ["\ud800"]}',
            f'{{"lines": ["{{\\"kind\\":\\"run_started\\",\\"t\\":{huge}{huge},\\"mono\\":1}}"]}}',
            f'{{"offset": {huge}}}',
            f'{{"pid": {huge}}}',
            saying({**rescale, "slots": [2**40]}, {**done, "kind": "rescale_finished"}),
            saying({**rescale, "slots": [1] * 70_000}),
            saying(*({"kind": "host_lost", "host": f"{n}", **lost} for n in range(70_000))),
            r'{"led": false, "last_line": "\ud800 its last line"}',
        ]
        daemon = Running(place, place.path.parent / "hosts")
        process = psutil.Process(daemon.pid)
        before = process.memory_info().rss  # with what other tests have left, since it is a fork
        as_other(place, lambda: as_keeper(place.path, lines))
        daemon.until(lambda: "its last line" in daemon.job(1).message)
        assert process.memory_info().rss - before < 1 << 30
        daemon.down(leave_jobs=True)


@other_user.needs_root
def test_a_host_that_starts_nothing_of_a_user_goes_to_others_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with shared_place() as place:
        hostfile = place.path.parent / "hosts"
        hostfile.write_text("a slots=1\nb slots=1\n")
        answers = place.path.parent / "answers"  # both hosts are well, as the daemon finds
        told = "".join(f'{{"kind": "host", "host": "{name}", "state": "ok"}}\n' for name in "ab")
        answers.write_text(f"#!/bin/sh\nprintf '%s' '{told}'\n")
        answers.chmod(0o700)
        monkeypatch.setattr("hvd_elastic.jobs.health.sys.executable", str(answers))
        monkeypatch.setattr("hvd_elastic.jobs.progress._BARRED_S", (600.0,))
        daemon = Running(place, hostfile)
        refused = {"kind": "warning", "t": time.time(), "unusable_host": "a", "fatal": False}
        refused |= {"message": "Permission denied"}

        def submit_and_be_refused() -> None:
            request = JobRequest("train", {"command": ["x"]}, max_np=1, secret="00")
            ask_daemon(place, Submit([request], {}))
            place.shared = True
            with place.connect("keepers.sock", LIMIT_S) as link, link.makefile("rb") as orders:
                lead = json.loads(orders.readline())
                assert "a slots=1" in lead["hosts"]
                news = {"run_id": lead["run_id"], "attempt": 1, "type": "news", "offset": 0}
                news |= {"is_all": True, "led": True, "is_own": True}
                told = [{**refused, "unusable_host": name} for name in ("made-up", "a")]
                news |= {"lines": [json.dumps({"mono": 1.0, **each}) for each in told]}
                link.sendall(json.dumps(news).encode() + b"\n")
                granted = json.loads(orders.readline())
                assert granted["type"] == "grant"
                assert granted["hosts"].startswith("b slots=1")
                ask_daemon(place, Submit([request], {}))
                daemon.until(lambda: "starts nothing of user nobody" in daemon_row("a")["cause"])
                daemon.until(lambda: "nothing of user nobody" in own_jobs()[2]["reason"])

        def daemon_row(name: str) -> dict[str, Any]:
            return next(row for row in ask_daemon(place, Hosts()).data if row["host"] == name)

        def own_jobs() -> dict[int, Any]:
            told = ask_daemon(place, Look("with_status", ["queued", 9, 0])).data
            return {job["number"]: job for job in told}

        as_other(place, submit_and_be_refused)
        assert daemon.job(1).held == {"b": 1}
        assert daemon.job(2).status is JobStatus.QUEUED, "what one job finds holds for the other"
        assert daemon_row("a")["free"] == 1
        daemon.down(leave_jobs=True)
    said = capfd.readouterr().err
    assert "host a starts nothing of user nobody (Permission denied)" in said
    assert "made-up" not in said


@other_user.needs_root
@pytest.mark.parametrize(("apart_s", "warnings"), [(3600.0, 1), (0.0, 3)])
def test_keepers_of_others_are_warned_of_once_a_minute(
    apart_s: float,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runs, "_WARN_S", apart_s)
    troubles = [{"type": "trouble", "message": f"no space {number}"} for number in range(3)]

    def say_all() -> None:
        request = JobRequest("train", {"command": ["x"]}, max_np=1, secret="00")
        ask_daemon(shared, Submit([request], {}))
        with shared.connect("keepers.sock", LIMIT_S) as link:
            for trouble in troubles:
                link.sendall(json.dumps(trouble).encode() + b"\n")
                ask_daemon(shared, Hosts())  # after that the daemon has read it

    with shared_place() as shared:
        daemon = Running(shared, shared.path.parent / "hosts")
        as_other(shared, say_all)
        daemon.down(leave_jobs=True)
    assert capfd.readouterr().err.count("the keeper of user nobody") == warnings


def test_a_keeper_that_says_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "time", SimpleNamespace(monotonic=lambda: 0.0))
    here, there = socket.socketpair()
    other = keepers._OtherKeeper(here, other_user.UID)
    line = b'{"type":"trouble","message":""}\n' * 4096

    def flood() -> None:
        with contextlib.suppress(OSError):  # until the other end is closed
            while True:
                there.sendall(line)

    floods = threading.Thread(target=flood)
    floods.start()
    while other.count():
        other.link.receive()
    assert other.link.received < 2 * keepers._MOST_BYTES, "the rest is not read now"
    here.close()
    floods.join()
    there.close()


@other_user.needs_root
def test_a_keeper_that_comes_again_at_once_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_APART_S", 3600.0)
    with shared_place() as place:
        daemon = Running(place, place.path.parent / "hosts")

        def come_twice() -> None:
            for is_taken in (True, False):
                with place.connect("keepers.sock", LIMIT_S) as link:
                    ask_daemon(place, Hosts())
                    link.setblocking(not is_taken)
                    with contextlib.suppress(BlockingIOError):  # it is there, and told nothing
                        assert (link.recv(1) == b"") != is_taken

        as_other(place, come_twice)
        daemon.down(leave_jobs=True)


@other_user.needs_root
def test_a_job_that_was_cancelled_ends_also_if_keeper_and_leader_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_module, "_ORPHAN_S", 8.0)  # it is cancelled within that
    ended = subprocess.Popen(["true"])
    ended.wait()
    with shared_place() as place:
        daemon = Running(place, place.path.parent / "hosts")

        def submit_and_go() -> None:
            request = JobRequest("train", {"command": ["x"]}, max_np=1, secret="00")
            request.spec["leader_grace_s"] = 0.0
            ask_daemon(place, Submit([request], {}))
            with place.connect("keepers.sock", LIMIT_S) as link, link.makefile("rb") as told:
                news = {"run_id": json.loads(told.readline())["run_id"], "attempt": 1, "offset": 0}
                news |= {"lines": [], "is_all": True, "led": True, "is_own": True}
                news |= {"type": "news", "pid": ended.pid}
                link.sendall(json.dumps(news).encode() + b"\n")
                ask_daemon(place, Hosts())  # after that the daemon has read it

        as_other(place, submit_and_go)
        ask_daemon(place, Hosts())  # after that the daemon has seen the end of the connection
        said = ask_daemon(place, Cancel([1], "root")).message
        assert "the keeper of user nobody is away" in said
        daemon.until(lambda: daemon.job(1).status is JobStatus.CANCELLED)
        assert daemon.job(1).message == "cancelled by root"
        daemon.down(leave_jobs=True)


@other_user.needs_root
def test_a_user_who_changes_jobs_again_and_again_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MOST_CHANGES", 3.0)
    monkeypatch.setattr(requests, "_CHANGES_S", 1e-6)
    with shared_place() as place:
        daemon = Running(place, place.path.parent / "hosts")

        def submit_often() -> None:
            request = JobRequest("train", {"command": ["x"]}, max_np=1, secret="00")
            ask_daemon(place, Submit([request, request], {}))
            ask_daemon(place, Cancel([1], "x"))
            with pytest.raises(RunError, match="has changed 3 jobs in a short time"):
                ask_daemon(place, Cancel([2], "x"))
            ask_daemon(place, Hosts())

        as_other(place, submit_often)
        daemon.down(leave_jobs=True)


def test_a_run_that_ends_without_a_daemon_has_ended_then(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    daemon.until(lambda: leads(daemon, number))
    daemon.down(leave_jobs=True)
    job = daemon.job(number)
    run = RunFolder.open(job.run_id)
    run.send_request("stop")
    daemon.until(lambda: not run.leader_alive())
    end = [*iter_records(run.events)][-1]
    assert end["kind"] == "run_finished"
    # It had less time than its limit, which has passed by now.
    limit_s = end["t"] - (job.started_at or 0.0) + 0.1
    store = JobStore.create(place.database)
    store.save([replace(job, request=replace(job.request, time_limit_s=limit_s))])
    store.close()
    daemon.until(lambda: time.time() > end["t"] + 0.2)
    daemon = Running(place, hosts(place))
    daemon.until(lambda: not daemon.job(number).status.active)
    ended = daemon.job(number)
    assert (ended.status, ended.message) == (
        JobStatus.CANCELLED,
        "its run was stopped by its user",
    )
    assert ended.ended_at == end["t"]
    # It is told after it is kept.
    finished = lambda: [e for e in iter_records(place.events) if e["kind"] == "job_finished"]  # noqa: E731
    daemon.until(finished)
    (told,) = finished()
    assert told["ended"] == end["t"] < told["t"]
    daemon.down(leave_jobs=True)


def test_a_run_whose_leader_dies_without_a_daemon_has_run_until_then(place: ClusterFolder) -> None:
    daemon = Running(place, hosts(place))
    number = submit(place)
    daemon.until(lambda: leads(daemon, number))
    job = daemon.job(number)
    run = RunFolder.open(job.run_id)
    daemon.until(lambda: [*iter_records(run.events)])
    daemon.down(leave_jobs=True)
    (began,) = iter_records(run.events)
    os.kill(run.leader()["pid"], signal.SIGKILL)
    daemon.until(lambda: not run.leader_alive())
    daemon = Running(place, hosts(place))
    daemon.until(lambda: daemon.job(number).attempts == 2)
    assert daemon.job(number).ran_s == began["t"] - (job.started_at or 0.0)
    daemon.down(leave_jobs=False)
