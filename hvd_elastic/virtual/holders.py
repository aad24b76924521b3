"""Long-lived processes that hold up a virtual host: started, heard, and left to themselves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_elastic.errors import VirtualClusterError
from hvd_elastic.virtual.state import HostState

POLL_S = 0.01

# Processes that outlive their handle here; Popen would warn of them, and nobody would reap them.
_started: list[subprocess.Popen[bytes]] = []


def plain_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What a machine's first process has, and no more: nothing of the caller's stays behind."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **extra}


class Holder:
    """A process in a session of its own, with which a few lines are exchanged at its start.

    Args:
        argv: the command.
        environment: all of its environment.
        log: file that takes its standard error.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                # Ctrl-C on the terminal is for the caller, who then takes everything down.
                start_new_session=True,
            )
        self._heard = b""
        _started.append(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, word: str, what: str, timeout_s: float = 10.0) -> None:
        """Wait until it prints this line."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise VirtualClusterError(
                    f"{what} gave no sign of life for {timeout_s:g} s.{last_lines(self.log)}"
                )
            chunk = os.read(descriptor, 4096)
            if not chunk:
                raise VirtualClusterError(f"{what} could not be made.{last_lines(self.log)}")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        assert line.decode() == word, f"{what} said {line!r} instead of {word!r}"

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        # When it is dead, the reason is in its log; expect() reports it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Leave it running; nothing is said any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def last_lines(log: Path, count: int = 4) -> str:
    """The end of a log, as part of a message; "" when there is nothing."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-count:]
    except OSError:
        return ""
    return f" It said: {'; '.join(lines)}" if lines else ""


def wait_for_sshd(address: str, port: int, what: str, log: Path, timeout_s: float = 10.0) -> None:
    """Wait until an sshd greets at this address."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=1.0) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise VirtualClusterError(
                f"sshd of {what} does not answer at {address}:{port}.{last_lines(log)}"
            )
        time.sleep(POLL_S)


def wait_until_up(cluster: Path, started: Sequence[tuple[HostState, Holder]]) -> None:
    """Wait until the hosts' first processes are ready and their sshd take logins.

    Args:
        cluster: the cluster's folder.
        started: hosts with their first processes, which are let go.
    """
    for host, holder in started:
        holder.expect("ready", f"host {host.name}")
        holder.let_go()
    for host, _ in started:
        log = cluster / "hosts" / host.name / "sshd.log"
        wait_for_sshd(host.address, host.port, f"host {host.name}", log)


def reap_started() -> None:
    """Take the exit status of what has ended of the processes started here."""
    for process in list(_started):
        if process.poll() is not None:
            _started.remove(process)
