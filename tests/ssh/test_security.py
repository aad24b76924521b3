"""What others may see and do: on the hosts of a run, beside them, and on the network between."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.programs.processes import read
from hvd_elastic.virtual import VirtualCluster
from tests.command_lines import CommandLines
from tests.dist import conftest, jobs
from tests.dist.jobs import Job, assert_nothing_left, call, hostfile_of, write_script
from tests.dist.running import Stage
from tests.paths import LIMIT_S
from tests.ssh import sshd as private_sshd
from tests.ssh.sshd import Sshd, make_key

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.dist,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]

stage, hosts, shared = conftest.stage, jobs.hosts, jobs.shared
LISTENS = "0A"
NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


# ---- host keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    folder = tmp_path / "sshd"
    folder.mkdir()
    server = Sshd(folder)
    yield server
    server.stop()


def fingerprint(key: Path) -> str:
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(key.with_suffix(".pub"))], capture_output=True, text=True
    )
    return shown.stdout.split()[1]


def run_on(server: Sshd, home: Path, *, known: str) -> Job:
    (server.folder / "known_hosts").write_text(known)
    config = server.write_config(home / "ssh_config", ["node1"])
    hostfile = hostfile_of(home / "hosts", ["node1"])
    script = write_script(home, "raise SystemExit('nothing of this may run')\n")
    return Job("-H", hostfile, "-F", config, "--", sys.executable, script, home=home)


def test_an_unknown_host_key_is_an_error_that_says_how_to_accept_it(
    server: Sshd, home: Path
) -> None:
    with run_on(server, home, known="") as job:
        assert job.wait() == 1
    assert f"unknown host key ssh-ed25519 {fingerprint(server.host_key)}" in job.text
    assert "hvd-elastic trust" in job.text
    assert "trying again" not in job.text
    assert "Traceback" not in job.text
    assert not job.events("agent_started")
    assert (server.folder / "known_hosts").read_text() == "", "nothing is accepted on its own"
    # The advice works as it is given.
    config = home / "ssh_config"
    done = call("trust", home / "hosts", "-F", config, "--yes", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    script = write_script(home, "print('now it runs')\n")
    again = ["-H", home / "hosts", "-F", config, "--", sys.executable, script]
    with Job(*again, home=home) as job:
        assert job.wait() == 1  # it does not train
    assert job.events("agent_started")
    assert_nothing_left(mark=job.mark)


def test_a_changed_host_key_is_refused(server: Sshd, home: Path, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    key = " ".join(other.with_suffix(".pub").read_text().split()[:2])
    known = f"[{server.address}]:{server.port} {key}\n"
    with run_on(server, home, known=known) as job:
        assert job.wait() == 1
    assert "THE HOST KEY HAS CHANGED" in job.text
    assert fingerprint(server.host_key) in job.text
    assert fingerprint(other) in job.text
    assert "ssh-keygen -R" in job.text
    assert "trying again" not in job.text
    assert not job.events("agent_started")
    assert (server.folder / "known_hosts").read_text() == known


# ---- the environment


def test_the_watcher_of_command_lines_sees_short_lives() -> None:
    word = secrets.token_hex(12)
    with CommandLines(word) as watcher:
        for _ in range(100):  # on a busy machine it misses many
            subprocess.run([sys.executable, "-S", "-c", "pass", word], check=True)
            if watcher.found:
                break
    assert watcher.found


def test_no_value_of_the_environment_is_in_a_command_line_or_a_record(
    home: Path, shared: Path, hosts: VirtualCluster
) -> None:
    canary = f"canary-{secrets.token_hex(12)}"
    script = write_script(shared)
    hostfile = hostfile_of(home / "hosts", hosts.hosts[:2])
    options = ["-H", hostfile, "-F", hosts.ssh_config, "--audit", "--checkpoint-every", 0.2]
    options += ["--min-np", 2]
    arguments = ["--epochs", 3, "--step-time", 0.02, "--show", "SECRET_TOKEN"]
    command = [*options, "--", sys.executable, script, *arguments]
    env = {"SECRET_TOKEN": canary}
    with CommandLines(canary) as watcher, Job(*command, home=home, env=env) as job:
        assert job.wait() == 0, job.text
    assert watcher.rounds > 20
    assert not watcher.found
    logs = {path.name: path.read_text() for path in (job.folder / "logs").iterdir()}
    assert set(logs) == {f"{host}.0.log" for host in hosts.hosts[:2]}
    for text in logs.values():
        assert f"SECRET_TOKEN={canary}\n" in text, "the workers got it"
    records = [job.folder / name for name in ("run.json", "events.jsonl", "audit.jsonl")]
    records += job.folder.glob("checkpoints/*")
    assert len(records) > 3
    for record in records:
        assert canary.encode() not in record.read_bytes(), record
    assert_nothing_left(mark=job.mark, run_id=job.run_id, cluster=hosts)


def test_a_run_folder_is_for_its_owner_alone(home: Path) -> None:
    script = write_script(home, "print('x')\n")
    call("run", "--run-id", "job", "--", sys.executable, script, home=home)
    folder = home / "runs" / "job"
    assert folder.stat().st_mode & 0o077 == 0


# ---- who can reach what


class Exploit:
    """Runs a command when it is unpickled, as in the published attacks."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


BECOME_NOBODY = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
"""Inside the program, since nobody may not even look into the folder that Python lies in."""

ATTACK = """
import base64, contextlib, encodings.idna, http.client, json, os, socket, sys
targets, bodies = json.loads(sys.argv[1]), [base64.b64decode(b) for b in json.loads(sys.argv[2])]
limit_s = float(sys.argv[3])
if len(sys.argv) > 4:
    exec(sys.argv[4])
paths = [
    # CVE-2024-10190: the elastic rendezvous unpickles what is put here
    "/worker_addresses/0", "/worker_addresses/localhost[0]", "/rank_and_size/localhost:0",
    # CVE-2026-31234: workers unpickle what they get from the key-value store
    "/runfunc/func", "/runfunc_result/0", "/executable/func", "/task_to_task_addresses/0",
    "/global/0", "/global/attack",
]
answers = {}
for address, port in targets:
    said = answers.setdefault(f"{address}:{port}", [])
    for body in bodies:
        for path in paths:
            for method in ("PUT", "POST"):
                try:
                    http_ = http.client.HTTPConnection(address, port, timeout=limit_s)
                    http_.connect()
                    # Who refuses may hang up before it is all sent; the answer is there to read.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        http_.request(method, path, body)
                    said.append(http_.getresponse().status)
                except (OSError, http.client.HTTPException) as error:
                    said.append(type(error).__name__)
                finally:
                    http_.close()
                if "TimeoutError" in said[-2:]:
                    break
            if "TimeoutError" in said[-2:]:
                break
        try:  # Horovod's services: a digest, a length, a pickle
            raw = socket.create_connection((address, port), 1)
            raw.sendall(bytes(32) + len(body).to_bytes(4, "big") + body)
            raw.settimeout(0.2)
            raw.recv(100)
            raw.close()
        except OSError:
            pass
print(json.dumps(answers))
"""


def listening(pid: int, *, own: bool = False) -> set[tuple[str, int]]:
    """(address, port) of all that listens on TCP in the network namespace of a process.

    Args:
        pid: the process.
        own: only what the process itself listens on.
    """
    sockets = set()
    if own:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(entry.readlink()))
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                word, port = fields[1].split(":")
                # proc(5): words of the network-order address, read in host order.
                words = [word[at : at + 8] for at in range(0, len(word), 8)]
                packed = b"".join(bytes.fromhex(part)[::-1] for part in words)
                if fields[3] == LISTENS and (not own or f"socket:[{fields[9]}]" in sockets):
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def listeners_of(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of what these processes listen on."""
    return {address for pid in pids for address in listening(pid, own=True)}


class LiveRun:
    """A run with one process on each of two hosts, until its file ``enough`` is there."""

    def __init__(self, job: Job, hosts: VirtualCluster, enough: Path) -> None:
        self.job = job
        self.hosts = hosts
        self.enough = enough
        self.members = hosts.hosts[:2]
        self.outsider = hosts.hosts[2]
        self.rescales = len(job.events("rescale_started"))

    def pid(self, host: str) -> int:
        """Some process of the run on a host, for its namespaces."""
        return min(self.hosts.pids(host))

    def stores(self, host: str) -> set[int]:
        """Ports of the run's own servers on the loopback address of a host."""
        return {port for ip, port in listeners_of(self.hosts.pids(host)) if ip == "127.0.0.1"}

    def step(self) -> int:
        made = self.job.events("metrics")
        return int(made[-1]["step"]) if made else 0

    def goes_on(self) -> None:
        """Training makes steps from now on."""
        now = self.step()
        self.job.until(lambda: self.step() > now + 20, "training goes on")

    def worker(self, host: str) -> str:
        """Name of the worker on a host."""
        for pid in self.hosts.pids(host):
            environ = read(pid, "environ").split(b"\0")
            for entry in environ:
                if entry.startswith(b"HVD_ELASTIC_WORKER="):
                    return entry.split(b"=", 1)[1].decode()
        raise AssertionError(f"no worker on {host}")


@pytest.fixture(scope="module")
def live(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """One run that all these attacks hit one after the other."""
    if stage.cluster.loopback:
        pytest.skip("hosts on the loopback network are not apart from one another")
    home = tmp_path_factory.mktemp("live")
    hosts = stage.cluster
    enough = stage.folder / f"enough-{secrets.token_hex(4)}"
    hostfile = hostfile_of(home / "hosts", hosts.hosts[:2])
    options = ["-H", hostfile, "-F", hosts.ssh_config, "--audit", "--checkpoint-every", 0]
    command = [sys.executable, write_script(stage.folder), "--until", enough, "--step-time", 0.05]
    with Job(*options, "--", *command, home=home) as job:
        job.until_trains(2)
        yield LiveRun(job, hosts, enough)
    assert_nothing_left(mark=job.mark, run_id=job.run_id, cluster=hosts)


def attack(
    run: Callable[[list[str]], subprocess.CompletedProcess[str]],
    targets: set[tuple[str, int]],
    marker: Path,
    *first: str,
    limit_s: float = 1.0,
) -> dict[str, list[Any]]:
    """Send every exploit to every target; returns what was answered within so many seconds."""
    pickles = [pickle.dumps(Exploit(marker), protocol) for protocol in (0, 4)]
    bodies = [base64.b64encode(body).decode() for body in pickles]
    words = [json.dumps(sorted(targets)), json.dumps(bodies), str(limit_s), *first]
    done = run([sys.executable, "-c", ATTACK, *words])
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[Any]] = json.loads(done.stdout)
    return answers


def test_the_exploits_work_where_something_unpickles(tmp_path: Path) -> None:
    """What is sent below is dangerous: the marker appears when it is unpickled."""
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(Exploit(marker)))
    assert marker.exists()


@pytest.mark.root
def test_only_the_ring_and_sshd_listen_on_the_network(live: LiveRun) -> None:
    for host in live.members:
        pids = live.hosts.pids(host)
        ours = listeners_of(pids)
        # sshd runs the agent through a shell that replaces itself by it.
        agents = {pid for pid in pids if b"hvd_elastic.agent.agent" in read(pid, "cmdline")}
        workers = {pid for pid in pids if b"--until" in read(pid, "cmdline")}
        assert agents
        assert workers
        assert all(ip == "127.0.0.1" for ip, _ in listeners_of(agents))
        # Gloo meets on the address that ssh came in by, and on no other.
        assert {ip for ip, _ in listeners_of(workers)} <= {live.hosts.address(host)}
        entry = live.hosts.state.host(host)
        rest = listening(live.pid(host)) - ours
        assert {port for _, port in rest} <= {entry.port}, f"more than sshd listens: {rest}"
    leader = {live.job.process.pid}
    assert not listeners_of(leader), "the leader listens nowhere"
    live.goes_on()


@pytest.mark.root
def test_the_published_exploits_execute_nothing(live: LiveRun, shared: Path) -> None:
    """From a host outside the run, from one inside it, and from another user on it."""
    marker = shared / "executed"
    first = live.members[0]
    reachable = {
        (live.hosts.address(host), port)
        for host in live.members
        for ip, port in listening(live.pid(host))
        if not ip.startswith("127.")
    }
    # What of the leader's machine can be reached from the hosts, of this job or not.
    reachable |= {
        (live.hosts.leader_address, port)
        for ip, port in listeners_of({live.job.process.pid})
        if not ip.startswith("127.")
    }
    stores = {("127.0.0.1", port) for port in live.stores(first)}
    assert stores, "the run has a rendezvous"

    def on(host: str) -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
        return lambda words: live.hosts.run_on(host, words, timeout=LIMIT_S)

    answers = attack(on(live.outsider), reachable, marker)
    assert not any(200 in said for said in answers.values()), answers
    live.goes_on()
    # The ports of the stores, as seen from the network: nothing is there.
    from_outside = {(live.hosts.address(first), port) for _, port in stores}
    answers = attack(on(live.outsider), from_outside, marker, limit_s=LIMIT_S / 2)
    assert {word for said in answers.values() for word in said} == {"ConnectionRefusedError"}
    live.goes_on()
    answers = attack(on(first), stores, marker, BECOME_NOBODY, limit_s=LIMIT_S / 2)
    # It is refused before it is read, which may break the pipe.
    heard = {word for said in answers.values() for word in said}
    assert heard - {"BrokenPipeError", "ConnectionResetError"} == {403}, answers
    live.goes_on()
    # The owner of the run may write to the store; what is written is never code.
    attack(on(first), reachable | stores, marker)
    assert not marker.exists()
    live.goes_on()
    assert not marker.exists()


@pytest.mark.root
def test_another_user_cannot_speak_to_an_agent(live: LiveRun) -> None:
    first = live.members[0]
    table = Path(f"/proc/{live.pid(first)}/net/unix").read_text()
    names = {line.split()[-1] for line in table.splitlines() if live.job.run_id in line}
    assert names
    program = (
        f"import json, os, socket, sys; {BECOME_NOBODY}\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
        "s.connect('\\0' + sys.argv[1])\n"
        "try:\n"
        "    s.sendall(json.dumps({'worker': sys.argv[2]}).encode() + b'\\n')\n"
        '    s.sendall(b\'{"kind": "script_error", "traceback": "evil"}\\n\')\n'
        "    said = s.recv(100)\n"
        "except OSError as error:\n"
        "    said = b''\n"
        "print(repr(said))\n"
    )
    worker = live.worker(first)
    for name in names:
        words = [sys.executable, "-c", program, name.removeprefix("@"), worker]
        done = live.hosts.run_on(first, words, timeout=LIMIT_S)
        assert done.stdout.strip() == "b''", done.stderr
    live.goes_on()
    assert "evil" not in live.job.text


@pytest.mark.root
def test_another_user_cannot_read_the_environment_of_workers(live: LiveRun) -> None:
    first = live.members[0]
    program = (
        "import os, sys\n"
        "exec(sys.argv[1])\n"
        "for entry in os.listdir('/proc'):\n"
        "    if entry.isdecimal():\n"
        "        try:\n"
        "            if b'HVD_ELASTIC_AGENT=' in open(f'/proc/{entry}/environ', 'rb').read():\n"
        "                print(entry)\n"
        "        except OSError:\n"
        "            pass\n"
    )
    done = live.hosts.run_on(first, [sys.executable, "-c", program, BECOME_NOBODY], timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    done = live.hosts.run_on(first, [sys.executable, "-c", program, "pass"], timeout=LIMIT_S)
    assert done.stdout, "its owner can"
    live.goes_on()


@pytest.mark.root
def test_the_run_that_was_attacked_ends_well(live: LiveRun) -> None:
    """The last of these: training took no harm, and nobody was disturbed."""
    live.goes_on()
    live.enough.touch()
    assert live.job.wait() == 0, live.job.text
    result = live.job.audit()
    assert result.ok, result.problems()
    assert {event["cause"] for event in live.job.events("worker_left")} == {"finished"}
    assert len(live.job.events("rescale_started")) == live.rescales
