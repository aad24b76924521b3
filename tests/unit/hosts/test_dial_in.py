"""Hosts that dial back: real host processes, real commands, and strangers at the port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.engines.dial_in.hosts import HostProcess
from hvd_elastic.errors import HostUnreachableError, RunError, SshError
from hvd_elastic.hosts import dial_in
from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.dial_in import DialIn
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.transfer import receive_file, send_file
from hvd_elastic.programs import secure_stream
from hvd_elastic.programs.processes import read_process
from hvd_elastic.programs.secure_stream import Kind, SecureStream, dial
from tests.paths import LIMIT_S
from tests.waiting import until

LONG_S = 60.0


class Leader:
    """A listener with what it has reported."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.changes = 0
        self.dial_in = DialIn("127.0.0.1", self._changed, self.warnings.append, grace_s=2.0)

    def _changed(self) -> None:
        self.changes += 1

    def names(self) -> list[str]:
        return [each.host.name for each in self.dial_in.hosts]

    def connect(self, name: str = "here") -> Connection:
        until(lambda: name in self.names())
        return self.dial_in.connect(Host(name))


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.dial_in.close()


@pytest.fixture
def process(leader: Leader) -> Iterator[HostProcess]:
    made = HostProcess(leader.dial_in.invitation, "here", 2, {"COLOUR": "blue"})
    yield made
    made.close()


@pytest.fixture
def connection(leader: Leader, process: HostProcess) -> Connection:
    return leader.connect()


def test_command_gets_input_and_gives_output_and_exit_status(connection):
    result = connection.run("cat; echo wrong >&2; exit 7", stdin=b"one\ntwo")
    assert (result.stdout, result.stderr, result.exit_status) == (b"one\ntwo", b"wrong\n", 7)
    assert connection.run('printf "$COLOUR $HVD_ELASTIC_LEADER_ADDRESS"').text == "blue 127.0.0.1"
    assert connection.python == sys.executable
    assert connection.peer_address == "127.0.0.1"


def test_programs_of_the_host_interpreter_are_found_first(connection):
    assert connection.run("command -v python3").text.startswith(str(Path(sys.executable).parent))


def test_file_of_many_megabytes_is_sent_and_fetched(connection, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 24
    (tmp_path / "local").write_bytes(content)
    send_file(connection, tmp_path / "local", str(tmp_path / "new" / "remote"))
    back = bytearray()
    receive_file(connection, str(tmp_path / "new" / "remote"), back.extend)
    assert back == content
    with pytest.raises(SshError, match="nothing-here"):
        receive_file(connection, str(tmp_path / "nothing-here"), back.extend)


def test_unread_output_of_one_command_does_not_hold_up_another(connection):
    full = connection.start("exec yes")
    assert connection.run("echo free").text == "free"
    assert full.stop(grace_s=LIMIT_S)
    until(lambda: read_process(process_id(connection, "yes")) is None)


def process_id(connection: Connection, name: str) -> int:
    """The process of that name under the host process; 0: there is none."""
    found = connection.run(["pgrep", "-x", "-P", connection.run("echo $PPID").text, name])
    return int(found.text or 0)


def test_signal_reaches_the_command_behind_input_that_it_does_not_read(connection):
    process = connection.start("trap 'exit 5' TERM; echo on; while :; do sleep 0.05; done")
    assert process.stdout.readline(LONG_S) == b"on\n"

    def feed() -> None:
        with contextlib.suppress(OSError):
            process.stdin.write(bytes(8 << 20))

    feeding = threading.Thread(target=feed)
    feeding.start()
    process.signal("TERM")
    assert process.wait(LONG_S) == 5
    process.close()
    feeding.join(LONG_S)
    killed = connection.start("kill -9 $$")
    assert killed.wait(LONG_S) == 128 + signal.SIGKILL


def test_closed_connection_is_the_end_of_input_for_its_commands(connection, tmp_path: Path) -> None:
    process = connection.start(["sh", "-c", 'cat; echo > "$1"', "sh", str(tmp_path / "ended")])
    process.stdin.write(b"x")
    assert process.stdout.read(1, LONG_S) == b"x"
    connection.close()
    until((tmp_path / "ended").exists)
    with pytest.raises(SshError, match="closed"):
        connection.start("true")


def test_end_of_the_leader_ends_the_host_process(leader, connection, process):
    leader.dial_in.close()
    process.wait()


def test_the_connection_of_a_command_is_tried_again(
    connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[socket.socket] = []

    def first_breaks(plain: socket.socket, *given: Any, **options: Any) -> SecureStream:
        if not broken:
            broken.append(plain)
            raise ConnectionResetError("on a busy network")
        return SecureStream(plain, *given, **options)

    monkeypatch.setattr(dial_in, "SecureStream", first_breaks)
    assert connection.run("echo there").text == "there"
    assert broken


def test_a_command_whose_connection_breaks_at_once_has_failed(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stream: SecureStream, patience_s: float) -> None:
        raise ConnectionResetError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(SecureStream, "has_begun", broken)
        patch.setattr(dial_in, "_START_S", LONG_S)
        with pytest.raises(SshError, match="no command can be started: the network is gone"):
            connection.start("true")
    assert connection.run("echo again").text == "again"


def test_a_host_is_used_only_after_its_answer(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = SecureStream.send

    def late(stream: SecureStream, kind: Kind, data: bytes = b"") -> None:
        if data == b"{}":
            time.sleep(0.1)
        send(stream, kind, data)

    monkeypatch.setattr(SecureStream, "send", late)
    with contextlib.closing(HostProcess(leader.dial_in.invitation, "here", 1)):
        until(leader.names)
        assert leader.dial_in.connect(Host("here")).run("echo on").text == "on"


def test_a_host_that_cannot_be_answered_is_not_there_and_dials_in_again(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failed = SecureStream.send, []

    def broken(stream: SecureStream, kind: Kind, data: bytes = b"") -> None:
        if data == b"{}":
            failed.append(leader.names())
            raise ConnectionResetError("the network is gone")
        send(stream, kind, data)

    invitation = {**leader.dial_in.invitation, "grace_s": LONG_S}
    with contextlib.closing(HostProcess(invitation, "here", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(SecureStream, "send", broken)
            until(lambda: len(failed) > 1)
            assert leader.names() == failed[1] == []
        assert leader.connect().run("echo again").text == "again"


def test_a_host_that_cannot_be_recorded_is_told_of_and_dials_in_again() -> None:
    problems = [OSError("the disk is full")] * 2  # as it comes, and as it goes
    warnings: list[str] = []

    def changed() -> None:
        if problems:
            raise problems.pop()

    made = DialIn("127.0.0.1", changed, warnings.append, grace_s=LONG_S)
    with contextlib.closing(HostProcess(made.invitation, "here", 1)) as process:
        until(lambda: not problems and [each.host.name for each in made.hosts] == ["here"])
        assert made.connect(Host("here")).run("echo again").text == "again"
        process.close()
        until(lambda: made.hosts == [])
    made.close()
    assert warnings == ["host here has come or gone, which cannot be recorded: the disk is full"]


def test_a_host_that_dials_in_while_the_run_ends_is_ended(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, closed = threading.Event(), threading.Event()
    register = DialIn._register

    def late(*peer: Any) -> Any:
        here.set()
        assert closed.wait(LONG_S)
        return register(*peer)

    monkeypatch.setattr(DialIn, "_register", late)
    with contextlib.closing(HostProcess(leader.dial_in.invitation, "here", 1)) as process:
        assert here.wait(LONG_S)
        leader.dial_in.close()
        closed.set()
        until(lambda: process.ended)
        process.wait()  # raises if the link was lost
    assert leader.changes == 0


def test_hosts_of_one_name_are_told_apart(leader, connection):
    other = HostProcess(leader.dial_in.invitation, "here", 1)
    until(lambda: leader.names() == ["here", "here-2"])
    assert (
        leader.connect("here-2").run("echo $PPID").text != leader.connect().run("echo $PPID").text
    )
    other.close()
    until(lambda: leader.names() == ["here"])


def test_host_process_that_is_closed_takes_its_commands_with_it(leader, connection, process):
    running = connection.start("echo $$; trap '' HUP TERM; while :; do sleep 0.1; done")
    pid = int(running.stdout.readline(LONG_S))
    process.close()
    until(lambda: read_process(pid) is None)
    # Its status may still arrive before the connection is gone.
    assert running.wait(LONG_S) in (-1, 128 + signal.SIGKILL)
    until(lambda: not connection.alive)
    with pytest.raises(HostUnreachableError, match="here"):
        leader.dial_in.connect(Host("here"))


def test_agent_dies_with_its_host_process(connection):
    running = connection.start(f"exec {sys.executable} -m hvd_elastic.agent.agent")
    assert running.stdout.readline(LONG_S)  # its first heartbeat
    parent = int(connection.run("echo $PPID").text)
    agent = process_id(connection, Path(sys.executable).name) or process_id(connection, "python3")
    assert agent
    os.kill(parent, signal.SIGKILL)
    until(lambda: read_process(agent) is None)


def test_broken_link_is_dialled_again_by_the_same_host(leader, connection):
    until(lambda: leader.changes > 0)  # told a moment after it is listed
    changes = leader.changes
    (remote,) = leader.dial_in.hosts
    remote.control.cut()
    until(lambda: leader.changes > changes and leader.names() == ["here"])
    assert leader.dial_in.hosts[0].identity == remote.identity
    assert leader.connect().run("echo again").text == "again"


LEADER = """
import json, sys
from hvd_elastic.hosts.dial_in import DialIn
from hvd_elastic.hosts.hostfile import Host
dial_in = DialIn("127.0.0.1", lambda: None, print, grace_s=1.0)
print(json.dumps(dial_in.invitation), flush=True)
while not dial_in.hosts:
    pass
process = dial_in.connect(Host("here")).start("echo $$; exec sleep 1000 > /dev/null 2>&1")
print(process.stdout.readline().decode(), flush=True)
process.wait()
"""


def test_commands_end_when_the_leader_is_gone_for_good():
    killed = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    with killed.stdout as said:
        process = HostProcess(json.loads(said.readline()), "here", 1)
        pid = int(said.readline())
        assert read_process(pid) is not None
        killed.kill()
        killed.wait()
    with pytest.raises(RunError, match="the link to the leader is lost"):
        process.wait()
    assert read_process(pid) is None


def test_wrong_key_is_refused_and_both_sides_say_so(leader, process):
    leader.connect()
    wrong = {**leader.dial_in.invitation, "certificate": make_certificate()}
    with pytest.raises(RunError, match="does not have the key of this run"):
        HostProcess(wrong, "thief", 1).wait()
    until(lambda: bool(leader.warnings))
    assert "does not have the key of this run" in leader.warnings[0]
    assert leader.names() == ["here"]


def test_who_shows_no_key_in_time_is_not_said_to_have_another(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a host of the run whose processes were stopped for a while."""
    monkeypatch.setattr(secure_stream, "HANDSHAKE_S", 0.1)
    with socket.create_connection(("127.0.0.1", leader.dial_in.invitation["port"])):
        until(lambda: bool(leader.warnings))
    assert "it has not shown the key of this run (timed out)" in leader.warnings[0]


def test_a_command_on_a_host_that_is_lost_meanwhile_has_failed(
    leader: Leader, connection: Connection, process: HostProcess
) -> None:
    pid = int(connection.run("echo $PPID").text)
    os.kill(pid, signal.SIGSTOP)  # it does not answer

    def lose() -> None:
        until(lambda: bool(leader.dial_in._awaited))
        os.kill(pid, signal.SIGKILL)

    losing = threading.Thread(target=lose)
    losing.start()
    with pytest.raises(SshError, match="host here: no command can be started: its link is lost"):
        connection.start("true")
    losing.join()


def test_strangers_cost_nothing(
    leader: Leader, process: HostProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_stream, "HANDSHAKE_S", 5.0)
    address = ("127.0.0.1", leader.dial_in.invitation["port"])
    silent = [socket.create_connection(address) for _ in range(100)]
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\0"):
        with socket.create_connection(address) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(rubbish)
    with contextlib.suppress(OSError), socket.create_connection(address) as plain:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(plain) as stranger:
            stranger.recv(1)  # it has no certificate of its own
    assert leader.connect().run("echo fine").text == "fine"
    for stranger in silent:
        stranger.settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # closed by the leader
        stranger.close()
    assert leader.names() == ["here"]
    assert len(leader.warnings) == 1


def test_key_is_in_no_command_line_or_environment(leader, connection):
    parent = connection.run("echo $PPID").text
    for name in ("cmdline", "environ"):
        assert b"PRIVATE" not in Path(f"/proc/{parent}/{name}").read_bytes()
    assert "PRIVATE" not in connection.run("env").text


def test_one_thread_reads_a_stream_while_another_one_writes():
    certificate = make_certificate()
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[SecureStream] = []
    accepting = threading.Thread(
        target=lambda: ends.append(SecureStream(listener.accept()[0], certificate, client=False))
    )
    accepting.start()
    here = dial("127.0.0.1", listener.getsockname()[1], certificate)
    accepting.join()
    (there,) = ends
    sent = [os.urandom(200_000) for _ in range(20)]
    received: dict[int, bytes] = {}

    def write(stream: SecureStream) -> None:
        for data in sent:
            stream.send(Kind.STDIN, data)
        stream.send(Kind.EXIT, b"0")

    def read(number: int, stream: SecureStream) -> None:
        data = b""
        while (frame := stream.receive())[0] is Kind.STDIN:
            data += frame[1]
        received[number] = data

    threads = [threading.Thread(target=write, args=(end,)) for end in (here, there)]
    threads += [threading.Thread(target=read, args=each) for each in enumerate((here, there))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert received == {0: b"".join(sent), 1: b"".join(sent)}
    for stream in (here, there):
        stream.close()
    listener.close()


def test_invitation_is_needed():
    module = "hvd_elastic.programs.dial_back"
    ended = subprocess.run([sys.executable, "-m", module], input=b"", capture_output=True)
    assert ended.returncode
