"""What more hosts would have brought, from the events of a queue and of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_elastic.cli.app import app
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.cluster import summarize_cluster
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.sim.jobs.history import read_history, simulate_history
from tests.unit.records.made_events import whole

BATCH, PASS_S, STEPS = 64, 1.28, 1000
"""Examples of a step, its time on one slot [s], and steps of a job."""


def run_events(begin: float = 0.0) -> list[dict[str, Any]]:
    """A run that was timed on one and on two hosts, and was twice as fast on two."""
    now, step = begin, 0
    begun = {"t": now, "mono": now, "kind": "run_started", "run_id": "x"}
    events: list[dict[str, Any]] = [whole(begun)]
    for generation, hosts in enumerate((["a"], ["a", "b"], ["a"]), 1):
        slots = [1] * len(hosts)
        begun = {"generation": generation, "hosts": hosts, "slots": slots, "reason": "r",
                 "from_size": 0, "to_size": len(hosts)}  # fmt: skip
        events.append(whole({"t": now, "mono": now, "kind": "rescale_started", **begun}))
        done = {"generation": generation, "size": len(hosts), "pause_s": 0.2}
        events.append(whole({"t": now, "mono": now, "kind": "rescale_finished", **done}))
        last = STEPS if generation == 3 else step + 60
        while step < last:
            step += 2
            now += 2 * PASS_S / len(hosts)
            made = {"step": step, "examples": BATCH * step, "size": len(hosts)}
            events.append(whole({"t": now, "mono": now, "kind": "metrics", **made}))
    return events


RUN_S = run_events()[-1]["t"]
"""Time of such a run [s]."""


def queue_events(jobs: int, alone_s: float) -> list[dict[str, Any]]:
    """Jobs that were submitted together to one host with one slot, and ran one after another."""
    events: list[dict[str, Any]] = [{"t": 0.0, "kind": "cluster_hosts", "hosts": {"a": 1}}]
    events += [
        {"t": 0.0, "kind": "job_submitted", "job": job, "name": f"j{job}", "min_np": 1}
        for job in range(jobs)
    ]
    for job in range(jobs):
        begin = job * alone_s
        decided = {"allocations": {str(job): {"a": 1}}, "reasons": {}}
        events.append({"t": begin, "kind": "jobs_decided", **decided})
        events.append({"t": begin, "kind": "job_started", "job": job, "run_id": f"j{job}-run"})
        ended = {"job": job, "status": "succeeded", "message": ""}
        events.append({"t": begin + alone_s, "kind": "job_finished", **ended})
    return events


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user with a cluster and the runs of its jobs."""
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    cluster = tmp_path / "clusters" / "gpus"
    cluster.mkdir(parents=True)
    records = queue_events(2, RUN_S)
    (cluster / "events.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    for job in range(2):
        folder = RunFolder.create(f"j{job}-run")
        records = run_events(job * RUN_S)
        folder.events.write_text("\n".join(map(json.dumps, records)) + "\n")
    return tmp_path


def test_more_hosts_bring_what_the_measured_speeds_say(home: Path) -> None:
    history = read_history(summarize_cluster(queue_events(2, RUN_S)))
    assert [job.speed is not None for job in history.jobs] == [True, True]
    alone_s = STEPS * PASS_S
    same = simulate_history(history, history.hosts_with(0), 10.0, 0.0)
    assert sorted(same.completion_s.values()) == pytest.approx([alone_s, 2 * alone_s], rel=0.05)
    more = simulate_history(history, history.hosts_with(1), 10.0, 0.0)
    assert all(took == pytest.approx(alone_s, rel=0.05) for took in more.completion_s.values())
    many = simulate_history(history, history.hosts_with(3), 10.0, 0.0)
    assert max(many.completion_s.values()) == pytest.approx(alone_s / 2, rel=0.1)


def test_a_job_that_asked_for_certain_hosts_keeps_to_them_where_they_are(home: Path) -> None:
    records = queue_events(2, RUN_S)
    records[1]["hosts"] = "a"
    history = read_history(summarize_cluster(records))
    outcome = simulate_history(history, history.hosts_with(3), 10.0, 0.0)
    assert {
        host for change in outcome.changes if change.job == "0 j0" for host in change.hosts
    } == {"a"}
    elsewhere = simulate_history(history, history.hosts_with(3)[1:], 10.0, 0.0)
    assert outcome.completion_s["0 j0"] > 1.2 * elsewhere.completion_s["0 j0"]


def test_a_job_of_which_too_little_was_measured_takes_as_long_as_it_did(home: Path) -> None:
    RunFolder.open("j1-run").events.write_text("")
    history = read_history(summarize_cluster(queue_events(2, RUN_S)))
    assert history.jobs[1].speed is None
    more = simulate_history(history, history.hosts_with(5), 10.0, 0.0)
    assert more.completion_s["1 j1"] == pytest.approx(RUN_S, rel=0.05)
    assert more.completion_s["0 j0"] < STEPS * PASS_S / 2


def test_a_job_that_grows_trains_on_until_its_further_processes_have_started(home: Path) -> None:
    def alone_on_two_s() -> float:
        history = read_history(summarize_cluster(queue_events(1, RUN_S)))
        outcome = simulate_history(history, history.hosts_with(1), 10.0, 0.0)
        return outcome.completion_s["0 j0"]

    at_once_s = alone_on_two_s()
    folder = RunFolder.open("j0-run")
    warm = whole({"kind": "worker_standby", "warm_s": 200.0})
    folder.events.write_text(f"{json.dumps(warm)}\n{folder.events.read_text()}")
    assert alone_on_two_s() == pytest.approx(at_once_s + 200 / 2, rel=0.02), "twice as fast then"


def test_the_command_answers_and_draws(home: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "more.html"
    words = ["simulate", "--history", "gpus", "--add-hosts", "1", "--out", str(drawn)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "33 % less" in told.output
    assert "added1" in drawn.read_text()
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (found["jobs"], found["jobs_left_out"], found["added_hosts"]) == (2, 0, 1)
    assert found["ratio"] == pytest.approx(2 / 3, rel=0.05)
    wrong = CliRunner().invoke(app, ["simulate", "--add-hosts", "2"])
    assert isinstance(wrong.exception, UsageError)
    assert "--history gpus --add-hosts" in str(wrong.exception)


def test_a_cluster_without_a_past_is_told_so() -> None:
    with pytest.raises(RunError, match="no job of cluster gpus has succeeded yet"):
        read_history(summarize_cluster(queue_events(0, 1.0), "gpus"))
