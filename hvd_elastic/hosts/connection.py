"""Interface of a connection to a host, over ssh or on this machine."""

from __future__ import annotations

import contextlib
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import Command, RemoteProcess, Result, Sink, collect

if TYPE_CHECKING:
    from typing_extensions import Self

# Time without progress after which a host is asked whether it still answers.
ASK_AFTER_S = 3.0


@dataclass(frozen=True)
class SshOptions:
    """Options for connecting to hosts.

    Attributes:
        config_path: ssh configuration to use exclusively, as with ``ssh -F``; None for the user's
            and the system's.
        connect_timeout_s: limit for name lookup, TCP connect, key exchange and authentication
            together [s].
        identity: private key file to try first.
        password: password to try if no key is accepted; jump hosts do not get it.
    """

    config_path: Path | None = None
    connect_timeout_s: float = 10.0
    identity: Path | None = None
    password: str | None = field(default=None, repr=False)


class Connection(ABC):
    """A host to which commands can be sent, over ssh or on this machine.

    Attributes:
        host: the host, as in the hostfile.
        peer_address: address of the host as seen from here; None if reached through a jump host.
        python: interpreter to use there, if the host itself has named one.
    """

    host: Host
    peer_address: str | None = None
    python: str | None = None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the connection is known to be lost."""

    def answers(self) -> bool:
        """Return whether the host answers; if it does not, close the connection.

        It may take as long as the host takes to answer.
        """
        return self.alive

    @property
    def files(self) -> Connection:
        """Return the connection over which whole files of the host are best read and written.

        Raises:
            SshError: as in :meth:`start`.
        """
        return self

    @abstractmethod
    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        """Start a command in the user's home folder, in a session of its own.

        Args:
            command: a list of words, which are quoted for the shell; or shell text, used unchanged.
            on_stderr: called with each piece of stderr, in a thread of the process.
            on_stdout: same for stdout; the ``stdout`` of the process is then empty.

        Raises:
            SshError: the connection is lost or the host refuses another session.
        """

    def start_python(
        self, argv: Sequence[str], on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        """Start a Python interpreter with as few processes as possible.

        Args:
            argv: the interpreter and its options up to ``-c``, the program as one line, and its
                arguments.
            on_stderr, on_stdout: as in :meth:`start`.

        Raises:
            SshError: as in :meth:`start`.
        """
        return self.start(f"exec {shlex.join(argv)}", on_stderr, on_stdout)

    def run(
        self, command: Command, timeout_s: float | None = None, stdin: bytes | None = None
    ) -> Result:
        """Run a command until it ends; an exit status other than 0 does not raise an error.

        Raises:
            CommandTimeoutError: it did not end in time, and was sent TERM, then KILL.
            SshError: as in :meth:`start`.
        """
        return collect(lambda on_stderr: self.start(command, on_stderr), timeout_s, stdin)

    @abstractmethod
    def close(self) -> None:
        """Close the connection; commands still running read the end of their input."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def watched(connection: Connection, progress: Callable[[], int]) -> Iterator[None]:
    """Close the connection, which ends all waits for it, once the host does not answer any more.

    Args:
        progress: returns a number that grows as long as data arrive; the host is not asked then.
    """
    ended = threading.Event()

    def watch() -> None:
        seen = 0
        while not ended.wait(ASK_AFTER_S):
            before, seen = seen, progress()
            if seen == before and not connection.answers():
                return

    threading.Thread(target=watch, name=f"watch {connection.host.name}", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Engine(Protocol):
    """A source of hosts, and a way to reach them.

    The engine writes the hosts that it has to the hostfile of the run, and writes it again when
    hosts come and go (a new file that replaces the old one); the leader reads it as any other.
    """

    def connect(self, host: Host) -> Connection:
        """Return a connection to a host that the engine has written; may block.

        Raises:
            SshError: the host cannot be reached; its message says why.
        """

    def address_towards(self, hosts: list[Host]) -> str:
        """Return the address by which ``hosts`` reach the machine of the leader."""
