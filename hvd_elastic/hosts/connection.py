"""What a connection to a host offers, whether over ssh or on this machine."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import Command, RemoteProcess, Result, Sink, collect

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SshOptions:
    """How to connect.

    Attributes:
        config_path: an ssh configuration to use alone, as ``ssh -F``; None: the user's and the
            system's.
        connect_timeout_s: name lookup, TCP, key exchange and authentication together.
        identity: a private key file to try first.
        password: tried where no key is taken.
    """

    config_path: Path | None = None
    connect_timeout_s: float = 10.0
    identity: Path | None = None
    password: str | None = field(default=None, repr=False)


class Connection(ABC):
    """A host that commands can be sent to, over ssh or on this machine.

    Attributes:
        host: the host as the hostfile has it.
        peer_address: the host's address as seen from here; None through a jump host.
    """

    host: Host
    peer_address: str | None = None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the connection is known to be gone."""

    @abstractmethod
    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        """Starts a command in the user's home folder, in a session of its own.

        Args:
            command: a list is quoted for the shell; a string is shell text as it is.
            on_stderr: called with each piece of stderr, in a thread of the process.
            on_stdout: likewise; ``stdout`` of the process then holds nothing.

        Raises:
            SshError: the connection is gone or the host refuses another session.
        """

    def start_python(
        self, argv: Sequence[str], on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        """Starts an interpreter with as few processes as can be.

        Args:
            argv: its words up to ``-c``, the program in one line, its arguments.
            on_stderr, on_stdout: as of :meth:`start`.

        Raises:
            SshError: as :meth:`start`.
        """
        return self.start(f"exec {shlex.join(argv)}", on_stderr, on_stdout)

    def run(
        self, command: Command, timeout_s: float | None = None, stdin: bytes | None = None
    ) -> Result:
        """Runs a command to its end; a status other than 0 is no error here.

        Raises:
            CommandTimeoutError: it did not end in time; it got TERM, then KILL.
            SshError: as :meth:`start`.
        """
        return collect(lambda on_stderr: self.start(command, on_stderr), timeout_s, stdin)

    @abstractmethod
    def close(self) -> None:
        """Ends the connection; commands still running read the end of their input."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
