"""Several real accounts share one cluster: each sees and changes what is its own, and no more."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.testbed.other_accounts import make_python
from hvd_elastic.records.cluster import JobRecord, summarize_cluster
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.records.process_lock import is_locked
from hvd_elastic.virtual import VirtualCluster, accounts, netns
from tests.dist.jobs import audit_of, write_script
from tests.paths import ALL, COSTLY, LIMIT_S, LITTLE_WORK
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
NO_NAMESPACES = netns.why_no_namespaces()
TOKEN = "s3cret-of-"
"""Beginning of a variable that each user has in the environment."""

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or ""),
]


class Lab:
    """A virtual cluster with accounts, and a folder that all of them and the hosts see."""

    def __init__(self, cluster: VirtualCluster, folder: Path, python: Path) -> None:
        self.cluster, self.folder, self.python = cluster, folder, python
        self.users = cluster.users
        self.ada = self.users[0]
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

    def up(self, **more: str) -> None:
        where = ("--group", self.cluster.name, "--place", self.place)
        how = ("--policy", "equal", "--operators", self.users[2], "--detach")
        self.done(self.ada, "up", "hostfile", *where, *how, **more)

    def submit(self, user: str, *words: object, **more: str) -> int:
        return int(json.loads(self.done(user, "submit", "--json", *words, **more))["jobs"][0])

    def jobs(self, user: str) -> dict[int, dict[str, Any]]:
        found = json.loads(self.done(user, "queue", "--all", "--json"))
        return {job["job"]: job for job in found}

    def each(self, call: Callable[[str], Any]) -> dict[str, Any]:
        """Call a function for all users at a time, who do not wait for each other either."""
        with ThreadPoolExecutor(len(self.users)) as pool:
            return dict(zip(self.users, pool.map(call, self.users), strict=True))

    def recorded(self) -> dict[int, JobRecord]:
        """Jobs as the events of the cluster have them, for waiting: a command takes half a core."""
        found = summarize_cluster(read_records(self.place / "events.jsonl")).jobs
        return {int(number): job for number, job in found.items()}

    def has_ended(self, number: int, status: str) -> bool:
        return self.recorded()[number].status == status

    def run(self, number: int, user: str) -> Path:
        return Path(f"/home/{user}/.hvd_elastic/runs", self.recorded()[number].run_ids[-1])

    def processes(self, *users: str) -> list[psutil.Process]:
        """Processes of accounts that run this package, here and on the hosts."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.username() in users and "hvd_elastic" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def lose_all_processes(self) -> None:
        """Kill them all at one moment, as a reboot does.

        One after the other is not the same: a daemon that outlives a leader starts another one.
        """
        stopped: set[psutil.Process] = set()
        while found := set(self.processes(*self.users)) - stopped:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= found
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not self.processes(*self.users), "they are gone, and so are their locks")


def kill_holder_of(lock: Path) -> None:
    """Kill -9 of the process that holds a lock; whoever is started next finds it free."""
    os.kill(pid_in(lock), signal.SIGKILL)
    until(lambda: not is_locked(lock), "the lock is free")


def keeper_of(user: str) -> Path:
    """The lock of an account's keeper."""
    (found,) = Path(f"/home/{user}/.hvd_elastic/keepers").glob("queue-*/lock")
    return found


def pid_in(lock: Path) -> int:
    return int(json.loads(lock.read_text())["pid"])


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # accounts may not enter pytest's
    folder.chmod(0o755)
    name = f"vca{os.getpid()}"
    users = [f"{name}{letter}" for letter in "abcdef"]
    try:
        try:
            python = make_python(folder / "venv")
        except RuntimeError as error:
            pytest.skip(str(error))
        with VirtualCluster.up(2, 3, name=name, users=users, shares=[folder]) as cluster:
            made = Lab(cluster, folder, python)
            shutil.chown(folder, made.ada, cluster.name)
            yield made
    finally:
        shutil.rmtree(folder)


ATTACK = """
import json, sys
from pathlib import Path
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.jobs import job as asks
from hvd_elastic.jobs.place import open_cluster
from hvd_elastic.jobs.server import ask_daemon

numbers, paths = json.loads(sys.argv[1])
place, done, requests = open_cluster(None), [], []
for n in numbers:
    requests += [asks.Cancel([n], "x"), asks.Hold([n], "x"), asks.Requeue([n], {})]
    requests += [asks.Release([n]), asks.SetPriority([n], 9.0), asks.Down(False), asks.Pause("x")]
    requests += [asks.DrainHost("h1", "x", "x", 0.0), asks.UndrainHost("h1", "x")]
for request in requests:
    try:
        done.append(f"{request}: {ask_daemon(place, request).message}")
    except HvdElasticError as error:
        if "belongs to user" not in str(error):
            done.append(f"{request}: {error}")
for path in map(Path, paths):
    try:
        done.append(f"{path}: {[*path.iterdir()] if path.is_dir() else path.read_bytes()}")
    except PermissionError:
        pass
print(json.dumps(done))
"""
"""Tries to change the cluster and jobs of others, and to read files; prints what could be done."""


def test_six_accounts_share_a_cluster_and_outlive_daemon_keeper_and_reboot(lab: Lab) -> None:
    ada, bob, cyd, dan, eve, fay = lab.users
    lab.place.mkdir()
    shutil.chown(lab.place, ada)
    lab.place.chmod(0o777)
    where = ("up", "hostfile", "--place", lab.place, "--group")
    assert "all users may write in" in lab.call(ada, *where, lab.cluster.name).stderr
    assert "no such group" in lab.call(ada, *where, "no-such-group").stderr
    assert "you are not in it" in lab.call(ada, *where, "root").stderr
    lab.place.chmod(0o700)
    lab.up()
    cluster = ("--cluster", lab.place)  # later commands know it
    waits = f"while [ ! -e {lab.folder}/go ]; do sleep 1; done"

    def submit(user: str) -> int:
        lab.as_user(user, "sh", "-c", f"umask 077; echo file-of-{user} > private")
        called = ("--private",) if user == fay else ("--name", f"of-{user}")
        line = f"cat ~/private; id -un; echo $TOKEN words-of-{user}; {waits}"
        tell = ("--notify", "exec >> ~/told; cat; id -un; echo $TOKEN") if user == bob else ()
        words = ("--plain", *cluster, *called, *tell, "--", "sh", "-c", line)
        return lab.submit(user, *words, TOKEN=TOKEN + user)

    numbers = lab.each(submit)

    def running() -> set[int]:
        return {n for n, job in lab.recorded().items() if job.status == "running"}

    until(lambda: running() == {*numbers.values()}, "all six run")
    runs = {user: lab.run(numbers[user], user) for user in lab.users}

    def log(user: str) -> str:
        return "".join(path.read_text() for path in (runs[user] / "logs").glob("*"))

    until(lambda: all(TOKEN + user in log(user) for user in lab.users), "each its environment")
    for user in lab.users:
        assert f"file-of-{user}" in log(user), "and is its user's on the host"

    # Neither another member nor the daemon's user sees or changes what is not theirs.
    secret: dict[str, list[object]] = {}
    for user, run in runs.items():
        home, leader = Path("/home", user), pid_in(run / "leader.lock")
        secret[user] = [f"/proc/{leader}/environ", home / "private", home / accounts.KEY]
        secret[user] += [run / name for name in ("run.json", "logs", "leader.log")]
        if user == ada:
            names = ("queue.sqlite", "daemon.log", "events.jsonl", "hostfiles/x", "daemon.lock")
            secret[user] += [lab.place / name for name in names]
        else:
            secret[user].append(f"/proc/{pid_in(keeper_of(user))}/environ")
            secret[user].append(keeper_of(user).parent / "jobs")

    def attack(user: str) -> subprocess.CompletedProcess[str]:
        others = [other for other in lab.users if other != user]
        changes = [] if user in (ada, cyd) else [numbers[other] for other in others]
        paths = [str(path) for other in others for path in secret[other]]
        return lab.as_user(user, lab.python, "-c", ATTACK, json.dumps([changes, paths]))

    for user, done in lab.each(attack).items():
        assert (done.returncode, done.stdout) == (0, "[]\n"), (user, done.stdout, done.stderr)
    files = [*lab.place.rglob("*"), *Path("/home", ada).rglob("*")]
    known = b"".join(path.read_bytes() for path in files if path.is_file())
    assert f"of-{bob}-".encode() in known
    for what in (TOKEN + bob, f"words-of-{bob}", "~/told", f"of-{fay}"):
        assert what.encode() not in known, "the daemon's user"
    seen = lab.jobs(eve)
    told = [
        (seen[numbers[user]]["name"], seen[numbers[user]]["command"]) for user in (ada, bob, fay)
    ]
    assert told == [(f"of-{ada}", ["sh"]), (f"of-{bob}", ["sh"]), ("private", [])]
    assert lab.jobs(fay)[numbers[fay]]["command"][:2] == ["sh", "-c"], "whole for its user"
    assert f"belongs to user {bob}" in lab.call(eve, "logs", numbers[bob]).stderr
    past = json.loads(lab.done(eve, "history", "--json"))
    assert {job["job"]: job["user"] for job in past} == {n: user for user, n in numbers.items()}
    stranger = lab.folder / "nobody"
    stranger.mkdir()
    shutil.chown(stranger, "nobody")
    refused = lab.call("nobody", "queue", *cluster, HVD_ELASTIC_HOME=str(stranger))
    assert "belongs to another user" in refused.stderr, "who is not in the group"

    # The daemon is killed, ten times where costly variants run, and a keeper once; an operator does
    # not need its user.
    for _ in range(10 if ALL else 2):
        kill_holder_of(lab.place / "daemon.lock")
        lab.up()
    os.kill(pid_in(keeper_of(eve)), signal.SIGKILL)
    lab.done(cyd, "cancel", numbers[eve])
    until(lambda: lab.has_ended(numbers[eve], "cancelled"), "her leader starts another keeper")
    held = lab.jobs(ada)
    assert {held[n]["attempts"] for n in numbers.values()} == {1}
    still = {n for n, job in held.items() if job["status"] == "running"}
    assert still == {*numbers.values()} - {numbers[eve]}
    later = lab.submit(dan, "--plain", "--", "true")
    until(lambda: lab.has_ended(later, "succeeded"), "it has the slot that is free")
    until(lambda: not is_locked(keeper_of(eve)), "her keeper ends with her last job")

    # The machine's reboot.
    lab.lose_all_processes()
    lab.up()
    lost = lab.submit(dan, "--plain", "--hold", "--", "true")
    kept = (keeper_of(dan).parent / "jobs").iterdir()
    max(kept, key=lambda path: path.stat().st_mtime).unlink()
    lab.done(dan, "release", lost)
    until(lambda: lab.has_ended(lost, "failed"), "nobody knows what to run")
    assert "Submit the job again" in lab.jobs(dan)[lost]["message"]
    assert not lab.jobs(bob)[lost]["message"]
    for user in (cyd, fay):  # bob has looked already
        lab.done(user, "queue")
    until(lambda: running() == still, "all go on")
    (lab.folder / "go").touch()
    until(lambda: not running(), "all end")
    past_jobs = lab.jobs(ada)
    ended = [past_jobs[n] for user, n in numbers.items() if user != eve]
    assert {(job["status"], job["attempts"]) for job in ended} == {("succeeded", 2)}

    def told_bob() -> list[str]:
        """What bob is told last, once his command has written all of it."""
        told = Path("/home", bob, "told")
        lines = told.read_text().partition('"job_finished"')[2] if told.exists() else ""
        return lines.splitlines()[1:] if lines.count("\n") == 3 else []

    assert until(told_bob, "bob is told") == [bob, TOKEN + bob], "in his account and environment"

    # One account's training leaves a host for another account's job, and has it back.
    hostfile = Path("/home", ada, "hostfile")
    hostfile.write_text(hostfile.read_text().replace("slots=3", "slots=1"))
    stop, end = lab.folder / "stop", lab.folder / "end"
    script = (lab.python, write_script(lab.folder), "--until", stop, "--step-time", 0.05)
    trains = lab.submit(bob, "--name", "trains", "--audit", "--", *script, **LITTLE_WORK)
    until(lambda: lab.recorded()[trains].run_ids, "it starts")
    run = lab.run(trains, bob)

    def size() -> int:
        found = [
            event for event in read_records(run / "events.jsonl") if event["kind"] == "metrics"
        ]
        return int(found[-1]["size"]) if found else 0

    until(lambda: size() == 2, "it trains on both hosts")
    line = f"while [ ! -e {end} ]; do sleep 1; done"
    other = lab.submit(dan, "--plain", "--", "sh", "-c", line)
    until(lambda: size() == 1 and other in running(), "it gives one of them up")
    end.touch()
    until(lambda: size() == 2, "it has both again")
    stop.touch()
    until(lambda: lab.has_ended(trains, "succeeded"), "it ends")
    assert audit_of(run).ok, "each example once in each epoch"


@COSTLY
def test_a_host_without_a_users_key_is_others_and_strangers_there_are_named(lab: Lab) -> None:
    ada, bob, cyd, dan = lab.users[:4]
    lab.up()
    second = lab.cluster.hosts[1]
    (lab.cluster.folder / "hosts" / second / "users" / bob).unlink()
    stop = lab.folder / "stop"
    script = (lab.python, write_script(lab.folder), "--until", stop, "--step-time", 0.05)
    cluster = ("--cluster", lab.place)
    trains = lab.submit(bob, *cluster, "--min-np", 2, "--", *script, **LITTLE_WORK)
    told = f"host {second} starts nothing of user {bob}"

    def row(host: str) -> dict[str, Any]:
        rows = json.loads(lab.done(cyd, "hosts", *cluster, "--json"))
        return next(each for each in rows if each["host"] == host)

    until(lambda: told in (row(second)["cause"] or ""), "it is said of the host")
    until(lambda: row(second)["free"] == 3, "others may have its slots")
    assert told in lab.jobs(bob)[trains]["reason"]
    log = (lab.place / "daemon.log").read_text()
    assert told in log
    assert "authorized_keys" in log, "its user knows what to do about it"
    ends = "while [ ! -e $0 ]; do sleep 0.1; done"
    words = ("--plain", *cluster, "--hosts", second, "--", "sh", "-c", ends, stop)
    other = lab.submit(cyd, *words)
    until(lambda: lab.jobs(cyd)[other]["hosts"] == {second: 1}, "another user's job has one")

    # checkclust names who uses the cores of a host without a job there.
    spins = ["sh", "-c", f"while [ ! -e {stop} ]; do :; done"]
    as_dan = ["setpriv", "--reuid", dan, "--clear-groups", *spins]
    busy = lab.cluster.popen_on(second, as_dan, cwd="/")
    how = ("--no-network", "--connect-timeout", 60)

    def strangers() -> str:
        return " ".join(lab.done(ada, "cluster", "check", "hostfile", *how).split())

    try:
        until(lambda: f"users: {dan} has no job here and runs sh" in strangers(), "he is named")
    finally:
        stop.touch()
        busy.wait()
    until(lambda: not any(job["status"] == "running" for job in lab.jobs(ada).values()), "the end")
    assert lab.jobs(bob)[trains]["status"] == "succeeded"


class Managers:
    """Managers of systemd of accounts, in a mount namespace where systemd is what runs."""

    PROGRAM = Path("/lib/systemd/systemd")
    _BEGIN = """
    mount --make-rprivate / && mount -t tmpfs none /run/systemd && mkdir /run/systemd/system &&
    umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit 9
    mkdir -p /sys/fs/cgroup/$1 && echo $$ > /sys/fs/cgroup/$1/cgroup.procs
    chown -R $1 /sys/fs/cgroup/$1
    exec setpriv --reuid $1 --regid $1 --init-groups --reset-env \
        env XDG_RUNTIME_DIR=$2 SYSTEMD_LOG_TARGET=console $3 --user
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        Path("/run/systemd").mkdir(exist_ok=True)

    def runtime(self, user: str) -> Path:
        return self._folder / f"runtime-of-{user}"

    def start(self, user: str) -> None:
        runtime = self.runtime(user)
        shutil.rmtree(runtime, ignore_errors=True)
        runtime.mkdir(mode=0o700)
        shutil.chown(runtime, user)
        words = ["sh", "-c", self._BEGIN, "sh", user, str(runtime), str(self.PROGRAM)]
        with (self._folder / f"manager-of-{user}").open("ab") as log:
            process = subprocess.Popen(["unshare", "--mount", "--cgroup", *words], stderr=log)
        self._running.append(process)

        def is_up() -> bool:
            if process.poll() is not None:
                pytest.skip(f"no manager of systemd can run here: {process.returncode}")
            return (runtime / "systemd" / "private").exists()

        until(is_up, "the manager is up")

    def kill(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()


@COSTLY
@pytest.mark.skipif(not Managers.PROGRAM.exists(), reason="there is no systemd")
def test_the_managers_of_systemd_start_daemon_and_keeper_after_a_reboot(lab: Lab) -> None:
    ada, bob = lab.users[:2]
    managers = Managers(lab.folder)

    def units(user: str) -> list[Path]:
        return [*Path("/home", user, ".config/systemd/user").glob("hvd-elastic-*.service")]

    try:
        for user in (ada, bob):
            managers.start(user)
        lab.up(XDG_RUNTIME_DIR=str(managers.runtime(ada)))
        waits = f"while [ ! -e {lab.folder}/go ]; do sleep 0.1; done"
        words = ("--plain", "--cluster", lab.place, "--", "sh", "-c", waits)
        number = lab.submit(bob, *words, XDG_RUNTIME_DIR=str(managers.runtime(bob)))
        until(lambda: lab.jobs(bob)[number]["status"] == "running", "it runs")
        assert [len(units(user)) for user in (ada, bob)] == [1, 1]
        managers.kill()
        lab.lose_all_processes()
        for user in (ada, bob):
            managers.start(user)

        def is_led_again() -> bool:
            done = lab.call(ada, "queue", "--json")
            return done.returncode == 0 and json.loads(done.stdout)[0]["attempts"] == 2

        until(is_led_again, "daemon and keeper are back without a command")
        (lab.folder / "go").touch()
        until(lambda: not units(bob), "a keeper without jobs does not come back")
        lab.done(ada, "down")
        assert not units(ada)
    finally:
        managers.kill()
