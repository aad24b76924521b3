"""Starts the process of an agent on its host, moves files there, and says why it has ended."""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import Connection
from hvd_elastic.hosts.transfer import receive_file, send_file

_DISCARD_TIMEOUT_S = 10.0
"""Time limit for removing a folder of a host [s]; deleting many files may take seconds."""
# The last line of Python's traceback when a host lacks a package.
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: .*'(?P<name>[\w.]+)'")

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit statuses of a shell for a program that does not run, and for one that is not there."""

Connect = Callable[[Host], Connection]


def agent_command(python: str) -> str:
    """Return the command that starts an agent with this interpreter.

    Every user of the host can read it, so the training command and the environment are sent through
    stdin. It leaves the home folder, from which Python would import what has the name of a module.
    """
    return f"cd / && exec {shlex.quote(python)} -m hvd_elastic.agent.agent"


class AgentProcess:
    """The process of the agent of one host; all methods may block.

    Args:
        connect: returns a connection to the host, or raises SshError.
    """

    def __init__(
        self, host: Host, connect: Connect, python: str, logins: threading.Semaphore
    ) -> None:
        self.host = host
        self.python = python
        self._connect = connect
        self._logins = logins
        self._connection: Connection | None = None
        self._process: Any = None

    def start(self, on_stdout: Callable[[bytes], None]) -> Any:
        """Start it; return its input.

        Args:
            on_stdout: called with each piece of its output; EOFError: it takes no more.

        Raises:
            SshError: it cannot be started.
        """
        with self._logins:
            self._connection = self._connect(self.host)
        self.python = self._connection.python or self.python
        self._process = self._connection.start(agent_command(self.python), on_stdout=on_stdout)
        return self._process.stdin

    @property
    def has_begun(self) -> bool:
        """Return whether the host could be logged in to, and the agent's program was started."""
        return self._process is not None

    def wait_for_end(self) -> None:
        """Wait until it writes no more: it has ended, or ``on_stdout`` takes no more."""
        self._process.stdout.read()  # all of it is taken, so this waits for the end

    def close(self) -> None:
        """Close its input and output, and the connection."""
        if self._process is not None:
            self._process.close()
        if self._connection is not None:
            self._connection.close()

    # -- files -----------------------------------------------------------------------------

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Read a file of the host and pass its content to ``write`` in pieces.

        Raises:
            SshError: the file cannot be read.
        """
        receive_file(self._connected().files, remote, write)

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host.

        Raises:
            SshError: the file could not be copied.
        """
        send_file(self._connected().files, local, remote)

    def discard(self, remote: str) -> None:
        """Remove a folder of the host.

        Raises:
            SshError: the command could not be run on the host.
        """
        self._connected().files.run(["rm", "-rf", "--", remote], timeout_s=_DISCARD_TIMEOUT_S)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise SshError(f"host {self.host.name}: no connection")
        return self._connection

    # -- why it has ended ------------------------------------------------------------------

    def why_ended(self) -> str:
        """Return why an agent that has answered is gone."""
        if self._connection is not None and not self._connection.alive:
            return "its connection broke"
        self._process.wait_drained(1.0)
        last = self._last_line()
        return f"the agent ended{': ' + last if last else ''}"

    def why_not_started(self) -> tuple[str, bool]:
        """Return why the agent ended without a hello, and whether another attempt is useless."""
        name = self.host.name
        try:
            status = self._process.wait(5.0)
            self._process.wait_drained(1.0)
        except TimeoutError:
            status = None
        last = self._last_line() or f"exit status {status}"
        missing = _MISSING_MODULE.search(self._tail())
        if missing is not None and missing["name"].startswith("hvd_elastic"):
            cause = (
                f"host {name}: {self.python} has no package hvd_elastic. Install it there, "
                "as 'hvd-elastic install HOSTFILE' does, or name another interpreter with --python."
            )
            return cause, True
        if status == _NOT_FOUND:
            cause = (
                f"host {name} has no Python at {self.python} ({last}). Install it there, "
                "as 'hvd-elastic install HOSTFILE' does, or name another one with --python."
            )
            return cause, True
        if status == _NOT_EXECUTABLE:
            cause = (
                f"host {name}: {self.python} is there and does not run ({last}): it was made for "
                "another kind of processor, or is not whole. 'hvd-elastic install HOSTFILE' finds "
                "out; --python names another one."
            )
            return cause, True
        if status == os.EX_NOPERM:
            return f"host {name}: {last}", True
        if missing is not None:
            cause = (
                f"host {name}: the agent cannot start: {last}. The environment of {self.python} is "
                "not whole there, or that Python was updated: 'hvd-elastic install HOSTFILE' "
                "brings what is missing."
            )
            return cause, True
        return f"host {name}: the agent did not start: {last}", False

    def _tail(self) -> str:
        tail: bytes = self._process.stderr_tail
        return tail.decode(errors="replace").strip()

    def _last_line(self) -> str:
        return next(iter(reversed(self._tail().splitlines())), "")
