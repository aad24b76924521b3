from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.errors import HostKeyError, HostUnreachableError, LoginRefusedError, SshError
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import (
    CommandTimeoutError,
    LocalConnection,
    SshConnection,
    SshOptions,
    connect,
    is_local,
)
from hvd_elastic.tools.trust import TrustState, trust_hosts
from tests.paths import LIMIT_S
from tests.ssh import sshd as private_sshd
from tests.ssh.sshd import BY_PASSWORD, Sshd
from tests.waiting import until

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / "home"


@pytest.fixture
def options(server: Sshd, tmp_path: Path) -> SshOptions:
    return SshOptions(config_path=server.write_config(tmp_path / "config", ["node1", "node2"]))


@pytest.fixture(params=["ssh", "local"])
def connection(request: pytest.FixtureRequest, options: SshOptions) -> Iterator[Connection]:
    host = Host("node1") if request.param == "ssh" else Host("localhost")
    with connect(host, options) as connection:
        yield connection


def test_a_command_runs(connection: Connection) -> None:
    result = connection.run("echo out; echo err >&2; exit 3", timeout_s=LIMIT_S)
    assert (result.exit_status, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not result.ok
    assert result.text == "out"
    assert connection.alive


def test_arguments_arrive_as_they_are(connection: Connection) -> None:
    arguments = ["a b", "it's", '"q"', "$HOME", "*", "line1\nline2", "back\\slash", "", "ü", ";id"]
    program = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))"
    result = connection.run([sys.executable, "-c", program, *arguments], timeout_s=LIMIT_S)
    assert result.stdout.decode().split("\0") == arguments


def test_ten_megabytes_in_and_out(connection: Connection) -> None:
    data = os.urandom(10 << 20)
    result = connection.run("cat", timeout_s=LIMIT_S, stdin=data)
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()


def test_writing_everything_before_reading_does_not_hang(connection: Connection) -> None:
    data = b"x" * 99 + b"\n"
    process = connection.start("tee /dev/stderr")
    process.stdin.write(data * 80_000)
    process.stdin.close()
    assert sum(1 for _ in process.stdout) == 80_000
    assert process.wait(LIMIT_S) == 0
    assert process.wait_drained(LIMIT_S)
    assert process.stderr_tail.endswith(data)
    process.close()


def test_a_dialogue_line_by_line(connection: Connection) -> None:
    seen: list[bytes] = []
    process = connection.start(
        "echo ready >&2; while read line; do echo got $line; done; exit 7", seen.append
    )
    for word in (b"one", b"two"):
        process.stdin.write(word + b"\n")
        process.stdin.flush()
        assert process.stdout.readline(timeout=LIMIT_S) == b"got " + word + b"\n"
    with pytest.raises(TimeoutError):
        process.stdout.readline(timeout=0.01)
    with pytest.raises(TimeoutError, match="still runs"):
        process.wait(0.01)
    process.stdin.close()
    assert process.wait(LIMIT_S) == 7
    assert process.wait_drained(LIMIT_S)
    assert list(process.stdout) == []
    assert b"".join(seen) == b"ready\n"
    process.close()


def test_input_that_is_not_read_is_no_failure(connection: Connection) -> None:
    result = connection.run("head -c 3", timeout_s=LIMIT_S, stdin=b"abc" * 3_000_000)
    assert result.stdout == b"abc"


def test_writing_to_a_command_that_ended_is_a_broken_pipe(connection: Connection) -> None:
    process = connection.start("exit 0")
    assert process.wait(LIMIT_S) == 0
    process.wait_drained(LIMIT_S)
    with pytest.raises(BrokenPipeError):
        process.stdin.write(b"x" * 20_000_000)
    process.close()


def test_a_command_that_takes_too_long_is_stopped_there(
    connection: Connection, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    command = f"echo $$ > {shlex.quote(str(pid_file))}; echo begun; sleep 1000; echo late"
    shown = b""
    for limit_s in (0.7, 7.0, 70.0):
        if not shown:  # it had not begun yet, on a busy machine
            with pytest.raises(CommandTimeoutError, match=f"within {limit_s:g} s") as caught:
                connection.run(command, timeout_s=limit_s)
            shown = caught.value.stdout
    assert shown == b"begun\n"
    pid = int(pid_file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the command")


def test_a_background_child_does_not_hold_the_result(connection: Connection) -> None:
    result = connection.run("echo begun; sleep 1000 & echo $!", timeout_s=LIMIT_S)
    words = result.text.split()
    os.kill(int(words[1]), 9)
    assert words[0] == "begun"


def test_addresses(connection: Connection) -> None:
    assert connection.peer_address == "127.0.0.1"


def test_an_unknown_key_is_refused_with_its_fingerprint(server: Sshd, tmp_path: Path) -> None:
    config = server.write_config(tmp_path / "config", ["node1"])
    config.write_text(config.read_text().replace(str(server.folder / "known_hosts"), "/dev/null"))
    printed = subprocess.run(
        ["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True
    ).stdout.split()[1]
    with pytest.raises(HostKeyError, match="unknown host key") as caught:
        connect(Host("node1"), SshOptions(config_path=config))
    assert printed in str(caught.value)
    assert "hvd-elastic trust" in str(caught.value)


def test_a_key_can_be_known_to_the_project_alone(
    server: Sshd, tmp_path: Path, own_home: Path
) -> None:
    config = server.write_config(tmp_path / "config", ["node1"])
    config.write_text(config.read_text().replace(str(server.folder / "known_hosts"), "none"))
    own_home.mkdir(exist_ok=True)
    (own_home / "known_hosts").write_text(server.known_hosts_line())
    with connect(Host("node1"), SshOptions(config)) as connection:
        assert connection.run("true", LIMIT_S).ok


@pytest.mark.parametrize("marker", ["ed25519", "ecdsa", "@revoked "])
def test_a_changed_or_revoked_key_is_fatal(server: Sshd, tmp_path: Path, marker: str) -> None:
    config = server.write_config(tmp_path / "config", ["node1"])
    wrong = tmp_path / "wrong"
    if marker == "@revoked ":
        wrong.write_text(marker + server.known_hosts_line())
    else:
        other = private_sshd.make_key(tmp_path / "other", marker).with_suffix(".pub").read_text()
        wrong.write_text(f"[{server.address}]:{server.port} {other}")
    config.write_text(config.read_text().replace(str(server.folder / "known_hosts"), str(wrong)))
    with pytest.raises(HostKeyError) as caught:
        connect(Host("node1"), SshOptions(config_path=config))
    assert f"{wrong}, line 1" in str(caught.value)
    what = "revoked" if marker == "@revoked " else "HAS CHANGED"
    assert what in str(caught.value)


def test_a_dead_port(server: Sshd, options: SshOptions) -> None:
    port = private_sshd.free_port()
    with pytest.raises(HostUnreachableError) as caught:
        connect(Host("node1", port=port), options)
    for part in ("node1", "127.0.0.1", f"port {port}", "connection refused"):
        assert part in str(caught.value)


def test_a_name_that_does_not_exist(options: SshOptions) -> None:
    with pytest.raises(HostUnreachableError, match="no-such-host"):
        connect(Host("no-such-host.invalid"), options)


def test_an_address_that_drops_everything(options: SshOptions) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # A full backlog makes the kernel drop further connections: as a firewall does.
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        with pytest.raises(HostUnreachableError, match=r"no answer within 0.8 s"):
            connect(
                Host("127.0.0.1", port=listener.getsockname()[1]),
                SshOptions(options.config_path, connect_timeout_s=0.8),
            )
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-Slow\r\n"])
def test_a_server_that_says_nothing_more(options: SshOptions, banner: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(banner)
                while peer.recv(4096):
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(HostUnreachableError, match=r"no answer within 1 s"):
            connect(
                Host("127.0.0.1", port=listener.getsockname()[1]),
                SshOptions(options.config_path, connect_timeout_s=1),
            )
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the socket was left open"


def test_something_else_listens_there(options: SshOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HostUnreachableError, match="no ssh connection"):
            connect(Host("127.0.0.1", port=listener.getsockname()[1]), options)


def test_a_user_without_a_key_there(server: Sshd, tmp_path: Path) -> None:
    config = server.write_config(tmp_path / "config", ["node1"])
    key = private_sshd.make_key(tmp_path / "stranger")
    config.write_text(config.read_text().replace(str(server.user_key), str(key)))
    with pytest.raises(SshError, match=r"refused to log in.*authorized_keys") as caught:
        connect(Host("node1"), SshOptions(config_path=config))
    assert not isinstance(caught.value, HostUnreachableError)
    with connect(Host("node1"), SshOptions(config_path=config, identity=server.user_key)) as other:
        assert other.run("true", LIMIT_S).ok


def test_a_locked_key_is_no_prompt(server: Sshd, tmp_path: Path) -> None:
    config = server.write_config(tmp_path / "config", ["node1"])
    locked = tmp_path / "locked"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True
    )
    config.write_text(config.read_text().replace(str(server.user_key), str(locked)))
    with pytest.raises(SshError, match="ssh-add"):
        connect(Host("node1"), SshOptions(config_path=config))


def test_the_agents_key_is_used(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_socket = tmp_path / "agent"
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(agent_socket)], stdout=subprocess.DEVNULL
    )
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent_socket))
        # The socket is there before the agent listens.
        lists = ["ssh-add", "-l"]
        until(lambda: subprocess.run(lists, capture_output=True, check=False).returncode != 2)
        subprocess.run(["ssh-add", "-q", str(server.user_key)], check=True)
        config = server.write_config(tmp_path / "config", ["node1"])
        text = config.read_text().replace(f"IdentityFile {server.user_key}\n", "")
        config.write_text(text.replace("IdentitiesOnly yes", ""))
        with connect(Host("node1"), SshOptions(config_path=config)) as connection:
            assert connection.run("true", LIMIT_S).ok
        # Only its public half lies beside: IdentitiesOnly picks the agent's key for it.
        (tmp_path / "half.pub").write_text(Path(f"{server.user_key}.pub").read_text())
        (tmp_path / "half").write_text("unreadable")
        config.write_text(f"{text}  IdentityFile {tmp_path / 'half'}\n")
        with connect(Host("node1"), SshOptions(config_path=config)) as connection:
            assert connection.run("true", LIMIT_S).ok
    finally:
        agent.terminate()
        agent.wait(LIMIT_S)


def test_through_a_jump_host(server: Sshd, tmp_path: Path) -> None:
    config = server.write_config(tmp_path / "config", ["node1"], "  ProxyJump door\n")
    server.write_config(config, ["door"])
    with connect(Host("node1"), SshOptions(config_path=config)) as connection:
        assert connection.run("echo there", LIMIT_S).text == "there"
        assert connection.peer_address is None


def test_a_jump_host_is_not_given_the_password_of_the_host(server: Sshd, tmp_path: Path) -> None:
    folder = tmp_path / "door"
    folder.mkdir()
    door = Sshd(folder, settings=BY_PASSWORD)
    config = server.write_config(tmp_path / "config", ["node1"], "  ProxyJump door\n")
    door.write_config(config, ["door"])
    options = SshOptions(config_path=config, password="secret")
    try:
        with pytest.raises(LoginRefusedError, match=f"port {door.port}.*refused to log in"):
            connect(Host("node1"), options)
        assert "password" not in (folder / "sshd.log").read_text()
        with pytest.raises(LoginRefusedError):
            connect(Host("door"), options)
        assert "Failed password" in (folder / "sshd.log").read_text(), "and there is it told"
    finally:
        door.stop()


@pytest.mark.parametrize("names", [["node1"], ["node1", "door"]])
def test_a_jump_host_is_trusted_before_the_host_behind_it(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    config = server.write_config(tmp_path / "config", ["node1"], "  ProxyJump door\n")
    server.write_config(config, ["door"])
    config.write_text(config.read_text().replace(str(server.folder / "known_hosts"), "none"))
    options = SshOptions(config_path=config)
    found = trust_hosts([Host(name) for name in names], options, lambda _: True)
    # Both are one sshd here, whose key is known once it is accepted for the first of them.
    states = {entry.host: entry.state for entry in found}
    assert states == {"door": TrustState.ACCEPTED, "node1": TrustState.KNOWN}
    assert len(found) == 2


@pytest.mark.parametrize("passes_on", [True, False])
def test_the_second_jump_host_is_reached_through_the_first(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes_on: bool
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    (tmp_path / "door").mkdir()
    door = Sshd(tmp_path / "door", settings=f"AllowTcpForwarding {'yes' if passes_on else 'no'}\n")
    config = server.write_config(tmp_path / "config", ["node1"], "  ProxyJump door,inner\n")
    server.write_config(config, ["inner"], "  ProxyJump none\n")
    door.write_config(config, ["door"])
    options = SshOptions(config_path=config)
    try:
        found = trust_hosts([Host("node1")], options, lambda _: True)
        assert [entry.host for entry in found] == ["door", "inner", "node1"]
        behind = TrustState.KNOWN if passes_on else TrustState.UNREACHABLE
        assert [entry.state for entry in found] == [TrustState.KNOWN, behind, behind]
        if passes_on:
            with connect(Host("node1"), options) as connection:
                assert connection.run("echo there", LIMIT_S).text == "there"
    finally:
        door.stop()


def test_a_jump_that_leads_to_itself(server: Sshd, tmp_path: Path) -> None:
    config = server.write_config(tmp_path / "config", ["node1"], "  ProxyJump node1\n")
    options = SshOptions(config_path=config)
    with pytest.raises(SshError, match="jump"):
        connect(Host("node1"), options)
    with pytest.raises(SshError, match="jump"):
        trust_hosts([Host("node1")], options, lambda _: True)


def test_a_lost_connection_is_noticed(server: Sshd, options: SshOptions) -> None:
    with connect(Host("node1"), options) as connection:
        assert isinstance(connection, SshConnection)
        process = connection.start("cat")
        # The sshd of this connection is the parent of its commands.
        pid = int(connection.run("echo $PPID", LIMIT_S).text)
        os.kill(pid, 9)
        assert process.stdout.readline(timeout=LIMIT_S) == b""
        assert process.wait(LIMIT_S) == -1
        process.close()
        with pytest.raises(SshError, match=r"host node1: .*connection is lost"):
            connection.start("true")
        assert not connection.alive


@pytest.mark.parametrize("what", ["end", "data"])
def test_a_command_that_ends_while_it_is_sent_something_costs_no_other(
    options: SshOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What another thread was about to send may not follow the CLOSE: OpenSSH disconnects then."""
    gate = tmp_path / "gate"
    with connect(Host("node1"), options) as connection:
        assert isinstance(connection, SshConnection)
        other = connection.start("cat")
        process = connection.start(f"until [ -e {shlex.quote(str(gate))} ]; do sleep 0.05; done")
        transport, writer = connection._transport, threading.current_thread()
        ends: Any = process._ends
        send, channel = transport._send_user_message, ends._channel

        def send_late(message: Any) -> None:
            if threading.current_thread() is writer and not gate.exists():
                gate.touch()
                until(lambda: channel.closed, "the CLOSE of the host")
            send(message)

        monkeypatch.setattr(transport, "_send_user_message", send_late)
        if what == "end":
            process.stdin.close()
        else:
            process.stdin.write(b"x")
        assert process.wait(LIMIT_S) == 0
        process.close()
        other.stdin.write(b"still there\n")
        assert other.stdout.readline(timeout=LIMIT_S) == b"still there\n"
        other.close()


def test_a_host_that_falls_silent_cannot_hold_the_caller(
    options: SshOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.hosts.process.SIGNAL_S", 0.5)
    with connect(Host("node1"), options) as connection:
        process = connection.start("cat")
        pid = int(connection.run("echo $PPID", LIMIT_S).text)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert not process.stop(grace_s=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_command_killed_by_a_signal(connection: Connection) -> None:
    process = connection.start("kill -9 $$; sleep 1")
    status = process.wait(LIMIT_S)
    assert status == (137 if isinstance(connection, LocalConnection) else -1)
    process.close()


def test_a_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(SshError, match="cannot be read"):
        connect(Host("node1"), SshOptions(config_path=tmp_path / "none"))


def test_what_counts_as_this_machine(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  User nobody\nHost local?ost\n  Port 2222\n")
    other = tmp_path / "other"
    other.write_text("Host *\n  User nobody\n")
    empty = SshOptions(config_path=other)
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert is_local(Host(name), empty)
    assert not is_local(Host("localhost", user="bob"), empty)
    assert not is_local(Host("localhost", port=22), empty)
    assert not is_local(Host("127.0.0.2"), empty)
    assert not is_local(Host("localhost"), SshOptions(config_path=config))


def test_importing_is_quick() -> None:
    program = (
        "import sys, hvd_elastic.hosts.ssh as s; "
        "print([m for m in ('fabric', 'paramiko', 'invoke') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
