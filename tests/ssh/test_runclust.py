"""runclust over a real sshd: eight hosts, one of which may hang."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import pty
import re
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvd_elastic.hosts.hostfile import expand_hosts
from tests.command_lines import CommandLines
from tests.paths import ALL, COSTLY, LIMIT_S
from tests.ssh import sshd as private_sshd
from tests.ssh import tools as shared
from tests.ssh.tools import Tools, is_alive, records
from tests.waiting import until

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not private_sshd.AVAILABLE, reason="sshd is not installed"),
]

server, tools = shared.server, shared.tools


def test_each_line_under_its_host(tools: Tools) -> None:
    result = tools("runclust", str(tools.hostfile), "--hosts", "node[1-3]", "echo a; echo b >&2")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"node{n}: a" for n in (1, 2, 3)]
    assert {f"node{n}: b" for n in (1, 2, 3)} < set(result.stderr.splitlines())
    assert result.stderr.splitlines()[-1].startswith("3 hosts in ")


def test_arguments_arrive_as_typed_and_options_stand_where_they_like(tools: Tools) -> None:
    for arguments in (
        ["--hosts", "node1", str(tools.hostfile), "printf", "%s|", "a b", "-x", "$HOME"],
        [str(tools.hostfile), "--hosts=node1", "printf", "%s|", "a b", "-x", "$HOME"],
        [str(tools.hostfile), "--hosts", "node1", "--", "printf", "%s|", "a b", "-x", "$HOME"],
        ["-f", "2", str(tools.hostfile), "--hosts", "node1", "printf", "%s|", "a b", "-x", "$HOME"],
    ):
        result = tools("runclust", *arguments)
        assert result.stdout == "node1: a b|-x|$HOME|\n", result.stderr


def test_a_host_that_hangs_does_not_hold_up_the_others(tools: Tools) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        tools.hostfile.write_text(f"127.0.0.1 port={port}  # answers nobody\nnode[1-7]\n")
        process = subprocess.Popen(
            tools.argv(
                "runclust", str(tools.hostfile), "--json", "--connect-timeout", "90", "true"
            ),
            stdout=subprocess.PIPE,
            text=True,
            env=tools.environment,
            stdin=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline()) for _ in range(7)]
        assert [entry["state"] for entry in first] == ["ok"] * 7
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert json.loads(rest)["states"] == {"ok": 7, "interrupted": 1}

        tools.hostfile.write_text(f"127.0.0.1 port={port}\n")
        result = tools("runclust", str(tools.hostfile), "--connect-timeout", "0.5", "true")
    assert result.returncode == 1
    assert "no answer within 0.5 s" in result.stderr


def test_statuses_and_usage(tools: Tools) -> None:
    result = tools("runclust", str(tools.hostfile), "--exclude-hosts", "node[3-8]", "exit 3")
    assert result.returncode == 1
    assert "host node1: exit status 3" in result.stderr
    assert "2 failed (node[1-2])" in result.stderr
    assert tools("runclust", str(tools.hostfile), "--hosts", "nobody", "true").returncode == 2
    assert tools("runclust", str(tools.hostfile)).returncode == 2
    assert tools("killclust", str(tools.hostfile)).returncode == 2
    result = tools("runclust", str(tools.folder / "none"), "true")
    assert result.returncode != 0
    assert result.stderr.startswith("error: hostfile ")
    assert "Traceback" not in result.stderr
    result = tools("runclust", str(tools.hostfile), "--dry-run", "rm", "-r", "a b")
    assert result.stdout.splitlines()[0] == "node1 (ssh): rm -r 'a b'"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=COSTLY), signal.SIGKILL])
def test_the_commands_there_end_with_us_and_all_that_they_started(
    tools: Tools, number: signal.Signals
) -> None:
    # Forked, detached with an empty environment and deaf to TERM, and the command itself.
    command = (
        "sleep 100 & echo $!; env -i setsid sh -c 'trap : TERM; while :; do sleep 1; done' & "
        "echo $!; echo $$; exec sleep 100"
    )
    process = subprocess.Popen(
        tools.argv("runclust", str(tools.hostfile), "--hosts", "node[1-3]", command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=tools.environment,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(9)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert "3 interrupted (node[1-3])" in errors
    assert "Traceback" not in errors
    until(lambda: not any(map(is_alive, pids)), "the commands' end")


def test_a_command_that_ends_leaves_its_background_child_alone(tools: Tools) -> None:
    result = tools(
        "runclust", str(tools.hostfile), "--hosts", "node1",
        "nohup sleep 100 >/dev/null 2>&1 & echo $!",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    pid = int(result.stdout.split()[1])
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_the_same_output_is_shown_once(tools: Tools, tmp_path: Path) -> None:
    first = shlex.quote(str(tmp_path / "first"))
    command = f"mkdir {first} 2>/dev/null && {{ echo odd; exit 3; }}; echo same; echo aside >&2"
    result = tools("runclust", str(tools.hostfile), "--gather", command)
    assert result.returncode == 1
    blocks = sorted(re.findall(r"-+\n(.*) \((\d)\)(.*)\n-+\n(.*)\n", result.stdout))
    (odd, *_), (same, *_) = sorted(blocks, key=lambda block: block[1])
    assert blocks == sorted([(odd, "1", ": exit status 3", "odd"), (same, "7", "", "same")])
    assert {*expand_hosts(same), odd} == {f"node{number}" for number in range(1, 9)}
    assert f"{same}: aside" in result.stderr.splitlines()
    assert re.search(rf"\nfailed: {odd}: exit status 3 \(.* s\)\n", result.stderr)


def test_environment_folder_and_input(tools: Tools, tmp_path: Path) -> None:
    secret = f"it's {secrets.token_hex(12)} $HOME"
    folder = tmp_path / "a folder"
    folder.mkdir()
    arguments = [str(tools.hostfile), "--hosts", "node[1-3]", "--env", "TOKEN", "-e", "X=a b"]
    command = 'sleep 0.3; echo "$TOKEN|$X|$PWD|"; cat'
    with CommandLines(secret.split()[1]) as watcher:
        result = tools(
            "runclust", *arguments, "--cwd", str(folder), "--json", command,
            text_in="one\ntwo", TOKEN=secret,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert watcher.rounds > 5
    assert not watcher.found
    for entry in records(result).values():
        assert entry["stdout"] == f"{secret}|a b|{folder}|\none\ntwo"
    result = tools("runclust", *arguments, "--dry-run", command, TOKEN=secret)
    assert result.stdout.splitlines()[0] == f"node1 (ssh, with TOKEN, X): {command}"
    result = tools("runclust", str(tools.hostfile), "--hosts", "node1", "--cwd", "/none", "true")
    assert result.returncode == 1
    assert "host node1: /none: No such file or directory" in result.stderr
    assert tools("runclust", *arguments, "true").returncode == 2


def test_slow_hosts_are_named_while_we_wait(tools: Tools, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    go, first = (shlex.quote(str(tmp_path / name)) for name in ("go", "first"))
    process = subprocess.Popen(
        tools.argv(
            "runclust", str(tools.hostfile), "--hosts", "node[1-3]",
            f"mkdir {first} 2>/dev/null && until [ -e {go} ]; do sleep 0.1; done; echo done",
        ),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=tools.environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    while not re.search(r"waiting for node\d \(\d+ s\)", shown):
        shown += os.read(ours, 1000).decode()
    (tmp_path / "go").touch()
    assert process.wait(LIMIT_S) == 0
    os.close(ours)


def test_limits_and_retries(tools: Tools, tmp_path: Path) -> None:
    arguments = ["--json", str(tools.hostfile), "sleep 60"]
    result = tools("runclust", "--hosts", "node1", "--timeout", "0.5", *arguments)
    entry = records(result)["node1"]
    assert (result.returncode, entry["state"]) == (1, "timed out")
    assert "did not end within 0.5 s and was stopped" in entry["error"]
    # Without ssh, which may take its time on a busy machine.
    tools.hostfile.write_text("localhost\n::1\n")
    result = tools("runclust", "-f", "1", "--total-timeout", "1", *arguments)
    first, second = records(result).values()
    assert first["state"] == second["state"] == "timed out"
    assert "did not end within 1 s and was stopped" in first["error"]
    assert "its turn did not come within 1 s" in second["error"]

    counter = tmp_path / "counter"
    closed = private_sshd.free_port()
    tools.hostfile.write_text(f"node1\n127.0.0.1 port={closed}\n")
    command = f"echo x >> {shlex.quote(str(counter))}; exit 3"
    result = tools(
        "runclust",
        str(tools.hostfile),
        "--retries",
        "1",
        "--json",
        "--connect-timeout",
        "60",
        command,
    )
    entries = records(result)
    assert entries["127.0.0.1"]["state"] == "unreachable"
    assert entries["127.0.0.1"]["error"].endswith("(2 tries)")
    assert entries["node1"]["exit_status"] == 3
    assert counter.read_text() == "x\n", "a command that ran is not repeated"


def test_much_output_costs_no_memory(tools: Tools, tmp_path: Path) -> None:
    program = (
        "import atexit, re, sys\n"
        # Not getrusage, which begins with what the parent had.
        "peak = lambda: re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]\n"
        "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
        "from hvd_elastic.cli.cluster.tools import runclust_main; runclust_main()\n"
    )
    command = "head -c 75000000 /dev/zero; echo; yes 0123456 | head -c 75000000"
    for options in ([], ["--gather"]) if ALL else ([],):
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.run(
                [
                    *[sys.executable, "-c", program, str(tools.hostfile), "--hosts", "node1"],
                    *[*options, command],
                ],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=tools.environment,
                stdin=subprocess.DEVNULL,
                timeout=LIMIT_S,
            )
        assert process.returncode == 0, process.stderr
        assert int(process.stderr.split()[-1]) < 120_000
        assert ("149.0 MB more left out" in process.stderr) == bool(options)
        assert (tmp_path / "out").stat().st_size > (1_000_000 if options else 150_000_000)


def test_bytes_that_are_no_text_and_a_command_that_is_not_there(tools: Tools) -> None:
    arguments = [str(tools.hostfile), "--hosts", "node[1-2]"]
    for options, want in (
        ((), b"node1: a\0\377b\n"),
        (("--gather",), b"a\0\377b\n"),
        (("--json",), b'"a\\u0000\xef\xbf\xbdb\\n"'),
    ):
        argv = tools.argv("runclust", *arguments, *options, "printf 'a\\000\\377b\\n'")
        done = subprocess.run(
            argv,
            capture_output=True,
            env=tools.environment,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert want in done.stdout
    result = tools("runclust", *arguments, "nobody-has-this", "--help")
    assert result.returncode == 1
    assert "host node1: exit status 127 (command not found)" in result.stderr
    assert re.search(
        r"\nfailed: node\[1-2\]: exit status 127 \(command not found\) ", result.stderr
    )


def test_each_host_has_an_input_of_its_own(tools: Tools, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"of node{number}").write_text(f"{number}\n" * 100_000)
    arguments = [str(tools.hostfile), "--hosts", "node[1-2]", "--stdin-each"]
    result = tools("runclust", *arguments, f"{tmp_path}/of {{host}}", "uniq -c")
    assert result.returncode == 0, result.stderr
    assert sorted(line.split() for line in result.stdout.splitlines()) == [
        ["node1:", "100000", "1"],
        ["node2:", "100000", "2"],
    ]
    result = tools("runclust", *arguments, f"{tmp_path}/of {{host}}", "head -n 1")
    assert result.returncode == 0, result.stderr
    for pattern, message in [
        (f"{tmp_path}/no {{host}}", f"there is no file {tmp_path}/no node1, {tmp_path}/no node2"),
        (f"{tmp_path}/of node1", "has no {host}"),
    ]:
        result = tools("runclust", *arguments, pattern, "cat")
        assert result.returncode == 2
        assert message in result.stderr
    result = tools("runclust", *arguments, f"{tmp_path}/of {{host}}", "-n", "cat")
    assert (result.returncode, "--no-stdin none: give one" in result.stderr) == (2, True)


def set_lines(terminal: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", lines, 101, 0, 0))


def in_terminal(
    tools: Tools, host: str, command: str, answers: Mapping[bytes, bytes | int]
) -> tuple[int, bytes]:
    """Run a command with a terminal of 33 lines; return its status and output.

    ``answers``: what is typed when a text is shown, or the number of lines from then on.
    """
    argv = tools.argv("runclust", str(tools.hostfile), "--hosts", host, "--pty", command)
    pid, terminal = pty.fork()
    if pid == 0:
        set_lines(0, 33)
        os.environ.update(tools.environment)
        os.execv(argv[0], argv)
    waiting, shown = dict(answers), b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            shown += data
            for text in [text for text in waiting if text in shown]:
                answer = waiting.pop(text)
                if isinstance(answer, int):
                    set_lines(terminal, answer)
                else:
                    os.write(terminal, answer)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


@pytest.mark.parametrize("host", ["node1", pytest.param("localhost", marks=COSTLY)])
def test_a_command_has_the_terminal(tools: Tools, host: str, tmp_path: Path) -> None:
    if host == "localhost":
        (tmp_path / "hosts").write_text("localhost\n")
        tools = copy.copy(tools)
        tools.hostfile = tmp_path / "hosts"
    command = (
        "test -t 0 && stty size && read line && echo got:$line; trap 'echo caught' INT; "
        "trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.1; done"
    )
    answers: dict[bytes, bytes | int] = {b"33 101": b"words\n", b"ready": b"\x03", b"caught": 44}
    status, shown = in_terminal(tools, host, command, answers)
    assert b"got:words" in shown
    assert b"44 101" in shown, shown
    assert status == 3
    assert in_terminal(tools, host, "kill -9 $$", {})[0] == 128 + signal.SIGKILL
    if ALL:
        status, _ = in_terminal(tools, host, "echo ready; exec sleep 600", {b"ready": b"\x03"})
        assert status == 128 + signal.SIGINT


def test_a_terminal_is_for_one_host_and_a_plain_command(tools: Tools) -> None:
    for arguments, message in [
        (("--hosts", "node1", "--pty", "true"), "are no terminal here"),
        (("--pty", "true"), "--pty is for one host, not 8"),
        (("--hosts", "node1", "--pty", "--cwd", "/", "true"), "--pty does not go with --env"),
        (
            ("--hosts", "node1", "--pty", "-t", "3", "--json", "true"),
            "with --timeout, --json: leave",
        ),
    ]:
        result = tools("runclust", str(tools.hostfile), *arguments)
        assert result.returncode == 2
        assert message in result.stderr


def test_no_password_is_ever_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "sshd"
    folder.mkdir()
    settings = private_sshd.BY_PASSWORD + "KbdInteractiveAuthentication yes\n"
    server = private_sshd.Sshd(folder, settings=settings)
    asking = Tools(server, tmp_path)
    try:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(asking.environment)
            argv = asking.argv("runclust", str(asking.hostfile), "--hosts", "node1", "true")
            os.execv(argv[0], argv)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal tells that nobody writes any more
            while data := os.read(terminal, 4096):
                shown += data
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(status) == 1
        assert b"refused to log in user" in shown
        assert b"'password'" in shown
        assert b"checkclust HOSTFILE --bootstrap" in shown
        for tool in (("copyclust", "/etc/hostname", "/none/x"), ("killclust", "--run", "x")):
            result = asking(tool[0], str(asking.hostfile), *tool[1:], "--hosts", "node1")
            assert result.returncode == 1
            assert "host node1" in result.stderr
            assert "refused to log in user" in result.stderr
    finally:
        server.stop()


def test_a_reader_that_goes_away_ends_it(tools: Tools) -> None:
    process = subprocess.Popen(
        tools.argv("runclust", str(tools.hostfile), "--hosts", "node[1-2]", "echo $$; yes"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=tools.environment,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        word = process.stdout.readline().split()[1]
        pids += [int(word)] if word.isdigit() else []
    process.stdout.close()
    assert process.wait(LIMIT_S) == 1
    until(lambda: not any(map(is_alive, pids)), "the commands' end")
