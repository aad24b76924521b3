"""The commands that look at a live run and steer it, as another shell of the same user."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.records.json_lines import read_records
from tests.dist import jobs
from tests.dist.jobs import (
    START_S,
    Job,
    assert_nothing_left,
    call,
    command,
    environment,
    hostfile_of,
    write_script,
)
from tests.dist.running import Stage
from tests.paths import ALL
from tests.waiting import until

pytestmark = pytest.mark.dist
shared = jobs.shared


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("script"))


class Detached:
    """A run in the background, with up to two processes on this machine."""

    def __init__(self, home: Path, script: Path) -> None:
        self.home = home
        self.run_id = f"bg-{secrets.token_hex(3)}"
        self.folder = home / "runs" / self.run_id
        self.enough = home / f"{self.run_id}.enough"
        hostfile = hostfile_of(home / f"{self.run_id}.hosts", ["localhost"], slots=2)
        options = ["--run-id", self.run_id, "-H", hostfile, "--detach", "--audit"]
        arguments = ["--until", self.enough, "--step-time", 0.05, "--show", "HOME"]
        self.begun = call("run", *options, "--", sys.executable, script, *arguments, home=home)

    def __call__(self, *arguments: object, cwd: Path | None = None) -> Any:
        """What a command prints with --json."""
        done = call(*arguments, "--json", home=self.home, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = read_records(self.folder / "events.jsonl")
        return [event for event in found if event["kind"] == kind]

    def size(self) -> int:
        made = self.events("metrics")
        return int(made[-1]["size"]) if made else 0

    def end(self) -> None:
        call("stop", self.run_id, home=self.home)
        with_leader = self.folder / "leader.lock"
        if with_leader.exists():
            pid = json.loads(with_leader.read_text())["pid"]
            until(lambda: not Path(f"/proc/{pid}").exists(), "the leader has ended")


@pytest.fixture(scope="module")
def run(home: Path, script: Path) -> Iterator[Detached]:
    detached = Detached(home, script)
    try:
        assert detached.begun.returncode == 0, detached.begun.stderr
        until(lambda: detached.size() == 2, "training with 2 processes")
        yield detached
    finally:
        detached.end()
    assert_nothing_left(run_id=detached.run_id)


def test_detach_gives_the_terminal_back_and_names_the_run(run: Detached) -> None:
    assert run.begun.stdout == f"{run.run_id}\n", "alone on stdout, for scripts"
    assert f"hvd-elastic attach {run.run_id}" in run.begun.stderr
    assert run.events("run_started"), "it runs"


def test_status_from_another_folder(run: Detached, tmp_path: Path) -> None:
    status = run("status", run.run_id, cwd=tmp_path)
    assert (status["run_id"], status["status"], status["leader_alive"]) == (
        run.run_id,
        "running",
        True,
    )
    assert status["folder"] == str(run.folder)
    shown = call("status", run.run_id, home=run.home, cwd=tmp_path)
    assert shown.returncode == 0
    assert "localhost:2" in shown.stdout
    assert run("status", cwd=tmp_path)["run_id"] == run.run_id, "the newest by itself"


def test_list_names_it(run: Detached) -> None:
    done = call("list", "--json", home=run.home)
    (row,) = [row for row in json.loads(done.stdout) if row["run_id"] == run.run_id]
    assert row["status"] == "running"
    assert row["size"] == 2
    assert run.run_id in call("list", home=run.home).stdout


def test_discover_prints_what_horovod_reads(run: Detached, tmp_path: Path) -> None:
    found = call("discover", run.run_id, home=run.home)
    assert found.stdout == "localhost:2\n"
    assert run("discover", run.run_id) == [{"host": "localhost", "slots": 2}]
    discovery = pytest.importorskip("horovod.runner.elastic.discovery")
    path = tmp_path / "discover.sh"
    line = " ".join(command("discover", run.run_id))
    path.write_text(f"#!/bin/sh\nexec {line}\n")
    path.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(run.home).items():
            patch.setenv(name, value)
        script = discovery.HostDiscoveryScript(str(path), 1)
        assert script.find_available_hosts_and_slots() == {"localhost": 2}


def test_logs_follow_until_told_to_end(run: Detached) -> None:
    done = call("logs", run.run_id, "-n", 0, home=run.home)
    shown = f"HOME={os.environ.get('HOME')}"
    assert done.stdout.count(shown) == 2, "one line of each worker"
    assert "localhost.0" in done.stdout or "localhost:0" in done.stdout
    follower = subprocess.Popen(
        command("logs", run.run_id, "-f"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(run.home),
    )
    try:
        assert follower.stdout is not None
        assert shown in follower.stdout.readline(), "what was said before is shown"
        assert follower.poll() is None, "and more is waited for"
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=START_S)
        assert follower.returncode == 130
        assert "Traceback" not in errors
    finally:
        follower.kill()
        follower.wait()


def test_attach_shows_it_and_ctrl_c_leaves_it_alone(run: Detached) -> None:
    attached = subprocess.Popen(
        command("attach", run.run_id, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(run.home),
    )
    try:
        assert attached.stdout is not None
        assert json.loads(attached.stdout.readline())["kind"] == "run_started"
        attached.send_signal(signal.SIGINT)
        _, errors = attached.communicate(timeout=START_S)
        assert attached.returncode == 0
        assert f"run {run.run_id} continues" in errors
    finally:
        attached.kill()
        attached.wait()
    before = len(run.events("metrics"))
    until(lambda: len(run.events("metrics")) > before, "training goes on")


def test_scale_down_and_up_again(run: Detached, tmp_path: Path) -> None:
    assert run("scale", run.run_id, 1, cwd=tmp_path)["np"] == 1
    until(lambda: run.size() == 1, "one process trains")
    assert run("scale", run.run_id, "auto")["np"] is None
    until(lambda: run.size() == 2, "two processes train")
    for wrong in (0, 3, "many"):
        done = call("scale", run.run_id, wrong, home=run.home)
        assert done.returncode in (1, 2)
        assert done.stderr.startswith("error: "), done.stderr
        assert "Traceback" not in done.stderr
    assert run.size() == 2


def test_two_shells_may_ask_at_once(run: Detached) -> None:
    asking = [
        subprocess.Popen(
            command("scale", run.run_id, np, "--json"),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(run.home),
        )
        for np in (2, 2, 2)
    ]
    for process in asking:
        answer, _ = process.communicate(timeout=START_S)
        assert process.returncode == 0
        assert json.loads(answer)["ok"]
    assert not list((run.folder / "commands").glob("*.json"))


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_a_second_leader_is_refused(run: Detached, options: list[str]) -> None:
    done = call("run", "--resume", run.run_id, *options, home=run.home)
    assert done.returncode == 1
    assert not done.stdout
    assert "live leader" not in (run.folder / "leader.log").read_text(), "that is the other's"
    assert done.stderr.startswith(f"error: run {run.run_id} has a live leader (pid ")
    assert "hvd-elastic attach" in done.stderr
    before = len(run.events("metrics"))
    until(lambda: len(run.events("metrics")) > before, "training goes on")


def test_report_of_a_run_that_goes_on(run: Detached, tmp_path: Path) -> None:
    report = run("report", run.run_id, "--out", tmp_path / "report.html")
    assert Path(report["path"]).read_text().startswith("<!doctype html>")
    assert report["audit"]["recorded"]


def test_an_unknown_run_is_answered_with_those_there_are(run: Detached) -> None:
    for name in (
        ("status", "logs", "attach", "discover", "report", "stop") if ALL else ("status", "stop")
    ):
        done = call(name, "nosuchrun", home=run.home)
        assert done.returncode == 1
        assert "there is no run 'nosuchrun'" in done.stderr
        assert run.run_id in done.stderr


def test_stop_ends_it_and_says_so(run: Detached) -> None:
    """The last of these."""
    stopped = run("stop", run.run_id)
    assert (stopped["ok"], stopped["status"]) == (True, "stopped")
    assert run.events("run_finished")[-1]["status"] == "stopped"
    assert run.events("checkpoint"), "what was learned is kept"
    assert run("status", run.run_id)["status"] == "stopped"
    assert_nothing_left(run_id=run.run_id)
    late = call("stop", run.run_id, home=run.home)
    assert late.returncode == 1
    assert "no live leader" in late.stderr
    assert "it has stopped" in late.stderr


def test_two_runs_at_once_do_not_meet(stage: Stage, shared: Path, tmp_path: Path) -> None:
    """On the same host, started in the same second from the same folder."""
    script = write_script(shared)
    hostfile = hostfile_of(tmp_path / "hosts", stage.hosts[:1], slots=2)
    options = ["-H", hostfile, "-F", stage.cluster.ssh_config, "--audit", "--checkpoint-every", 0]
    options += ["--min-np", 2]  # else the first worker may be done before the second is there
    train = [*options, "--", sys.executable, script, "--epochs", 5]
    with Job(*train, home=tmp_path) as one, Job(*train, home=tmp_path) as other:
        for job in (one, other):
            assert job.wait() == 0, job.text
            assert f"[{stage.hosts[0]}:0] trained 2" in job.text
            assert job.audit().ok
            assert job.events("run_finished")[-1]["steps"] == 50
            assert not [e for e in job.events("warning") if "stray" in e["message"]]
    attached = call("attach", one.run_id, home=tmp_path)
    assert attached.returncode == 0, attached.stderr
    assert attached.stdout.index("0] trained 2") < attached.stdout.index("run succeeded")
    for job in (one, other):
        assert_nothing_left(mark=job.mark, run_id=job.run_id, cluster=stage.cluster)
