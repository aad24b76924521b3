"""Start the first process of a virtual host, exchange a few lines, and leave it running."""

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

# Interval at which a starting sshd is tried.
POLL_S = 0.01
_UP_S = 10.0
"""How long a process may take to say that it is ready [s]."""
_TOLD_LINES = 4  # of a log in a message

# Keeps references to processes that outlive their holder, so that they can be reaped and Popen does
# not warn of them.
_started: list[subprocess.Popen[bytes]] = []


def plain_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a minimal environment with ``extra`` added, independent of the caller's."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **extra}


class Holder:
    """A process in its own session that exchanges a few lines with the caller when it starts.

    Args:
        argv: command line.
        environment: complete environment of the process.
        log: file for its standard error.
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
                # Ctrl-C in the terminal is for the caller, who then removes the cluster.
                start_new_session=True,
            )
        self._heard = b""
        _started.append(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, word: str, what: str) -> None:
        """Wait until the process prints the line ``word``; ``what`` names it in errors."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + _UP_S
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise VirtualClusterError(
                    f"{what} gave no sign of life for {_UP_S:g} s.{last_lines(self.log)}"
                )
            chunk = os.read(descriptor, 4096)
            if not chunk:
                raise VirtualClusterError(f"{what} could not be made.{last_lines(self.log)}")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        assert line.decode() == word, f"{what} said {line!r} instead of {word!r}"

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        # If the process is dead, expect() reports the reason from its log.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Close the pipes to the process and leave it running."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def last_lines(log: Path) -> str:
    """Return the last lines of a log as part of a message; "" if there are none."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-_TOLD_LINES:]
    except OSError:
        return ""
    return f" It said: {'; '.join(lines)}" if lines else ""


def wait_for_sshd(address: str, port: int, what: str, log: Path) -> None:
    """Wait until an sshd sends its greeting at this address."""
    deadline = time.monotonic() + _UP_S
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
    """Wait until the hosts' first processes are ready and their sshd accept connections.

    Args:
        cluster: folder of the cluster.
        started: hosts and their first processes, whose pipes are closed.
    """
    for host, holder in started:
        holder.expect("ready", f"host {host.name}")
        holder.let_go()
    for host, _ in started:
        log = cluster / "hosts" / host.name / "sshd.log"
        wait_for_sshd(host.address, host.port, f"host {host.name}", log)


def reap_started() -> None:
    """Reap the processes started here that have ended."""
    for process in list(_started):
        if process.poll() is not None:
            _started.remove(process)
