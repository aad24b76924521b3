"""How commands find the jobs and runs that a user names; no daemon is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.app import main
from hvd_elastic.cli.jobs.naming import find_numbers, run_id_of, source_of
from hvd_elastic.cli.jobs.queue import parse_after
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.job import After, Answer, Job, JobKind, JobRequest, JobStatus, Submit
from hvd_elastic.jobs.place import ClusterFolder, list_clusters
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.records.run_folder import RunFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    """A cluster with job 1, and jobs 2 to 4 of one array, all of the same name."""
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    monkeypatch.delenv("HVD_ELASTIC_CLUSTER", raising=False)
    place = ClusterFolder.create("test")
    store = JobStore.create(place.database)
    request = JobRequest("train", {"command": ["train"], "cwd": "/"})
    store.add_jobs([request], {}, now=1.0)
    store.add_jobs([request] * 3, {}, now=2.0)
    store.close()
    return place


def test_after_a_name_waits_for_a_whole_array(place: ClusterFolder) -> None:
    assert [each.job for each in parse_after(["ok:train"], place)] == [2, 3, 4]
    assert [each.job for each in parse_after(["ok:train-3"], place)] == [3]


def test_name_of_ended_jobs_is_that_of_the_last_submission(
    place: ClusterFolder,
) -> None:
    store = JobStore.read_only(place.database)
    assert find_numbers(store, place, ["train"]) == [2, 3, 4]
    assert find_numbers(store, place, ["train"], active=True) == [1, 2, 3, 4]
    store.close()


def test_queue_shows_a_job_once_that_starts_or_ends_while_it_is_read(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, read = JobStore.create(place.database), JobStore.with_status

    def read_and_move_on(store: JobStore, status: JobStatus, *more: Any) -> list[Job]:
        found = read(store, status, *more)
        first = daemon.jobs([1])[1]
        after = {JobStatus.QUEUED: JobStatus.RUNNING, JobStatus.RUNNING: JobStatus.SUCCEEDED}
        if first.status is status:
            daemon.save([replace(first, status=after[status])])
        return found

    monkeypatch.setattr(JobStore, "with_status", read_and_move_on)
    with pytest.raises(SystemExit, match="0"):
        main(["queue", "--json"])
    shown = [(job["job"], job["status"]) for job in json.loads(capsys.readouterr().out)]
    assert sorted(shown) == [(1, "succeeded"), (2, "queued"), (3, "queued"), (4, "queued")]
    daemon.close()


def test_waiting_ends_after_the_time_that_was_given(
    place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["wait", "1", "--cluster", place.name, "--timeout", "0.1"])
    assert ended.value.code == 1
    assert "not all jobs have ended within 0.10 s" in capsys.readouterr().err


def test_run_is_named_by_number_or_name_of_its_job(
    place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    store = JobStore.create(place.database)
    (last,) = store.add_jobs([JobRequest("train", {"command": ["train"], "cwd": "/"})], {}, now=3.0)
    for job in store.active():
        RunFolder.create(job.run_id)
    store.save([replace(job, attempts=1) for job in store.active() if job.number < last.number])

    def told(*words: str, status: str = "0") -> str:
        with pytest.raises(SystemExit, match=status):
            main([*words, "--json"])
        return capsys.readouterr().out if status == "0" else capsys.readouterr().err

    second = json.loads(told("status", "2"))["run_id"]
    assert second.startswith("train-2-")
    assert run_id_of("2") == run_id_of("train-2") == run_id_of(second) == second
    refused = told("logs", "train", status="1")
    assert f"job {last.number} ({last.run_id}) has not begun to run" in refused
    store.save([replace(last, attempts=1)])
    assert json.loads(told("status", "train"))["run_id"] == last.run_id
    assert source_of("train") == str(RunFolder.open(last.run_id).path)
    assert f"run {last.run_id} has no live leader" in told("stop", "train", status="1")
    assert "there is no run 'trains'" in told("report", "trains", status="1")
    assert run_id_of("of-another-machine") == "of-another-machine"
    RunFolder.open(last.run_id).write_run({"command": ["train"], "cwd": "/no/such/folder"})
    resumed = told("run", "--resume", "train", status="1")
    assert f"run {last.run_id} was started in the folder '/no/such/folder'" in resumed
    store.add_jobs([last.request] * 2, {}, now=4.0)
    assert "'train' stands for 2 jobs" in told("get", "train", status="1")
    RunFolder.create("2")
    assert json.loads(told("status", "2"))["run_id"] == "2"
    store.close()


@pytest.mark.parametrize("name", ["7", "5-9"])
def test_name_like_a_number_is_refused(
    name: str, place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["submit", "--plain", "--name", name, "--", "true"])
    assert "numbers of jobs" in capsys.readouterr().err


def test_command_that_is_missing_is_told_without_another_command(
    place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["submit", "--plain", "--", "./nonexist"])
    told = capsys.readouterr().err
    assert "'./nonexist'" in told
    assert "hvd-elastic run" not in told


def test_submit_has_the_options_of_a_run_that_choose_no_hosts(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Submit] = []

    def ask(_place: ClusterFolder, request: Submit) -> Answer:
        asked.append(request)
        return Answer("submitted job 5", jobs=[5], data=["true-5"])

    monkeypatch.setattr("hvd_elastic.jobs.server.ask_daemon", ask)
    words = ["--spares", "1", "--keep-checkpoints", "7", "--checkpoint-copies", "1"]
    words += ["--preemption", "aws", "--input-hosts", "cpu[1-2]", "--network-interface", "eth1"]
    words += ["--hosts", "gpu[1-2],@a100", "-x", "gpu2", "--labels", "@fast,, a100", "--gpu-memory"]
    words += ["40", "--notify", "./mail.sh", "--notify-held", "30m"]
    with pytest.raises(SystemExit, match="0"):
        main(["submit", *words, "--target-examples", "5e6", "--deadline", "6h", "--", "true"])
    (job,) = asked[0].jobs
    assert job.target_examples == 5e6
    assert job.deadline is not None
    told = {key: job.spec[key] for key in ("spares", "keep_checkpoints", "checkpoint_copies")}
    assert told == {"spares": 1, "keep_checkpoints": 7, "checkpoint_copies": 1}
    assert job.spec["input_hosts"] == ("cpu1", "cpu2")
    assert (job.spec["preemption"], job.spec["interface"]) == ("aws", "eth1")
    assert job.wish == HostWish("gpu[1-2],@a100", "gpu2", ("fast", "a100"), 40.0)
    assert (job.spec["notify"], job.notify, job.notify_held_s) == ("./mail.sh", True, 1800.0)
    assert (job.spec["policy"], job.spec["objective"]["target"]) == ("fixed", None)
    for mistake, said in (
        (["--plain", "--spares", "1"], "leave --spares out"),
        (["--fixed"], "--fixed needs the number of slots"),
        (["--preemption", "mars"], "no cloud that is known"),
        (["--hosts", "gpu[3-1]"], "--hosts: host list 'gpu[3-1]', at 'gpu[3-1]'"),
        (["--labels", ", "], "--labels is empty"),
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--notify", " "], "--notify is empty"),
        (["--notify-held", "5m"], "give --notify COMMAND too"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["submit", *mistake, "--", "true"])
        assert said in capsys.readouterr().err


def test_why_tells_what_hides_the_start_or_end_of_a_job(
    place: ClusterFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    store = JobStore.create(place.database)
    spec = {"command": ["sleep"], "cwd": "/"}
    plain = JobRequest("sleep", spec, kind=JobKind.PLAIN, max_np=1)
    (awaited,) = store.add_jobs([plain], {}, now=3.0)
    (waits,) = store.add_jobs([replace(plain, after=(After("any", awaited.number),))], {}, now=4.0)
    store.save([replace(awaited, status=JobStatus.RUNNING)])

    def expected(number: int) -> str:
        with pytest.raises(SystemExit, match="0"):
            main(["why", str(number)])
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("expected")]
        return line

    assert "nobody can say how long a plain command takes" in expected(awaited.number)
    assert "no job that it waits for has a known end" in expected(waits.number)
    store.save([replace(awaited, status=JobStatus.SUCCEEDED)])
    assert "no job before it has a known end" in expected(waits.number)
    store.close()


def test_why_explains_one_job(place: ClusterFolder, capsys: pytest.CaptureFixture[str]) -> None:
    store = JobStore.create(place.database)
    sweep = JobRequest("sweep", {"command": ["true"], "cwd": "/"}, kind=JobKind.PLAIN, max_np=1)
    both = store.add_jobs([sweep, sweep], {}, now=3.0)
    store.close()
    for words in ("sweep", f"{both[0].number}-{both[1].number}"):
        with pytest.raises(SystemExit, match="1"):
            main(["why", words])
        said = capsys.readouterr().err
        assert f"'{words}' stands for 2 jobs" in said
        assert all(job.run_id in said for job in both)
    with pytest.raises(SystemExit, match="1"):
        main(["why", "²-³"])
    assert "has no job '²-³'" in capsys.readouterr().err


def test_two_clusters_that_are_up_share_no_host(
    place: ClusterFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "one").write_text("B slots=1\n")
    with place.lock():
        place.describe_daemon(tmp_path / "all")
        with pytest.raises(SystemExit, match="1"):
            main(["up", str(tmp_path / "one"), "--name", "other"])
    assert "cluster test, which is up, has host b too" in capsys.readouterr().err
    assert "other" not in [cluster.name for cluster in list_clusters()]
