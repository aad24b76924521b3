"""Several real accounts share one cluster: each sees and changes what is its own, and no more."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_elastic.records.process_lock import is_locked
from hvd_elastic.virtual import VirtualCluster, accounts, netns
from tests.paths import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
NO_NAMESPACES = netns.why_no_namespaces()
TOKEN = "s3cret-of-bob"

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or ""),
]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S / 2
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not come true: {what}"
        time.sleep(0.1)
    return value


class Lab:
    """A virtual cluster with accounts, and a folder that all of them and the hosts see."""

    def __init__(self, cluster: VirtualCluster, folder: Path, python: Path) -> None:
        self.cluster, self.folder, self.python = cluster, folder, python
        self.ada, self.bob, self.eve = cluster.users
        self.place = folder / "queue"

    def as_user(self, user: str, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        options = accounts.as_user(user)
        options["env"] |= more
        options["cwd"] = options["cwd"] if Path(options["cwd"]).is_dir() else "/"
        command = [str(word) for word in words]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)

    def call(self, user: str, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        return self.as_user(user, self.python, "-m", "hvd_elastic.cli.app", *words, **more)

    def done(self, user: str, *words: object, **more: str) -> str:
        done = self.call(user, *words, **more)
        assert done.returncode == 0, (user, words, done.stdout, done.stderr)
        return done.stdout

    def up(self) -> None:
        where = ("--group", self.cluster.name, "--place", self.place)
        self.done(self.ada, "up", "hostfile", *where, "--detach")

    def submit(self, user: str, line: str, *options: object, **more: str) -> int:
        words = ("--json", "--plain", "--python", self.python, *options, "--", "sh", "-c", line)
        return int(json.loads(self.done(user, "submit", *words, **more))["jobs"][0])

    def job(self, number: int, user: str) -> dict[str, Any]:
        jobs = json.loads(self.done(user, "queue", "--all", "--json"))
        return next(job for job in jobs if job["job"] == number)

    def processes(self, *users: str) -> list[psutil.Process]:
        """Processes of accounts that run this package, here and on the hosts."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.username() in users and "hvd_elastic" in " ".join(process.cmdline()):
                    found.append(process)
        return found


def keeper_of(user: str) -> Path:
    """The lock of an account's keeper."""
    (found,) = Path(f"/home/{user}/.hvd_elastic/keepers").glob("queue-*/lock")
    return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # accounts may not enter pytest's
    folder.chmod(0o755)
    name = f"vca{os.getpid()}"
    users = [f"{name}{letter}" for letter in "abe"]
    python = folder / "python"
    packages = next(Path(each) for each in sys.path if each.endswith("site-packages"))
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(f'{ROOT}:{packages}')}\n"
        f'exec {_interpreter(packages)} "$@"\n'
    )
    python.chmod(0o755)
    try:
        with VirtualCluster.up(2, 1, name=name, users=users, shares=[folder]) as cluster:
            made = Lab(cluster, folder, python)
            shutil.chown(folder, made.ada, cluster.name)
            yield made
    finally:
        shutil.rmtree(folder)


def _interpreter(packages: Path) -> str:
    """Return an interpreter that other accounts can run, of the version of this one."""
    program = "import sys, msgspec, numpy; print(sys.version_info[:2])"
    stranger: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            env = {"PYTHONPATH": str(packages)}
            said = subprocess.check_output([python, "-c", program], text=True, env=env, **stranger)
            if said.strip() == str(tuple(sys.version_info[:2])):
                return python
    pytest.skip("no interpreter that other accounts may run has these packages")


def test_each_account_has_its_own_jobs_and_outlives_daemon_keeper_and_reboot(lab: Lab) -> None:
    ada, bob, eve = lab.ada, lab.bob, lab.eve
    lab.place.mkdir()
    shutil.chown(lab.place, ada)
    lab.place.chmod(0o777)
    where = ("up", "hostfile", "--place", lab.place, "--group")
    assert "all users may write in" in lab.call(ada, *where, lab.cluster.name).stderr
    assert "no such group" in lab.call(ada, *where, "no-such-group").stderr
    assert "you are not in it" in lab.call(ada, *where, "root").stderr
    lab.place.chmod(0o700)
    lab.up()
    cluster = ("--cluster", lab.place)
    out = f"cat ~/private; id -un; echo $TOKEN; while [ ! -e {lab.folder}/go ]; do sleep 0.1; done"
    lab.as_user(bob, "sh", "-c", "umask 077; echo file-of-bob > private")
    tell = ("--notify", "exec >> ~/told; cat; id -un; echo $TOKEN")
    of_bob = lab.submit(bob, out, *cluster, "--name", "one", *tell, TOKEN=TOKEN)
    of_eve = lab.submit(eve, out, *cluster, "--name", "two")  # later commands know the cluster
    until(lambda: lab.job(of_bob, eve)["status"] == "running", "bob's job runs")
    until(lambda: lab.job(of_eve, eve)["status"] == "running", "eve's job runs")
    run = Path(f"/home/{bob}/.hvd_elastic/runs") / lab.job(of_bob, bob)["run_id"]

    def log() -> str:
        return "".join(path.read_text() for path in (run / "logs").iterdir())

    until(lambda: TOKEN in log(), "the job has its user's environment")
    assert "file-of-bob" in log()
    assert bob in log(), "and is its user's on the host"

    # Neither another user nor the daemon's sees what is bob's: the kernel refuses it.
    leader = json.loads((run / "leader.lock").read_text())["pid"]
    for user in (ada, eve):
        for path in (f"/proc/{leader}/environ", run / "run.json", f"/home/{bob}/{accounts.KEY}"):
            assert "Permission denied" in lab.as_user(user, "cat", path).stderr
    for path in ("queue.sqlite", "daemon.log", "events.jsonl", "hostfiles/x", "daemon.lock"):
        assert "Permission denied" in lab.as_user(eve, "cat", lab.place / path).stderr
    files = [*lab.place.rglob("*"), *Path(f"/home/{ada}").rglob("*")]
    known = b"".join(path.read_bytes() for path in files if path.is_file())
    assert b"one-1-" in known
    assert TOKEN.encode() not in known
    assert b"~/private" not in known
    assert b"~/told" not in known
    seen = lab.job(of_bob, eve)
    assert (seen["user"], seen["command"], seen["name"]) == (bob, ["sh"], "one")
    for request in (("cancel", of_bob), ("requeue", of_bob), ("priority", of_bob, "--to", "9")):
        refused = lab.call(eve, *request)
        assert refused.returncode != 0
        assert f"is that of user {bob}" in refused.stderr
    assert lab.call(eve, "down").returncode != 0
    assert "is for the user of its daemon" in lab.call(eve, "history").stderr
    assert lab.job(of_bob, bob)["status"] == "running"
    stranger = lab.folder / "nobody"
    stranger.mkdir()
    shutil.chown(stranger, "nobody")
    refused = lab.call("nobody", "queue", *cluster, HVD_ELASTIC_HOME=str(stranger))
    assert "belongs to another user" in refused.stderr, "who is not in the group"

    def has_succeeded(number: int) -> bool:
        return bool(lab.job(number, eve)["status"] == "succeeded")

    # Keeper, daemon, and the whole machine.
    for lock in (keeper_of(eve), lab.place / "daemon.lock"):
        os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    lab.up()
    waits = lab.submit(eve, "true", "--name", "three")  # its keeper finds her other job
    until(lambda: lab.job(of_eve, eve)["slots"] == 1, "the job keeps its slots")
    assert [lab.job(each, eve)["attempts"] for each in (of_bob, of_eve)] == [1, 1]
    lab.done(bob, "cancel", of_bob)
    until(lambda: lab.job(of_bob, bob)["status"] == "cancelled", "bob's job ends")
    until(lambda: has_succeeded(waits), "the one that waited has the slot")
    until(lambda: not is_locked(keeper_of(bob)), "bob's keeper ends with his last job")
    event, *rest = Path(f"/home/{bob}/told").read_text().splitlines()
    assert json.loads(event)["message"] == f"cancelled by {bob}"
    assert rest == [bob, TOKEN], "in his account and environment"
    for process in lab.processes(ada, eve):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    lab.up()
    assert lab.job(of_eve, eve)["status"] == "running"
    last = lab.submit(eve, "true")
    lost = lab.submit(eve, "true", "--hold")
    kept = (keeper_of(eve).parent / "jobs").iterdir()
    max(kept, key=lambda path: path.stat().st_mtime).unlink()
    lab.done(eve, "release", lost)
    until(lambda: lab.job(lost, eve)["status"] == "failed", "nobody knows what to run")
    assert "Submit the job again" in lab.job(lost, eve)["message"]
    (lab.folder / "go").touch()
    for number in (of_eve, last):
        until(partial(has_succeeded, number), "all end")
    assert lab.job(of_eve, eve)["attempts"] == 2
