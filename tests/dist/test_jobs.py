"""Real jobs of a queue: they share slots, outlive the daemon, and each runs once."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from typing_extensions import Self

from benchmarks.testbed.run_processes import agents_on
from hvd_elastic.cli.jobs.queue import job_fields
from hvd_elastic.formatting import duration_words
from hvd_elastic.jobs.job import Hosts
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.programs.processes import read_process
from hvd_elastic.records.json_lines import read_records
from tests.dist import jobs
from tests.dist.jobs import START_S, assert_nothing_left, audit_of, call, hostfile_of, write_script
from tests.dist.running import Stage
from tests.paths import ALL, COSTLY, LIMIT_S

pytestmark = pytest.mark.dist
shared = jobs.shared


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not come true: {what}"
        time.sleep(0.05)
    return value


class Cluster:
    """A cluster with its daemon in the background; all of it ends with the block."""

    def __init__(
        self, home: Path, hostfile: Path, name: str = "test", options: Sequence[object] = ()
    ) -> None:
        self.home, self.hostfile, self.name = home, hostfile, name
        self._options = options
        self.folder = home / "clusters" / name

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        waiting = [
            str(job["job"]) for job in self.queue() if job["status"] in ("queued", "running")
        ]
        if not ClusterFolder(self.folder).daemon_alive():
            with contextlib.suppress(AssertionError):
                self.up()
        if waiting:
            self.call("cancel", *waiting, check=False)
        self.call("down", check=False)
        for run in (self.home / "runs").glob("*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(int(json.loads((run / "leader.lock").read_text())["pid"]), signal.SIGKILL)

    def call(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = call(*arguments, home=self.home, timeout_s=LIMIT_S)
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}"
        return done

    def up(self) -> None:
        self.call("up", self.hostfile, "--name", self.name, "--detach", *self._options)

    def submit(self, *arguments: object, **more: str) -> int:
        variables: Any = more
        done = call("submit", "--json", *arguments, home=self.home, **variables)
        assert done.returncode == 0, done.stderr
        (number,) = json.loads(done.stdout)["jobs"]
        return int(number)

    # These look at the queue in this process, since the start of a program takes a while.

    def queue(self) -> list[dict[str, Any]]:
        store = JobStore.read_only(self.folder / "queue.sqlite")
        with contextlib.closing(store):
            return [job_fields(job) for job in [*store.active(), *store.ended()]]

    def job(self, number: int) -> dict[str, Any]:
        return next(job for job in self.queue() if job["job"] == number)

    def slots(self, number: int) -> int:
        return int(self.job(number)["slots"])

    def states(self) -> list[str]:
        """State of each host."""
        return [row["state"] for row in ask_daemon(ClusterFolder(self.folder), Hosts()).data]

    def events(self, kind: str, run_id: str = "") -> list[dict[str, Any]]:
        folder = self.home / "runs" / run_id if run_id else self.folder
        return [e for e in read_records(folder / "events.jsonl") if e["kind"] == kind]

    def kill_daemon(self) -> None:
        """Kill -9."""
        pid = json.loads((self.folder / "daemon.lock").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: read_process(pid) is None, "the daemon is gone")


def till(path: Path) -> str:
    """Shell text that waits for a file."""
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of this machine."""
    with Cluster(tmp_path, hostfile_of(tmp_path / "hosts", ["localhost"], slots=2)) as cluster:
        yield cluster


def test_commands_wait_for_slots_for_each_other_and_jobs_end_as_they_say(
    local: Cluster, tmp_path: Path
) -> None:
    """One daemon for all, since most of the time is the start of programs."""
    hostfile_of(local.hostfile, ["localhost"], slots=3)
    # On a busy machine a job takes longer to begin.
    limit_s = round(8.0 * max(1.0, os.getloadavg()[0] / 4))
    limited = _submit_with_time_limit(local, tmp_path, limit_s)
    out, go = tmp_path / "out", tmp_path / "go"
    first = local.submit(
        *("--plain", "--name", "first", "--", "sh", "-c", f"echo $TOKEN >> {out}; {till(go)}"),
        TOKEN="s3cret-value",
    )
    fails = local.submit(
        *("--plain", "--retries", 1, "--", "sh", "-c", f"echo failing >> {out}; exit 3")
    )
    wrong = local.submit("--plain", "--python", "/no/such/python", "--", "true")
    after = local.submit("--plain", "--after", "ok:first", "--", "sh", "-c", f"echo after >> {out}")
    never = local.submit("--plain", "--after", f"ok:{fails}", "--", "touch", tmp_path / "never")
    waits = local.job(after)
    assert waits["status"] == "queued"
    assert waits["reason"].startswith(f"waits for job {first} to succeed")
    go.touch()
    until(lambda: local.job(wrong)["status"] == "failed", "its python is wrong")
    assert "no Python at /no/such/python" in local.job(wrong)["message"]
    assert local.states() == ["up"], "that is no fault of the host"
    done = local.call("wait", first, fails, after, never, check=False)
    assert done.returncode == 1, "not all have succeeded"
    assert sorted(out.read_text().split()) == ["after", "failing", "failing", "s3cret-value"]
    assert not (tmp_path / "never").exists()
    told = {job["job"]: job for job in local.queue()}
    assert [told[number]["status"] for number in (first, fails, after, never)] == [
        *("succeeded", "failed", "succeeded", "cancelled"),
    ]
    assert "exit status 3" in told[fails]["message"]
    assert "2 attempts" in told[fails]["message"]
    assert f"job {fails} to succeed, which has failed" in told[never]["message"]
    assert local.call("status", told[first]["run_id"]).stdout, "it is a run as any other"
    for path in local.folder.iterdir():
        assert not path.is_file() or b"s3cret-value" not in path.read_bytes(), path
    _is_at_its_time_limit(local, limited, limit_s, tmp_path / "told")
    (tmp_path / "enough").touch()
    _refuses_mistakes(local)
    local.call("requeue", limited)
    for _ in range(10):  # on a slow machine its time is over before it has begun to train
        if local.call("wait", limited, check=False).returncode == 0:
            break
        local.call("requeue", limited)
    assert local.job(limited)["status"] == "succeeded"
    run_id = local.job(limited)["run_id"]
    assert audit_of(tmp_path / "runs" / run_id).ok, "nothing is lost"


def _submit_with_time_limit(local: Cluster, folder: Path, limit_s: int) -> int:
    limits = ("--time", f"{limit_s}s", "--retries", 3, "--max-np", 1)
    train = (sys.executable, write_script(folder), "--step-time", "0.02")
    asked = (*limits, "--notify", "cat >> told", "--audit")
    return local.submit(*asked, "--", *train, "--until", folder / "enough")


def _is_at_its_time_limit(local: Cluster, number: int, limit_s: int, told: Path) -> None:
    until(lambda: local.job(number)["status"] == "failed", "it is at its time limit")
    ended = local.job(number)
    assert ended["message"].startswith(
        f"time limit of {duration_words(limit_s)}: hvd-elastic requeue"
    )
    assert ended["attempts"] == 1
    until(lambda: told.exists() and told.read_text().count("\n") == 2, "its user is told of both")
    near, over = map(json.loads, told.read_text().splitlines())
    assert (near["kind"], over["status"]) == ("time_limit_near", "failed")
    assert 0 <= near["left_s"] <= 0.1 * limit_s


def in_terminal(home: Path, arguments: Sequence[object], keys: bytes) -> tuple[int, str]:
    """Run a command of ours in a terminal of its own, and press keys."""
    argv = jobs.command(*arguments)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, jobs.environment(home))
    os.write(terminal, keys)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody writes any more
        while data := os.read(terminal, 4096):
            shown += data
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def _refuses_mistakes(local: Cluster) -> None:
    for arguments, status, said in (
        (
            ("submit", "--fixed", "--np", 9, "--", "sleep", 1),
            1,
            "needs 9 slots, and cluster test has 3",
        ),
        (("submit", "--after", "ok:77", "--", "sleep", 1), 2, "there is no job '77'"),
        (("submit", "--array", "9-0", "--", "sleep", 1), 2, "the range '9-0' is empty"),
        (("up", local.hostfile, "--name", "test", "--detach"), 1, "has a daemon already"),
        (("cancel", 2), 1, "job 2 (first-2-"),
    ):
        done = local.call(*arguments, check=False)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
        assert "Traceback" not in done.stderr
    local.hostfile.write_text("localhost slots=two\n")
    log = local.folder / "daemon.log"
    until(lambda: "slots is a whole number, not 'two'" in log.read_text(), "the mistake is named")
    hostfile_of(local.hostfile, ["localhost"], slots=4)
    until(lambda: '"slots": 4' in local.call("hosts", "--json").stdout, "a slot more")
    assert re.search("^localhost +up +4 +4$", local.call("hosts").stdout, re.MULTILINE)


def test_jobs_outlive_a_daemon_that_is_killed_again_and_again(
    local: Cluster, tmp_path: Path
) -> None:
    kills = 20 if ALL else 4
    script = write_script(tmp_path)
    enough = tmp_path / "enough"
    trains = local.submit(
        *("--audit", "--checkpoint-every", 1, "--", sys.executable, script),
        *("--until", enough, "--example-time", 0.01),
    )
    until(lambda: local.events("metrics", local.job(trains)["run_id"]), "it trains")
    line = f"echo $HVD_ELASTIC_ARRAY_INDEX >> {tmp_path / 'ran'}; sleep 0.3"
    submitted = local.call(
        "submit", "--plain", "--json", "--array", f"1-{kills}", "--", "sh", "-c", line
    )
    numbers = json.loads(submitted.stdout)["jobs"]
    for _ in range(kills):
        local.kill_daemon()
        local.up()
    enough.touch()
    local.call("wait", trains, *numbers)
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == [*range(1, kills + 1)]
    run_id = local.job(trains)["run_id"]
    assert len(local.events("run_started", run_id)) == 1, "its leader was not disturbed"
    assert audit_of(local.home / "runs" / run_id).ok
    assert_nothing_left(run_id=run_id)


@COSTLY
def test_jobs_share_hosts_lose_one_and_leave_nothing(
    stage: Stage, shared: Path, tmp_path: Path
) -> None:
    """Two jobs move slots between them while a host crashes; the audit of both is exact."""
    stage.boot_all()
    script = write_script(shared)
    hostfile = hostfile_of(tmp_path / "hosts", stage.hosts[:2], slots=2)
    enough = shared / f"{tmp_path.name}.enough"
    cluster = Cluster(tmp_path, hostfile, "virtual", ("-F", stage.cluster.ssh_config))
    script_call = ("--", sys.executable, script, "--until", enough, "--step-time", 0.02)
    train = ("--audit", "--checkpoint-every", 1, *script_call)
    with cluster:
        one = cluster.submit("--name", "one", *train)
        until(lambda: cluster.slots(one) >= 2, "an idle cluster is given to the job")
        there = ("--hosts", stage.hosts[1])
        every = [one, cluster.submit("--name", "two", *there, *train), cluster.submit(*train)]

        def trained() -> list[int]:
            runs = [cluster.job(number)["run_id"] for number in every]
            return [len(cluster.events("metrics", run_id)) for run_id in runs]

        until(lambda: all(trained()), "none waits")
        assert sum(map(cluster.slots, every)) <= 4
        stage.cluster.crash(stage.hosts[0])
        until(lambda: "lost" in cluster.states(), "the loss is seen")
        assert cluster.states() == ["lost", "up"]
        until(lambda: sum(map(cluster.slots, every)) <= 2, "two slots are left")
        stage.cluster.boot(stage.hosts[0])
        until(lambda: "lost" not in cluster.states(), "the host is back")
        before = trained()
        until(
            lambda: all(now > then for now, then in zip(trained(), before, strict=True)),
            "all train again",
        )
        enough.touch()
        cluster.call("wait", *every)
        decided = cluster.events("jobs_decided")
        hosts = {host for each in decided for host in each["allocations"].get(str(every[1]), ())}
        assert hosts == {stage.hosts[1]}
        for number in every:
            run_id = cluster.job(number)["run_id"]
            assert audit_of(cluster.home / "runs" / run_id).ok, run_id
            assert_nothing_left(run_id=run_id)


ALONE = """\
exec 9>>{lock}
flock --nonblock 9 || echo twice >> {ran}
echo begun >> {ran}
while [ ! -e {enough} ]; do sleep 0.1; done
echo done >> {ran}
"""
"""A plain command that tells if another process of its job is still there."""


@pytest.mark.root
def test_a_pulled_cable_and_killed_agents_cost_slots_and_no_job(
    stage: Stage, shared: Path, tmp_path: Path
) -> None:
    """The link of the host that a plain command runs on is cut; it runs elsewhere, once."""
    if stage.cluster.loopback:
        pytest.skip("hosts on the loopback network have no cables to pull")
    stage.boot_all()
    script = write_script(shared)
    hostfile = hostfile_of(tmp_path / "hosts", stage.hosts[:3], slots=2)
    names = ("lock", "ran", "enough")
    files = {name: shared / f"{tmp_path.name}.{name}" for name in names}
    limits = ("--failure-timeout", 10, "--leader-grace", 15)
    cluster = Cluster(tmp_path, hostfile, "cut", ("-F", stage.cluster.ssh_config))
    script_call = (sys.executable, script, "--until", files["enough"], "--example-time", 0.01)
    train = ("--audit", "--checkpoint-every", 1, *limits, "--", *script_call)
    with cluster:
        alone = cluster.submit("--plain", *limits, "--", "sh", "-c", ALONE.format(**files))
        until(lambda: files["ran"].exists() and files["ran"].read_text(), "the command runs")
        trains = [cluster.submit("--name", name, *train) for name in ("one", "two")]
        every = [alone, *trains]

        def taken() -> int:
            return sum(map(cluster.slots, every))

        def happened(kind: str) -> list[int]:
            runs = [cluster.job(number)["run_id"] for number in trains]
            return [len(cluster.events(kind, run_id)) for run_id in runs]

        def all_train_on() -> None:
            before = happened("metrics")
            until(lambda: all(map(operator.gt, happened("metrics"), before)), "both train on")

        until(lambda: taken() > 4, "jobs grow over all hosts")
        all_train_on()
        (host,) = cluster.job(alone)["hosts"]
        stage.cluster.cut(host)
        try:
            until(lambda: "lost" in cluster.states(), "the loss is seen")
            assert cluster.states().count("lost") == 1
            until(lambda: taken() <= 4, "jobs shrink")
            until(
                lambda: files["ran"].read_text().count("begun") == 2,
                "the command begins anew on another host",
            )
            all_train_on()
        finally:
            stage.cluster.heal(host)
        until(lambda: "lost" not in cluster.states(), "the host is back")
        until(lambda: taken() > 4, "jobs grow again")
        all_train_on()
        (other,) = cluster.job(alone)["hosts"]
        elsewhere = [host for host in stage.hosts[:3] if host != other]
        before = sum(happened("host_lost"))

        def a_host_is_lost() -> bool:
            """Kill the agents on a host; one that was leaving at that moment is not missed."""
            found = [*agents_on(stage.cluster, elsewhere)]
            for _, agent in (each for each in found if each[0] == found[0][0]):
                with contextlib.suppress(psutil.Error):
                    agent.kill()
            end = time.monotonic() + 5
            while time.monotonic() < end and sum(happened("host_lost")) == before:
                time.sleep(0.1)
            return sum(happened("host_lost")) > before

        until(a_host_is_lost, "a run loses the host")
        until(lambda: taken() > 4 and "lost" not in cluster.states(), "other agents are started")
        all_train_on()
        files["enough"].touch()
        cluster.call("wait", *every)
        assert files["ran"].read_text().split() == ["begun", "begun", "done"]
        for number in trains:
            assert audit_of(cluster.home / "runs" / cluster.job(number)["run_id"]).ok
        for number in every:
            assert_nothing_left(run_id=cluster.job(number)["run_id"])
