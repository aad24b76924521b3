"""runclust --keep over a real sshd: a kept host serves like a cold one, and nothing stays."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_elastic.cluster import keep_socket
from tests.command_lines import CommandLines
from tests.ssh import sshd as private_sshd
from tests.ssh import tools as shared
from tests.ssh.sshd import Sshd
from tests.ssh.tools import Tools, is_alive, records, wait_until

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]

server = shared.server
DETACHED = (
    "sleep 100 & echo $!; env -i setsid sh -c 'trap : TERM; while :; do sleep 1; done' & "
    "echo $!; echo $$; exec sleep 100"
)


class Kept(Tools):
    """As a user calls it: by the entry point that looks for a keeper."""

    def __init__(self, server: Sshd, folder: Path) -> None:
        super().__init__(server, folder)
        self.hostfile.write_text("node[1-2]\n")
        self._log = server.folder / "sshd.log"
        self._port = server.port

    def argv(self, tool: str, *arguments: str) -> list[str]:
        if tool == "stop-keeping":
            return [sys.executable, "-m", "hvd_elastic.cli.app", "cluster", tool, *arguments]
        program = f"from hvd_elastic.cli.start import {tool}; {tool}()"
        return [sys.executable, "-c", program, *arguments]

    def logins(self) -> int:
        """How often somebody has logged in so far."""
        return self._log.read_text().count("Accepted publickey")

    def processes(self, of: str) -> list[int]:
        """The processes that this test keeps: "keeper" or "agent"."""
        wanted, mark = {
            "keeper": (b"hvd_elastic.cli.keeping", self.environment["HVD_ELASTIC_HOME"]),
            "agent": (b"\0keep_commands\0", f" {self._port}"),
        }[of]
        found = []
        for path in Path("/proc").iterdir():
            try:
                if not path.name.isdigit() or wanted not in (path / "cmdline").read_bytes():
                    continue
                variables = (path / "environ").read_text().split("\0")
                if any(each.endswith(mark) for each in variables):
                    found.append(int(path.name))
            except OSError:
                continue
        return [pid for pid in found if is_alive(pid)]

    def listens(self) -> int:
        """The keeper's process that takes calls: the parent of the others."""
        pids = self.processes("keeper")
        (found,) = set(map(parent, pids)) & set(pids)
        return found

    def sockets(self) -> list[Path]:
        return list(Path(self.environment["HVD_ELASTIC_HOME"], "keepers").glob("*.keeper"))

    def gone(self) -> bool:
        return not (self.processes("keeper") or self.processes("agent") or self.sockets())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def keeping(server: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    tools = Kept(server, tmp_path_factory.mktemp("keeping"))
    yield tools
    tools("stop-keeping")
    wait_until(tools.gone, "the end of all that was kept")


@pytest.fixture
def kept(keeping: Kept) -> Kept:
    """Two hosts that are kept."""
    result = keeping("runclust", "--keep", "5m", str(keeping.hostfile), "echo first")
    assert result.returncode == 0, result.stderr
    assert len(keeping.processes("agent")) >= 2
    return keeping


def start(tools: Tools, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tools.argv("runclust", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=tools.environment,
        stdin=subprocess.DEVNULL,
    )


def test_a_warm_call_is_like_a_cold_one_without_logging_in(kept: Kept, tmp_path: Path) -> None:
    before = kept.logins()
    secret = f"it's {secrets.token_hex(12)} $HOME"
    folder = tmp_path / "a folder"
    folder.mkdir()
    hosts = str(kept.hostfile)
    with CommandLines(secret.split()[1]) as watcher:
        result = kept(
            "runclust", hosts, "--env", "TOKEN", "--cwd", str(folder), "--json",
            'sleep 0.3; echo "$TOKEN|$PWD|"; cat; printf "a\\377" >&2; exit 3',
            text_in="one\ntwo" * 50_000, TOKEN=secret,
        )  # fmt: skip
    assert not watcher.found
    assert result.returncode == 1
    for entry in records(result).values():
        assert entry["stdout"] == f"{secret}|{folder}|\n" + "one\ntwo" * 50_000
        assert (entry["stderr"], entry["exit_status"]) == ("a\ufffd", 3)
    result = kept("runclust", hosts, "--gather", "pwd; nobody-has-this")
    assert "node[1-2] (2): exit status 127" in result.stdout
    result = kept("runclust", hosts, "--cwd", "/none", "true")
    assert "host node1: /none: No such file or directory" in result.stderr
    result = kept("runclust", hosts, "--json", "--timeout", "0.5", "sleep 60")
    assert {entry["state"] for entry in records(result).values()} == {"timed out"}
    assert all("was stopped" in entry["error"] for entry in records(result).values())
    # A background child is left alone, and does not hold up the call.
    result = kept("runclust", hosts, "--hosts", "node1", "sleep 100 & echo $!")
    pid = int(result.stdout.split()[1])
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert kept.logins() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_warm_call_ends_all_it_started(kept: Kept, number: signal.Signals) -> None:
    process = start(kept, str(kept.hostfile), DETACHED)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(6)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130), errors
    if number == signal.SIGINT:
        assert "2 interrupted (node[1-2])" in errors
    wait_until(lambda: not any(map(is_alive, pids)), "the commands' end")
    assert kept("runclust", str(kept.hostfile), "true").returncode == 0


def test_kill_9_of_the_keeper_leaves_nothing(kept: Kept) -> None:
    process = start(kept, str(kept.hostfile), DETACHED)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(6)]
    for pid in kept.processes("keeper"):
        with contextlib.suppress(ProcessLookupError):  # one ends with another
            os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the keeper is gone" in errors
    wait_until(lambda: not any(map(is_alive, pids)), "the commands' end")
    wait_until(lambda: not kept.processes("agent"), "the agents' end")
    # The socket that is left behind hinders nobody.
    assert kept("runclust", "--keep", "5m", str(kept.hostfile), "true").returncode == 0
    assert len(kept.processes("agent")) >= 2


def test_kill_9_of_what_takes_calls_leaves_nothing(kept: Kept) -> None:
    process = start(kept, str(kept.hostfile), DETACHED)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(6)]
    os.kill(kept.listens(), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    wait_until(lambda: not any(map(is_alive, pids)), "the commands' end")
    wait_until(lambda: not kept.processes("agent"), "the agents' end")
    assert kept("runclust", str(kept.hostfile), "true").returncode == 0


def test_a_call_goes_on_when_its_keeper_is_told_to_stop(kept: Kept, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    command = f"echo in; until [ -e {flag} ]; do sleep 0.05; done; echo out"
    process = start(kept, "--keep", "5m", "--fanout", "1", str(kept.hostfile), command)
    assert process.stdout is not None
    assert process.stdout.readline() == "node1: in\n"
    (path,) = kept.sockets()
    folder = os.open(path.parent, os.O_RDONLY)
    # Both wait to be taken, the one behind the other.
    listens = kept.listens()
    os.kill(listens, signal.SIGSTOP)
    asking, late = (keep_socket.call_keeper(folder, path.name, socket.socket) for _ in range(2))
    os.close(folder)
    assert asking is not None
    assert late is not None
    with asking, late:
        keep_socket.send_request(asking, [keep_socket.STOP])
        keep_socket.send_request(late, [keep_socket.RUN])
        os.kill(listens, signal.SIGCONT)
        for sock in (asking, late):
            sock.settimeout(60)
        assert asking.recv(9) == keep_socket.STOP
        with contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
    assert not path.exists()
    flag.touch()
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "node1: out\nnode2: in\nnode2: out\n"), errors
    wait_until(kept.gone, "the end of all that was kept")


def test_a_stream_that_is_closed_is_no_hindrance(kept: Kept) -> None:
    before = kept.logins()
    for close, shown in ((">&-", ""), ("2>&-", "node1: a\nnode2: a\n"), ("<&-", None)):
        for environment, logins in ({}, 0), ({"SSH_AUTH_SOCK": "none"}, 2):
            argv = kept.argv("runclust", str(kept.hostfile), "--fanout", "1", "echo a; echo b >&2")
            result = subprocess.run(
                ["sh", "-c", f'exec "$@" {close}', "sh", *argv],
                capture_output=True,
                text=True,
                env={**kept.environment, **environment},
                timeout=60,
            )
            assert result.returncode == 0, result.stderr
            assert "Traceback" not in result.stderr
            assert shown is None or result.stdout == shown
            assert kept.logins() - before == logins
            before += logins


def test_a_connection_that_breaks_is_made_anew(kept: Kept) -> None:
    before = kept.logins()
    for pid in kept.processes("agent")[:1]:
        os.kill(pid, signal.SIGKILL)
    result = kept("runclust", "--keep", "5m", str(kept.hostfile), "true")
    assert result.returncode == 0, result.stderr
    wait_until(lambda: len(kept.processes("agent")) >= 2, "two agents")
    assert kept.logins() == before + 1


def test_other_settings_use_other_connections(kept: Kept, server: Sshd) -> None:
    def logins(*arguments: str, **environment: str) -> int:
        before = kept.logins()
        result = kept("runclust", *arguments, str(kept.hostfile), "true", **environment)
        assert result.returncode == 0, result.stderr
        return kept.logins() - before

    assert logins() == 0
    other = server.folder / "other_key"
    other.write_bytes(server.user_key.read_bytes())
    other.chmod(0o600)
    assert logins("--identity", str(other)) == 2
    assert logins(SSH_AUTH_SOCK=str(kept.folder / "none")) == 2
    # A host beside those that are kept, without and with being asked to keep it.
    kept.hostfile.write_text("node[1-3]\n")
    assert [logins(), logins("--keep", "5m"), logins()] == [1, 1, 0]
    kept.hostfile.write_text("root@node1\n")
    assert logins() == 1
    kept.hostfile.write_text("localhost\nnode1\n")
    assert logins() == 0
    kept.hostfile.write_text("node[1-2]\n")
    with kept.config.open("a") as config:
        config.write("Host node9\n")
    assert logins() == 2


def test_a_reader_that_stands_still_holds_up_nobody(kept: Kept) -> None:
    with start(kept, str(kept.hostfile), "yes 0123456789") as process:
        assert process.stdout is not None
        process.stdout.readline()
        for text in ("a", "b"):
            command = f"head -c 3000000 /dev/zero; echo; echo {text}"
            result = kept("runclust", str(kept.hostfile), command)
            assert result.returncode == 0
            assert result.stdout.count(f": {text}\n") == 2
        process.stdout.close()
        assert process.wait(60) == 1
    for pid in kept.processes("keeper"):
        peak = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]
        assert int(peak) < 150_000


@pytest.fixture
def noisy(tmp_path: Path) -> Iterator[Sshd]:
    """An sshd whose users' shells read a ~/.bashrc, which prints something."""
    home = tmp_path / "there"
    home.mkdir()
    (home / ".bashrc").write_text(f"echo welcome\nPATH={home}:$PATH\n")
    (tmp_path / "noisy").mkdir()
    server = Sshd(tmp_path / "noisy", home=home)
    server.stop()
    text = server.config.read_text()
    server.config.write_text(text.replace("SetEnv SHLVL=1 ", "SetEnv "))
    server.process = server._start()
    yield server
    server.stop()


def test_what_shells_print_is_no_hindrance(noisy: Sshd, tmp_path: Path) -> None:
    tools = Kept(noisy, tmp_path)
    for _ in range(2):
        result = tools("runclust", "--keep", "5m", str(tools.hostfile), "echo mine")
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(": mine\n") == 2
    assert tools.logins() == 2
    tools("stop-keeping")


def test_an_agent_stays_for_long_and_loses_what_it_had_ready(noisy: Sshd, tmp_path: Path) -> None:
    tools = Kept(noisy, tmp_path)
    tools.hostfile.write_text("node1\n")
    # A holder whose command ends before its input is not kept; cat does not.
    assert tools("runclust", "--keep", "30d", str(tools.hostfile), "cat").returncode == 0
    wait_until(lambda: len(tools.processes("agent")) == 2, "the holder of the next command")
    agents = tools.processes("agent")
    for pid in agents:
        if parent(pid) in agents:
            os.kill(pid, signal.SIGKILL)
    result = tools("runclust", str(tools.hostfile), "echo mine")
    assert result.stdout.endswith("node1: mine\n"), result.stderr
    assert tools.logins() == 1
    tools("stop-keeping")


def test_relative_paths_are_those_of_the_callers_folder(server: Sshd, tmp_path: Path) -> None:
    tools = Kept(server, tmp_path)
    tools.hostfile.write_text("node1\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "known_hosts").write_text(server.known_hosts_line())
    tools.environment["HVD_ELASTIC_HOME"] = "home"
    text = tools.config.read_text().replace(str(server.folder / "known_hosts"), "/dev/null")
    tools.config.write_text(text)
    (tmp_path / "id").write_bytes(server.user_key.read_bytes())
    (tmp_path / "id").chmod(0o600)

    def logins() -> int:
        before = tools.logins()
        argv = tools.argv("runclust", "--keep", "5m", str(tools.hostfile), "true")
        result = subprocess.run(
            argv, cwd=tmp_path, env=tools.environment, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return tools.logins() - before

    assert [logins(), logins()] == [1, 0]
    tools.config.write_text(text.replace(str(server.user_key), "id"))
    assert [logins(), logins()] == [1, 1]
    tools.environment["HVD_ELASTIC_HOME"] = str(tmp_path / "home")
    tools("stop-keeping")


def test_an_agent_that_breaks_the_rules_harms_only_its_host(
    noisy: Sshd, server: Sshd, tmp_path: Path
) -> None:
    tools = Kept(server, tmp_path)
    noisy.write_config(tools.config, ["bad"])
    tools.hostfile.write_text("node1\nbad\n")
    python = tmp_path / "there" / "python3"
    # It says that the first command has ended, and not how.
    python.write_text(
        f"""#!/bin/sh
case "$*" in *keep_commands*)
    head -c "$5" > {tmp_path}/program
    printf '\\001hvd-elastic-agent\\n'
    head -c 9 > {tmp_path}/start
    printf '\\016\\000\\000\\000\\001\\000\\000\\000\\000'
    exec cat > {tmp_path}/rest
esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    result = tools("runclust", "--keep", "5m", "--json", str(tools.hostfile), "sleep 0.5; echo a")
    found = records(result)
    assert set(found) == {"node1", "bad"}, result.stderr
    assert found["node1"]["stdout"] == "a\n", result.stderr
    assert (found["bad"]["state"], result.returncode) == ("failed", 1)
    assert "the connection was lost" in found["bad"]["error"]
    assert (tmp_path / "start").stat().st_size == 9
    tools("stop-keeping")


def test_what_is_idle_ends(server: Sshd, tmp_path: Path) -> None:
    tools = Kept(server, tmp_path)
    tools.hostfile.write_text("node1\n")
    result = tools("runclust", "--keep", "0.5s", str(tools.hostfile), "true")
    assert result.returncode == 0, result.stderr
    folder = Path(tools.environment["HVD_ELASTIC_HOME"], "keepers")
    wait_until(lambda: not tools.processes("keeper"), "the keeper's end")
    assert not list(folder.glob("*.keeper"))
    assert tools("runclust", "--keep", "5m", str(tools.hostfile), "true").returncode == 0
    assert tools.processes("keeper")
    assert tools("runclust", "--no-keep", str(tools.hostfile), "true").returncode == 0
    wait_until(lambda: not tools.processes("keeper"), "the keeper's end")
    assert tools("stop-keeping").stdout == "nothing is kept\n"
    assert tools("runclust", "--keep", "soon", str(tools.hostfile), "true").returncode == 2


def test_a_folder_that_others_can_use_is_not_used(server: Sshd, tmp_path: Path) -> None:
    tools = Kept(server, tmp_path)
    tools.hostfile.write_text("node1\n")
    folder = Path(tools.environment["HVD_ELASTIC_HOME"], "keepers")
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    result = tools("runclust", "--keep", "5m", str(tools.hostfile), "true")
    assert (result.returncode, result.stdout) == (1, "")
    assert "must be a folder of this user" in result.stderr
    assert tools("runclust", str(tools.hostfile), "true").returncode == 0
