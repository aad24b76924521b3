"""One agent as a process, spoken to as the leader does: JSON lines on its stdin and stdout."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import psutil
import pytest

from hvd_elastic import __version__
from hvd_elastic.agent import agent as agent_module
from hvd_elastic.agent import failover
from hvd_elastic.agent.failover import Caller
from hvd_elastic.agent.leader_link import MOST_ON_THE_WAY
from hvd_elastic.checkpoint.saved import find_spooled, spool_file
from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.endings import crash_stack
from hvd_elastic.control.progress import Activity
from hvd_elastic.hosts.interfaces import interface_of
from hvd_elastic.leader.agents.process import agent_command
from hvd_elastic.own_files import socket_in
from hvd_elastic.programs.peers import connect_own
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import compress, decompress, encode
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import COSTLY, LIMIT_S
from tests.small_group import SMALL_BYTES, inside, small_group
from tests.unit.wire.wire_samples import leader_hello, saved_file
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = LIMIT_S
Message = dict[str, Any]

WORKER = """
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("\\0" + os.environ["HVD_ELASTIC_AGENT"])
def say(**m): s.sendall(json.dumps(m).encode() + b"\\n")
say(kind="hello", worker=os.environ["HVD_ELASTIC_WORKER"], pid=os.getpid())
def tell(what): say(kind="warning", message=json.dumps(what))
say(kind="ready", warm_s=0.1)
sys.stdout.write("worker %s\\n" % os.environ["HVD_ELASTIC_LOCAL_RANK"])
sys.stdout.flush()
for line in s.makefile("rb"):
    heard = json.loads(line)
    if heard["kind"] == "leave":
        raise SystemExit(0)
    tell(heard)
"""

# Leaves files in its folder where it is asked to write; ``hold-<worker>`` there keeps it from that,
# and ``stuck`` until its generation is called off.
JOINED = """
import threading, time
def beat():
    while True:
        time.sleep(0.1)
        say(kind="beat")
say(kind="joined", generation=1, step=0)
threading.Thread(target=beat, daemon=True).start()
"""
WRITE = """
    name, there = os.environ["HVD_ELASTIC_WORKER"], os.path.exists
    if heard["kind"] == ("abort" if there("stuck") else "checkpoint"):
        open("asked-" + name, "w").close()
        while there("hold-" + name): time.sleep(0.01)
        open("written-" + name, "w").close()
        say(kind="checkpoint_answered")
"""
WRITER = WORKER.replace("for line", f"{JOINED}for line").replace(
    "    if heard", f"{WRITE}    if heard", 1
)


# Speaks to its agent as every worker does, and has a child such as a data loader's.
LINKED = """
import os, signal, time
from hvd_elastic.run_events import Warned
from hvd_elastic.worker.agent_link import AgentLink
link = AgentLink.from_environment(lambda generation: None)
child = os.fork()
if child == 0:
    time.sleep(3600)
link.send(Warned(f'["pids", {os.getpid()}, {child}]'))
while link.wait(0) is None:
    link.take_checkpoint_request()
    link.send(Warned('["asked"]'))
"""


class Agent:
    def __init__(
        self,
        folder: Path,
        command: list[str],
        *,
        group: Path | None = None,
        stderr: IO[bytes] | None = None,
        **hello: Any,
    ) -> None:
        self.run_id = hello.get("run_id") or f"unit-{secrets.token_hex(4)}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HVD_ELASTIC_HOME": str(folder)}
        environment.pop("SSH_CONNECTION", None)
        program = [sys.executable, "-m", "hvd_elastic.agent.agent"]
        self.process = subprocess.Popen(
            program if group is None else inside(group, program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
        self.skipped: list[Message] = []
        # An agent that is killed leaves its temporary folder.
        env = {"SECRET": "s3cret", "TMPDIR": str(folder)}
        own = {"run_id": self.run_id, "cwd": str(folder), "command": tuple(command), "env": env}
        # What a leader tells all its agents while one of them is still being connected.
        self.say(op="release", kind="shards", up_to_step=1)
        self.say(op="abort", generation=1)
        self.send(encode(leader_hello(**{**own, **hello})))

    def say(self, **message: Any) -> None:
        self.send(encode(message))

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def hear(self, wanted: Callable[[Message], Any]) -> Message:
        """The first message that is wanted; the test's own timeout is the deadline."""
        for message in self.skipped:
            if wanted(message):
                self.skipped.remove(message)
                return message
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if wanted(message):
                return message
            self.skipped.append(message)
        raise AssertionError(f"the agent ended with {self.process.wait(TIMEOUT_S)}")

    def event(self, kind: str) -> Message:
        return self.hear(lambda message: message.get("ev") == kind)

    def said_by_worker(self, kind: str) -> Message:
        found = self.hear(lambda m: m.get("ev") == "worker" and m["message"]["kind"] == kind)
        message: Message = found["message"]
        return message

    def told_by_worker(self, begin: str = "") -> Any:
        """What the next warning of a worker holds, as JSON that begins so."""

        def is_wanted(message: Message) -> bool:
            said = message.get("message")
            if not isinstance(said, dict) or said["kind"] != "warning":
                return False
            text: str = said["message"]
            return text.startswith(begin)

        said: Message = self.hear(is_wanted)["message"]
        return json.loads(said["message"])

    def announce(self, generation: int, *workers: str) -> None:
        members = tuple(
            Member(name, "node1", slot, slot, slot, len(workers), 0, 1)
            for slot, name in enumerate(workers)
        )
        order = Announce(generation, members, None, restore=False, reason="a test")
        self.send(encode(msg.AnnounceGeneration.of(msg.Announcement(order, "l"))))

    def start_worker(self, name: str = "w0", local_rank: int = 0) -> None:
        self.say(op="start_worker", worker=name, local_rank=local_rank, slots=1)

    def marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HVD_ELASTIC_RUN_ID") == self.run_id:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def wait_clean(self) -> None:
        until(lambda: not self.marked(), "no process is left", said=self.marked)


StartAgent = Callable[..., Agent]


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[StartAgent]:
    agents: list[Agent] = []

    def start(program: str = WORKER, *, folder: Path = tmp_path, **hello: Any) -> Agent:
        # Without site-packages, which the link needs, an interpreter starts sooner.
        site = [] if "hvd_elastic" in program else ["-S"]
        own = {"command": [sys.executable, *site, "-c", program]}
        agents.append(Agent(folder, **{**own, **hello}))
        return agents[-1]

    yield start
    for agent in agents:
        agent.process.kill()
        agent.process.wait()
        for stream in (agent.process.stdin, agent.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for process in agent.marked():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_hello_says_what_the_leader_has_to_know(start_agent: StartAgent) -> None:
    hello = start_agent().event("hello")
    assert hello["protocol"] == msg.PROTOCOL
    assert hello["python"] == ".".join(map(str, sys.version_info[:3]))
    assert hello["interface"] == "lo", "not over ssh: this machine alone"
    assert hello["interfaces"]["lo"] == "127.0.0.1"
    assert hello["cpus"] >= 1
    assert hello["swept"] == 0


def test_a_worker_from_its_start_to_its_leave(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.start_worker("w7", 3)
    agent.say(op="tell", worker="w7", message={"kind": "hold"})  # it has not connected yet
    agent.said_by_worker("ready")
    (worker,) = agent.marked()
    assert worker.environ()["SECRET"] == "s3cret"
    assert "HOROVOD_RANK" not in worker.environ()
    assert worker.environ()["PWD"] == worker.cwd()
    assert agent.told_by_worker() == {"kind": "hold"}
    agent.say(op="tell", worker="w7", message={"kind": "leave"})
    log = agent.event("log")
    assert (log["worker"], log["data"]) == ("w7", "worker 3\n")
    ended = agent.event("worker_exited")
    assert (ended["worker"], ended["code"], ended["signal"]) == ("w7", 0, None)


def test_a_worker_that_still_imports_when_it_is_to_leave_is_ended(start_agent: StartAgent) -> None:
    agent = start_agent("import time; time.sleep(3600)")
    agent.start_worker()
    agent.say(op="tell", worker="w0", message={"kind": "leave"})
    assert agent.event("worker_exited")["signal"] == signal.SIGKILL


def test_the_end_of_a_worker_is_told_after_its_last_words(start_agent: StartAgent) -> None:
    agent = start_agent("import sys; print('x' * 300_000); sys.exit('last words')")
    agent.start_worker()
    text = ""
    while True:
        message = agent.hear(lambda m: m["ev"] in ("log", "worker_exited"))
        if message["ev"] == "worker_exited":
            break
        text += message["data"]
    assert message["code"] == 1
    assert text.endswith("last words\n")
    assert len(text) > 300_000


def test_the_last_words_of_a_worker_whose_connection_waits_are_heard(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    """On a busy host the agent learns of the connection and of the end at once."""
    before = """
import os, time
from pathlib import Path
Path("pid.new").write_text(str(os.getpid()))
Path("pid.new").rename("pid")
while not Path("go").exists(): time.sleep(0.01)
"""
    agent = start_agent(before + WORKER.partition("for line")[0] + 'tell("gone"); sys.exit(7)\n')
    agent.start_worker()
    until((tmp_path / "pid").exists)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    agent.process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    agent.process.send_signal(signal.SIGCONT)
    assert agent.event("worker_exited")["code"] == 7
    said = [m["message"]["kind"] for m in agent.skipped if m.get("ev") == "worker"]
    assert said == ["ready", "warning"]


EARLY = """
import fcntl, struct, sys, termios, time
early = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n"
for kind in "IWE":
    early += f"{kind}0000 00:00:1795644382.496079   22540 port.cc:153] a message\\n"
sys.stderr.write(early)
sys.stderr.write("I0000 is the script's own\\n")
while struct.unpack("i", fcntl.ioctl(2, termios.FIONREAD, bytes(4)))[0]:  # until it was read
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("level", "shown"), [(None, "E"), ("1", "WE"), ("0", "WIWE"), ("", "WIWE")]
)
def test_what_tensorflow_prints_before_it_reads_its_level_is_left_out(
    start_agent: StartAgent, level: str | None, shown: str
) -> None:
    env = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    agent = start_agent(EARLY, env=env)
    agent.start_worker()
    text = ""
    while (message := agent.hear(lambda m: m["ev"] in ("log", "worker_exited")))["ev"] == "log":
        text += message["data"]
    *early, own = text.splitlines()
    assert own == "I0000 is the script's own"
    assert "".join(line[0] for line in early) == shown


def test_a_kill_is_told_as_a_signal(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.say(op="kill", worker="w0")
    ended = agent.event("worker_exited")
    assert (ended["code"], ended["signal"]) == (None, 9)


def test_a_kill_by_the_kernel_for_lack_of_memory_is_told(start_agent: StartAgent) -> None:
    """Of the worker itself, and of the child of a shell."""
    eat = f"b'x' * {2 * SMALL_BYTES}"
    shell = ["sh", "-c", f"{shlex.join([sys.executable, '-S', '-c', eat])}; exit $?"]
    with small_group() as group:
        for command, status in (([sys.executable, "-S", "-c", eat], None), (shell, 137)):
            agent = start_agent(command=command, group=group)
            agent.start_worker("w0")
            ended = agent.event("worker_exited")
            number = 9 if status is None else None
            assert (ended["code"], ended["signal"]) == (status, number)
            assert ended["out_of_memory"]
            agent.process.kill()
            agent.process.wait()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ["no-such-command"]}, "no command 'no-such-command' on this host"),
        (
            {"cwd": "/no/such/folder"},
            "/no/such/folder does not exist on this host. Copy it: copycl",
        ),
        ({"command": ["python3", "/no/x.py"]}, "copyclust HOSTFILE /no/x.py /no/x.py"),
    ],
)
def test_a_command_that_cannot_start_is_told(
    start_agent: StartAgent, fields: dict[str, Any], words: str
) -> None:
    agent = start_agent(**fields)
    agent.start_worker()
    assert words in agent.event("worker_not_started")["error"]


def test_a_generation_is_announced_with_its_own_store(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.announce(4, "w0")
    told = agent.told_by_worker()
    number = told["announcement"]["order"]["generation"]
    assert (told["kind"], number, told["env"]["HOROVOD_RANK"]) == ("join", 4, "0")
    assert told["env"]["HOROVOD_GLOO_SINGLE_CONTEXT"] == "1"
    assert told["env"]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    port = int(told["env"]["HOROVOD_GLOO_RENDEZVOUS_PORT"])

    def ask(method: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            connection.request(method, "/global/0", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    assert ask("PUT", b"\x00\xff") == (200, b"")
    sent = agent.event("store")["entry"]
    assert (sent["generation"], sent["scope"], sent["key"]) == (4, "global", "0")
    assert decompress(base64.b64decode(sent["value"])) == b"\x00\xff"
    agent.send(encode(msg.PutEntry(msg.StoreEntry(4, "global", "0", compress(b"other")))))
    agent.say(op="tell", worker="w0", message={"kind": "hold"})
    agent.told_by_worker()  # what came before it has been done
    assert ask("GET") == (200, b"other")
    agent.say(op="abort", generation=4)
    assert agent.told_by_worker() == {"kind": "abort", "generation": 4}
    assert ask("GET")[0] == 410


def test_checkpoints_of_restarts_that_were_broken_off_are_removed(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    run_id = f"unit-{secrets.token_hex(4)}"
    spool = tmp_path / "spool" / run_id / "node1"

    def send_checkpoint(generation: int) -> Path:
        folder = spool / f"restore-{generation}"
        folder.mkdir(parents=True, mode=0o700)
        (folder / "step-000000000010.json").write_text("{}")
        return folder

    of_a_killed_agent = send_checkpoint(2)
    for folder in (spool.parent.parent, spool.parent, spool):
        folder.chmod(0o700)
    agent = start_agent(run_id=run_id)
    agent.event("hello")
    assert not of_a_killed_agent.exists()
    old, present, next_one = map(send_checkpoint, (3, 4, 5))
    agent.announce(4)
    until(lambda: not old.exists(), "the one of generation 3 is removed")
    assert present.exists()
    assert next_one.exists()
    spool_file(spool / "saved", lambda file: file.write(b"kept"), partial(saved_file, "kept.pt"))
    agent.say(op="shutdown", grace_s=0.5)
    assert agent.process.wait(TIMEOUT_S) == 0
    assert not present.exists(), "though the spool is kept"
    assert (spool / "saved").exists()


def test_an_agent_that_cannot_obey_ends_and_says_so(start_agent: StartAgent) -> None:
    """It would send heartbeats on, and do nothing of what it is told."""
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.announce(4, "w0")
    agent.told_by_worker()
    damaged = msg.PutAddresses(4, "global", 1, 0, 1, compress(b""))
    agent.send(encode(damaged))
    assert "the agent ends after an error: ZeroDivisionError" in agent.event("warning")["message"]
    assert agent.process.wait(TIMEOUT_S) == 1
    agent.wait_clean()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"NCCL_SOCKET_IFNAME": "=lo", "TF_CPP_MIN_LOG_LEVEL": "2"}),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0"}),
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, {"MALLOC_TRIM_THRESHOLD_": "0"}),
    ],
)
def test_what_libraries_read_once_is_set_unless_the_user_sets_it(
    start_agent: StartAgent, given: dict[str, str], wanted: dict[str, str], tmp_path: Path
) -> None:
    """From the start of the process: NCCL and TensorFlow look once."""
    agent = start_agent(env={"TMPDIR": str(tmp_path), **given})
    agent.start_worker()
    agent.said_by_worker("ready")
    (found,) = [
        process.environ() for process in agent.marked() if "HVD_ELASTIC_WORKER" in process.environ()
    ]
    assert wanted.items() <= found.items()
    assert found.keys() >= {"TF_NUM_INTRAOP_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}


@pytest.mark.parametrize("slot", [0, 1])
def test_a_host_that_does_not_know_its_own_name_is_told_once(
    start_agent: StartAgent, slot: int, tmp_path: Path
) -> None:
    unknown = tmp_path / "getent"
    unknown.write_text("#!/bin/sh\nexit 2\n")
    unknown.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    agent = start_agent(LINKED, env={"TMPDIR": str(tmp_path), "PATH": path})
    agent.start_worker(local_rank=slot)
    agent.told_by_worker('["pids"')
    if slot == 0:
        said = agent.said_by_worker("warning")["message"]
        assert f"does not know its own name {socket.gethostname()!r}" in said
        assert "/etc/hosts" in said
    agent.say(op="tell", worker="w0", message={"kind": "checkpoint"})
    agent.told_by_worker('["asked"')
    assert not [m for m in agent.skipped if m["ev"] == "worker"]


def test_the_stack_of_a_worker_that_a_signal_ends_is_in_its_log(start_agent: StartAgent) -> None:
    fall = "def fall(): os.kill(os.getpid(), signal.SIGSEGV)"
    agent = start_agent(f"import os, signal\n{fall}\nfall()")
    agent.start_worker()
    text = ""
    while (message := agent.hear(lambda m: m["ev"] in ("log", "worker_exited")))["ev"] == "log":
        text += message["data"]
    assert message["signal"] == signal.SIGSEGV
    stack = crash_stack(text)
    assert stack.startswith("Fatal Python error: Segmentation fault\nCurrent thread (most recent ")
    assert 'File "<string>", line 2 in fall' in stack


@pytest.mark.parametrize("end", ["shutdown", "end of input", "nonsense", "unknown command"])
def test_the_agent_leaves_nothing_behind(start_agent: StartAgent, end: str, tmp_path: Path) -> None:
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    assert agent.marked()
    stdin = agent.process.stdin
    assert stdin is not None
    if end == "shutdown":
        agent.say(op="shutdown", grace_s=0.5)
    elif end == "end of input":
        stdin.close()
    else:
        agent.send(b"nonsense\n" if end == "nonsense" else b'{"op": "no_such_thing"}\n')
        said = agent.event("warning")["message"]
        assert said.startswith(f"the agent of hvd_elastic {__version__} (protocol")
        wrong = "is not JSON" if end == "nonsense" else "op 'no_such_thing'; valid are abort, "
        assert wrong in said
    assert agent.process.wait(TIMEOUT_S) == 0
    agent.wait_clean()
    assert not (tmp_path / "spool").exists()


def test_a_leader_that_is_cut_off_inside_a_line_is_lost(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.event("hello")
    agent.send(b'{"op": "kill", "wor')
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(TIMEOUT_S) == 0
    assert not any(message["ev"] == "warning" for message in agent.skipped)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("\\x80\\x04.", "the worker of slot 3 sent a line that is not JSON"),
        (
            '{\\"kind\\": \\"steal\\"}',
            "slot 3 sent a message with kind 'steal'; valid are ",
        ),
        (
            '{\\"kind\\": \\"joined\\"}',
            "slot 3 sent a wrong message 'joined': Object missing",
        ),
    ],
)
def test_a_worker_that_sends_what_is_no_message_is_given_up_alone(
    start_agent: StartAgent, line: str, words: str
) -> None:
    wrong = f'if os.environ["HVD_ELASTIC_WORKER"] == "w1": s.sendall(b"{line}\\n")\n'
    agent = start_agent(WORKER.replace("for line", f"{wrong}for line"))
    agent.start_worker("w0", 0)
    agent.start_worker("w1", 3)
    assert words in agent.event("warning")["message"]
    assert agent.event("worker_exited")["worker"] == "w1"
    agent.say(op="tell", worker="w0", message={"kind": "hold"})
    assert agent.told_by_worker() == {"kind": "hold"}


def test_what_was_read_and_no_leader_knows_is_told_to_the_next(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    """Also where an agent of an earlier release wrote it, and a full disk cut it off."""
    run_id = f"unit-{secrets.token_hex(4)}"
    untold = tmp_path / "spool" / run_id / "node1" / "untold.jsonl"
    untold.parent.mkdir(parents=True)
    used = {"generation": 1, "step": 3, "epoch": 0, "position": 16}
    known = [
        {"kind": "dataset", "n": 100, "dropped": 4},
        {"kind": "used", **used, "indices": [5, 7], "padding": []},
    ]
    lines = "".join(json.dumps(reading) + "\n" for reading in known)
    untold.write_text(lines + '{"kind": "used", "generation": 1, "ste')
    agent = start_agent(run_id=run_id)
    assert [agent.event("past")["message"] for _ in known] == known
    assert f"the file {untold} sent a line that is not JSON" in agent.event("warning")["message"]
    assert not untold.exists()


def test_workers_of_an_agent_that_is_killed_are_gone(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.process.kill()
    agent.wait_clean()


def test_a_stranger_on_the_socket_is_not_heard(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.start_worker()
    agent.said_by_worker("ready")
    (worker,) = agent.marked()
    name = "\0" + worker.environ()["HVD_ELASTIC_AGENT"]
    others = [encode(msg.WorkerHello(worker, 1)) for worker in ("unknown", "w0")]
    for line in (*others, b'{"worker": "w0"}\n', b"nonsense\n", b"[]\n"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(name)
            stranger.sendall(line)
            assert stranger.recv(100) == b"", f"{line!r} is answered by the end"
    assert "a second process of slot 0 has called init()" in agent.event("warning")["message"]
    agent.say(op="tell", worker="w0", message={"kind": "hold"})
    assert agent.told_by_worker() == {"kind": "hold"}


def test_a_worker_that_falls_silent_is_told_of_when_its_silence_reaches_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not with the next heartbeat: with many hosts these come less often."""
    now, told = 0.0, []
    worker = SimpleNamespace(name="w", activity=Activity(), silent_s=lambda at: max(0.0, at - 0.5))

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 10:
            raise asyncio.CancelledError

    made: Any = agent_module.Agent(io.BytesIO())
    made._hello = leader_hello(heartbeat_s=2.0, failure_timeout_s=5.0)
    made._workers = [worker]
    made._link.send = lambda beat: told.append(beat.workers["w"].silent_s)
    monkeypatch.setattr(agent_module, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made._beat())
    assert told == [0.0, 1.5, 3.5, 5.0, 7.0, 9.0]


def test_interfaces_are_found_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.3.4.5") == "lo"
    assert interface_of("192.0.2.1") is None


# ---- without a leader


def lose_leader(agent: Agent) -> None:
    """As when it is killed: both pipes end."""
    for stream in (agent.process.stdin, agent.process.stdout):
        assert stream is not None
        stream.close()


def test_workers_outlive_the_leader_for_the_grace_time_and_no_longer(
    start_agent: StartAgent,
) -> None:
    agent = start_agent(leader_grace_s=1.0)
    agent.start_worker()
    agent.said_by_worker("ready")
    (worker,) = agent.marked()
    lost_at = time.monotonic()
    lose_leader(agent)
    worker.wait(TIMEOUT_S)
    assert time.monotonic() - lost_at >= 1.0
    agent.wait_clean()
    assert agent.process.wait(TIMEOUT_S) == 0


def start_writers(start_agent: StartAgent, *workers: str, **hello: Any) -> Agent:
    agent = start_agent(WRITER, options=msg.WorkerOptions(checkpoint_every_s=600), **hello)
    for slot, name in enumerate(workers):
        agent.start_worker(name, slot)

    def is_joined(message: Message) -> bool:
        agent.say(op="beat", acted_upon=0)  # the leader lives, however late the workers are
        return message.get("ev") == "worker" and message["message"]["kind"] == "joined"

    for _ in workers:
        agent.hear(is_joined)
    return agent


def test_after_the_grace_time_every_worker_of_the_host_gets_to_write(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_writers(start_agent, "w0", "w1", leader_grace_s=0.2)
    (tmp_path / "hold-w1").touch()
    lose_leader(agent)
    for name in ("asked-w1", "written-w0"):
        until((tmp_path / name).exists)
    with pytest.raises(subprocess.TimeoutExpired):
        agent.process.wait(0.5)
    (tmp_path / "hold-w1").unlink()
    assert agent.process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "written-w1").exists()
    agent.wait_clean()


def test_a_step_that_hangs_without_a_leader_is_called_off_for_the_checkpoint(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_writers(start_agent, "w0", leader_grace_s=0.2, failure_timeout_s=3.0)
    (tmp_path / "stuck").touch()
    lose_leader(agent)
    assert agent.process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "written-w0").exists()


def test_a_sigterm_without_a_leader_ends_the_grace_time_with_a_checkpoint(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_writers(start_agent, "w0", leader_grace_s=3600)
    lose_leader(agent)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "written-w0").exists()
    agent.wait_clean()


def test_a_second_sigterm_waits_for_no_checkpoint(start_agent: StartAgent, tmp_path: Path) -> None:
    agent = start_writers(start_agent, "w0", leader_grace_s=3600)
    (tmp_path / "hold-w0").touch()
    lose_leader(agent)
    agent.process.send_signal(signal.SIGTERM)
    until((tmp_path / "asked-w0").exists)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(TIMEOUT_S) == 0
    agent.wait_clean()


def test_without_a_grace_time_all_ends_with_the_leader(start_agent: StartAgent) -> None:
    agent = start_agent(leader_grace_s=0)
    agent.start_worker()
    agent.said_by_worker("ready")
    lose_leader(agent)
    agent.wait_clean()
    assert agent.process.wait(TIMEOUT_S) == 0


def test_a_leader_that_says_nothing_is_lost_too(start_agent: StartAgent) -> None:
    agent = start_agent(leader_grace_s=0, failure_timeout_s=0.5)
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        agent.start_worker()
    agent.wait_clean()
    assert agent.process.wait(TIMEOUT_S) == 0


def test_the_next_leader_gets_the_workers_and_hears_what_the_last_one_did_not(
    start_agent: StartAgent,
) -> None:
    old = start_agent(leader_grace_s=60)
    old.start_worker()
    seq = old.hear(lambda m: m.get("ev") == "worker" and m["message"]["kind"] == "ready")["seq"]
    old.say(op="beat", acted_upon=seq)
    old.announce(3, "w0")
    heard = old.hear(lambda m: m.get("ev") == "worker" and m["message"]["kind"] == "warning")
    (worker,) = old.marked()
    lose_leader(old)
    new = start_agent(run_id=old.run_id, leader="second", take_over=True, leader_grace_s=60)
    hello = new.event("hello")
    assert hello["pid"] == old.process.pid
    held = hello["held"]
    assert held["generation"] == 3
    assert [member["worker"] for member in held["members"]] == ["w0"]
    (facts,) = held["workers"]
    assert (facts["worker"], facts["ready"], facts["generation"]) == ("w0", True, 3)
    again = new.hear(lambda m: m.get("ev") == "worker")
    assert again == heard, "it was never acknowledged"
    assert worker.is_running()
    new.say(op="tell", worker="w0", message={"kind": "leave"})
    assert new.event("worker_exited")["code"] == 0
    new.say(op="shutdown", grace_s=0.5)
    assert new.process.wait(TIMEOUT_S) == 0
    assert old.process.wait(TIMEOUT_S) == 0


def test_files_of_the_script_that_no_leader_fetched_are_offered_to_the_next(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    """And not told again: what is not in the spool any more was fetched."""
    gone = saved_file("gone.pt", 4, "0" * 64)
    told = f"say(kind='saved', file={msgspec.to_builtins(gone)}, path='', seconds=0.1)\n"
    old = start_agent(WORKER.replace("for line", f"{told}for line", 1), leader_grace_s=60)
    old.start_worker()
    assert old.said_by_worker("saved")["file"]["name"] == "gone.pt"
    spool = tmp_path / "spool" / old.run_id / "node1" / "saved"
    spool_file(spool, lambda file: file.write(b"kept"), partial(saved_file, "kept.pt"))
    lose_leader(old)
    new = start_agent(run_id=old.run_id, leader="second", take_over=True, leader_grace_s=60)
    (kept,) = new.event("hello")["saved"]
    assert (kept["name"], kept["bytes"]) == ("kept.pt", 4)
    new.say(op="release", kind="saved", files=[kept])
    new.say(op="shutdown", grace_s=0.5)
    assert new.process.wait(TIMEOUT_S) == 0
    assert new.process.stdout is not None
    rest = [json.loads(line) for line in new.process.stdout]
    said = [each["message"]["kind"] for each in [*new.skipped, *rest] if each["ev"] == "worker"]
    assert said
    assert "saved" not in said
    assert old.process.wait(TIMEOUT_S) == 0
    assert not spool.exists()


def test_the_spool_is_kept_for_a_file_that_no_leader_fetched(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    agent.event("hello")
    spool = tmp_path / "spool" / agent.run_id / "node1" / "saved"
    saved = spool_file(spool, lambda file: file.write(b"kept"), partial(saved_file, "kept.pt"))
    agent.say(op="shutdown", grace_s=0.5)
    assert agent.process.wait(TIMEOUT_S) == 0
    assert find_spooled(spool) == [saved]


def test_a_second_leader_is_refused_while_the_first_leads(start_agent: StartAgent) -> None:
    agent = start_agent()
    agent.event("hello")
    second = start_agent(run_id=agent.run_id, leader="second", take_over=True)
    agent.say(op="beat", acted_upon=0)
    refused = second.event("refused")["led"]
    assert (refused["leader"], refused["led_by"], refused["led_since"]) == ("first", "a test", 5.0)
    assert 0 <= refused["heard_s"] < TIMEOUT_S
    assert second.process.wait(TIMEOUT_S) == 0
    agent.start_worker()
    agent.said_by_worker("ready")


def test_a_leader_that_dies_while_another_calls_is_none(start_agent: StartAgent) -> None:
    old = start_agent(leader_grace_s=60)
    old.start_worker()
    old.said_by_worker("ready")
    new = start_agent(run_id=old.run_id, leader="second", take_over=True, leader_grace_s=60)
    lose_leader(old)  # which may be seen after the call
    assert new.event("hello")["pid"] == old.process.pid


def test_of_two_leaders_that_call_at_once_one_gets_the_agent() -> None:
    """The agent was stopped for a while, and the lost leader's connection is closed."""
    answers: dict[str, Message] = {}

    def caller(leader: str) -> Caller:
        read, write = os.pipe()
        hello = leader_hello(leader=leader, take_over=True)
        connection: Any = SimpleNamespace(
            sendall=lambda data: answers.setdefault(leader, json.loads(data)), close=lambda: None
        )
        return Caller(connection, hello, b"", read, write)

    async def meet() -> None:
        opened = asyncio.Event()
        made: Any = agent_module.Agent(io.BytesIO())
        made._hello = leader_hello(leader="first")
        made._workers = SimpleNamespace(hello=None)
        made._spool = SimpleNamespace(keep_run=lambda _: None)
        made._introduce = made._tell_of_notice = lambda **_: None

        async def open_link(*pipes: IO[bytes], unread: bytes) -> None:
            for pipe in pipes:
                pipe.close()
            await opened.wait()
            made._link.is_open, made._link._heard = True, time.monotonic()

        async def read_commands() -> None:
            pass

        made._link.open, made._read_commands = open_link, read_commands
        both = [asyncio.ensure_future(made._meet(caller(name))) for name in ("second", "third")]
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(*both)
        made._link.is_open = False  # there is no transport to close

    asyncio.run(meet())
    assert answers["second"] == {"ev": "taken"}
    assert answers["third"]["ev"] == "refused"
    assert answers["third"]["led"]["leader"] == "second"


def test_who_calls_at_the_last_moment_waits_for_the_end_too() -> None:
    """Its task is cancelled before it has begun; if its connection closed, it would kill."""
    caller, *connections = socket.socketpair()
    number = connections[0].fileno()

    async def end() -> None:
        made: Any = agent_module.Agent(io.BytesIO())
        made._door = SimpleNamespace(accept=lambda: (connections.pop(), ""))
        made._at_the_door()
        for task in made._tasks:
            task.cancel()
        await asyncio.sleep(0)

    asyncio.run(end())
    caller.setblocking(False)
    with caller, pytest.raises(BlockingIOError):
        caller.recv(1)
    os.close(number)


def test_a_silent_leader_is_told_who_took_over(start_agent: StartAgent) -> None:
    old = start_agent(leader_grace_s=60, failure_timeout_s=0.5)
    old.start_worker()
    old.said_by_worker("ready")
    time.sleep(1)  # it says nothing for longer than the timeout, and its connection stays open
    new = start_agent(run_id=old.run_id, leader="second", take_over=True, leader_grace_s=60)
    assert new.event("hello")["pid"] == old.process.pid
    told = old.event("taken_over")["led"]
    assert (told["run_id"], told["leader"], told["led_since"]) == (old.run_id, "second", 5.0)


def test_a_leader_that_begins_anew_ends_what_it_left_behind(start_agent: StartAgent) -> None:
    old = start_agent(leader_grace_s=60)
    old.start_worker()
    old.said_by_worker("ready")
    (worker,) = old.marked()
    new = start_agent(run_id=old.run_id)  # the same leader, which has lost the connection
    assert new.event("hello")["held"] is None
    assert not worker.is_running()
    assert old.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("take_over", [False, pytest.param(True, marks=COSTLY)])
def test_an_agent_that_stands_still_is_ended_by_the_next(
    start_agent: StartAgent, take_over: bool
) -> None:
    old = start_agent(leader_grace_s=60)
    old.start_worker()
    old.said_by_worker("ready")
    old.process.send_signal(signal.SIGSTOP)
    new = start_agent(run_id=old.run_id, leader="second", take_over=take_over)
    assert new.event("hello")["held"] is None
    assert old.process.wait(TIMEOUT_S) == -signal.SIGKILL
    old.wait_clean()


def test_a_caller_that_stands_still_holds_nothing_up(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    agent.event("hello")
    hello = leader_hello(run_id=agent.run_id, leader="second", take_over=True)
    text = encode(failover._Call(hello, b""))
    spool = tmp_path / "spool" / agent.run_id / "node1"
    with (
        socket_in(spool, failover._SOCKET) as address,
        connect_own(address, TIMEOUT_S) as connection,
        Path(os.devnull).open() as null,
    ):
        socket.send_fds(connection, [text[:1]], 2 * [null.fileno()])
        for _ in range(3):
            agent.event("beat")
        connection.sendall(text[1:])
        assert json.loads(connection.recv(1 << 12))["ev"] == "refused"


def test_an_agent_that_is_ending_is_waited_for(start_agent: StartAgent, tmp_path: Path) -> None:
    """Else it would remove the folder that the next one uses."""
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    old = start_agent(stubborn + WORKER)
    old.start_worker()
    old.said_by_worker("ready")
    old.say(op="shutdown", grace_s=0.5)
    new = start_agent(run_id=old.run_id, take_over=True)  # so it waits longer for a late one
    assert new.event("hello")["held"] is None
    assert old.process.wait(TIMEOUT_S) == 0
    spool = tmp_path / "spool" / old.run_id / "node1"
    assert {"run.json", "agent"} <= {path.name for path in spool.iterdir()}


# ---- other users of the host


@other_user.needs_root
def test_another_user_who_holds_the_name_of_an_agent_neither_gets_nor_hinders_anything(
    start_agent: StartAgent,
) -> None:
    """As that of earlier releases, which was in the abstract namespace and known to all."""
    run_id = f"unit-{secrets.token_hex(4)}"
    with other_user.Holder(f"@hvd_elastic/{run_id}/node1/{os.getuid()}/agent"):
        first = start_agent(run_id=run_id)
        assert first.event("hello")["pid"] == first.process.pid


@other_user.needs_root
def test_a_folder_that_another_user_has_made_for_the_run_is_refused(
    start_agent: StartAgent, open_folder: Path, tmp_path: Path
) -> None:
    """Though an agent of theirs listens in it."""
    run_id = f"unit-{secrets.token_hex(4)}"
    spool = open_folder / "spool" / run_id / "node1"
    spool.mkdir(parents=True)
    for folder in (spool, spool.parent):
        os.chown(folder, other_user.UID, other_user.UID)
    with other_user.Holder(str(spool / "agent")), (tmp_path / "stderr").open("wb") as stderr:
        agent = start_agent(folder=open_folder, run_id=run_id, stderr=stderr)
        assert agent.process.wait(TIMEOUT_S) == os.EX_NOPERM
    told = (tmp_path / "stderr").read_text()
    assert f"{spool} belongs to {other_user.WORDS}" in told
    assert "Traceback" not in told


# ---- notices that the host will go


def test_a_first_sigterm_is_told_and_a_second_ends_the_agent(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        agent = start_agent(stderr=stderr)
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.process.send_signal(signal.SIGTERM)
    notice = agent.event("notice")
    assert (notice["cause"], notice["leave_in_s"]) == ("its agent got SIGTERM", 30.0)
    agent.say(op="tell", worker="w0", message={"kind": "hold"})
    assert agent.told_by_worker() == {"kind": "hold"}
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(TIMEOUT_S) == 0
    agent.wait_clean()
    assert (tmp_path / "stderr").read_text() == "it got SIGTERM again\n", "the leader quotes it"


def test_a_machine_that_is_shut_down_tells_all_at_once_and_state_is_saved(
    start_agent: StartAgent,
) -> None:
    agent = start_agent(LINKED)
    agent.start_worker()
    _, worker, _ = agent.told_by_worker('["pids"')
    for number in (signal.SIGTERM, signal.SIGHUP):
        agent.process.send_signal(number)  # first: a worker that gets it alone ends
        os.kill(worker, number)
    assert agent.event("notice")["cause"] in ("its agent got SIGTERM", "its agent got SIGHUP")
    for _ in range(2):
        agent.say(op="tell", worker="w0", message={"kind": "checkpoint"})
        agent.told_by_worker('["asked"')
    assert not any(message.get("ev") == "notice" for message in agent.skipped), "said once"
    agent.say(op="shutdown", grace_s=3600)
    assert agent.process.wait(TIMEOUT_S) == 0, "it does not wait for who outlives SIGTERM"
    agent.wait_clean()


def test_a_worker_that_gets_sigterm_alone_ends_and_so_do_its_children(
    start_agent: StartAgent,
) -> None:
    agent = start_agent(LINKED)
    agent.start_worker()
    _, worker, child_pid = agent.told_by_worker('["pids"')
    child = psutil.Process(child_pid)
    child.terminate()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    os.kill(worker, signal.SIGTERM)
    ended = agent.event("worker_exited")
    assert (ended["code"], ended["signal"]) == (None, signal.SIGTERM), "what was sent"
    assert not any(message.get("ev") == "notice" for message in agent.skipped)


def test_a_worker_ends_by_a_sigterm_that_does_not_wake_its_main_thread(
    start_agent: StartAgent,
) -> None:
    itself = """
import threading
def get_signal():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=get_signal).start()
while link"""
    agent = start_agent(LINKED.replace("\nwhile link", itself))
    agent.start_worker()
    assert agent.event("worker_exited")["signal"] == signal.SIGTERM


def test_the_preemption_command_gives_notice(start_agent: StartAgent, tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("75\n")
    agent = start_agent(preemption_command=f"cat {tmp_path}/notice")
    notice = agent.event("notice")
    assert notice["cause"] == "the preemption command says so"
    assert notice["leave_in_s"] == 75.0
    agent.start_worker()
    agent.said_by_worker("ready")
    agent.say(op="tell", worker="w0", message={"kind": "leave"})
    assert agent.event("worker_exited")["code"] == 0, "workers are reaped beside it"


def test_a_preemption_command_that_cannot_be_run_is_told(start_agent: StartAgent) -> None:
    agent = start_agent(preemption_command="exec no-such-command")
    told = agent.event("warning")["message"]
    assert told == "the preemption command cannot be run: exec no-such-command"


FORKED = WORKER.replace(
    'say(kind="ready"',
    """
is_fork = "hvd_elastic.agent.template.process" in sys.modules
say(kind="warning", message=json.dumps(["started", os.getpid(), os.getppid(), is_fork]))
if is_fork and os.path.exists("fails"):
    say(kind="script_error", traceback="it cannot be forked", progress={})
    sys.exit(3)
say(kind="imported", modules=["json"])
say(kind="ready\"""",
    1,
).replace("for line", 'say(kind="joined", generation=1, step=0)\nfor line', 1)


def test_a_worker_is_forked_from_the_template_or_started_anew_if_it_fails(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FORKED)
    env = {"PYTHONPATH": str(ROOT)}
    agent = start_agent(command=(sys.executable, "-S", "train.py"), env=env)
    agent.start_worker("w0")
    _, first, _, is_fork = agent.told_by_worker()
    assert is_fork is False
    worker = psutil.Process(first)
    numbers = itertools.count(1)

    def fork() -> tuple[str, int, int]:
        """Start workers until one is forked: the template may not be ready, or late."""
        for number in numbers:
            agent.start_worker(f"w{number}", number)
            _, pid, parent, is_fork = agent.told_by_worker()
            if is_fork:
                return f"w{number}", pid, parent
            agent.say(op="kill", worker=f"w{number}")
            agent.event("worker_exited")
        raise AssertionError

    name, pid, parent = fork()
    assert parent == agent.process.pid
    assert psutil.Process(pid).environ()["HVD_ELASTIC_WORKER"] == name
    assert psutil.Process(pid).cmdline() == worker.cmdline()
    agent.say(op="kill", worker=name)
    assert agent.event("worker_exited")["signal"] == signal.SIGKILL
    (tmp_path / "fails").touch()
    for end in ("the next one has another template", "2 times in a row"):
        name, *_ = fork()  # after one failure there is a template again
        assert agent.told_by_worker()[3] is False

        def told(message: Message, name: str = name, end: str = end) -> bool:
            is_log = message.get("ev") == "log" and message["worker"] == name
            return is_log and end in message["data"]

        agent.hear(told)
        assert not [m for m in agent.skipped if m.get("ev") == "worker_exited"]
        assert "it cannot be forked" not in str(agent.skipped)
        agent.say(op="kill", worker=name)
        agent.event("worker_exited")
    agent.process.kill()
    agent.wait_clean()


def test_a_worker_that_prints_without_end_waits_for_the_leader(start_agent: StartAgent) -> None:
    """Else its output would pile up in the memory of the agent and of the leader."""
    endless = 'while True: os.write(1, b"x" * 999 + b"\\n")\n'
    agent = start_agent(WORKER.partition("sys.stdout.write")[0] + endless)
    agent.start_worker()

    def printed() -> tuple[int, int]:
        """The last message with output, and how much there was, once no more comes."""
        last = size = quiet = 0
        while quiet < 5:
            message = agent.hear(lambda m: m.get("ev") in ("log", "beat"))
            if message["ev"] == "log":
                last, size, quiet = message["seq"], size + len(message["data"]), 0
            elif size >= MOST_ON_THE_WAY:
                quiet += 1
        return last, size

    last, size = printed()
    assert size < 2 * MOST_ON_THE_WAY
    agent.say(op="beat", acted_upon=last)
    later, size = printed()
    assert later > last
    assert size < 2 * MOST_ON_THE_WAY


def test_a_folder_that_cannot_be_made_is_named() -> None:
    """As in a home folder that is full or read-only."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_elastic.agent.agent"],
        input=encode(leader_hello(env={"HVD_ELASTIC_HOME": "/proc/home"})),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"a folder of the run cannot be made: /proc/home: No such file")


def test_it_imports_nothing_from_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('a file of the user')")
    done = subprocess.run(
        ["sh", "-c", agent_command(sys.executable)],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")
