"""What a connection to a host offers, whether over ssh or on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import RemoteProcess, Result, collect

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SshOptions:
    """How to connect.

    Attributes:
        config_path: an ssh configuration to use alone, as ``ssh -F``; None: the user's and the
            system's.
        connect_timeout_s: name lookup, TCP, key exchange and authentication together.
        known_hosts_files: read besides those of the configuration and the project's own.
        identity: a private key file to try first.
        keepalive_s: seconds between keepalives on an idle connection.
        silence_timeout_s: unanswered for so long, the connection counts as lost.
        password: tried where no key is taken.
    """

    config_path: Path | None = None
    connect_timeout_s: float = 10.0
    known_hosts_files: tuple[Path, ...] = ()
    identity: Path | None = None
    keepalive_s: int = 15
    silence_timeout_s: float = 60.0
    password: str | None = field(default=None, repr=False)


class Connection(Protocol):
    """A host that commands can be sent to.

    Attributes:
        host: the host as the hostfile has it.
        peer_address: the host's address as seen from here; None through a jump host.
    """

    host: Host
    peer_address: str | None

    @property
    def alive(self) -> bool:
        """False once the connection is known to be gone."""

    def start(
        self,
        argv_or_command: str | Sequence[str],
        on_stderr: Callable[[bytes], None] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> RemoteProcess:
        """Starts a command in the user's home folder, in a session of its own.

        Args:
            argv_or_command: a list is quoted for the shell; a string is shell text as it is.
            on_stderr: called with each piece of stderr, in a thread of the process.
            on_stdout: likewise; ``stdout`` of the process then holds nothing.

        Raises:
            SshError: the connection is gone or the host refuses another session.
        """

    def start_python(
        self,
        argv: Sequence[str],
        on_stderr: Callable[[bytes], None] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> RemoteProcess:
        """Starts an interpreter with as few processes as can be.

        Args:
            argv: its words up to ``-c``, the program in one line, its arguments.
            on_stderr, on_stdout: as of :meth:`start`.

        Raises:
            SshError: as :meth:`start`.
        """

    def run(
        self,
        argv_or_command: str | Sequence[str],
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Result:
        """Runs a command to its end; a status other than 0 is no error here.

        Raises:
            CommandTimeoutError: it did not end in time; it got TERM, then KILL.
            SshError: as :meth:`start`.
        """

    def close(self) -> None:
        """Ends the connection; commands still running read the end of their input."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ConnectionBase:
    """What is the same over ssh and on this machine."""

    host: Host
    peer_address: str | None = None

    def start(
        self,
        argv_or_command: str | Sequence[str],
        on_stderr: Callable[[bytes], None] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> RemoteProcess:
        raise NotImplementedError

    def start_python(
        self,
        argv: Sequence[str],
        on_stderr: Callable[[bytes], None] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> RemoteProcess:
        return self.start(f"exec {shlex.join(argv)}", on_stderr, on_stdout)

    def run(
        self,
        argv_or_command: str | Sequence[str],
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Result:
        return collect(lambda on_stderr: self.start(argv_or_command, on_stderr), timeout_s, stdin)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
