"""Connection to this machine as a host of a cluster, without ssh."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal as signals
import subprocess
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hvd_elastic.errors import SshError
from hvd_elastic.hosts.account import command_shell
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import Command, RemoteProcess, Sink, as_command, has_room


class ProgramConnection(Connection):
    """A host of which each command is a program on this machine, or is carried by one."""

    error: ClassVar[type[SshError]] = SshError
    """Raised where a command cannot be started."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._processes: list[PopenEnds] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed

    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        if self._closed:
            raise self.error(f"host {self.host.name}: the connection is closed")
        command = as_command(command)
        try:
            ends = self.start_shell(command)
        except SshError as error:
            raise self.error(f"host {self.host.name}: {error}") from error
        self._processes = [known for known in self._processes if not known.ended] + [ends]
        return RemoteProcess(ends, command, self.host.name, on_stderr, on_stdout)

    @abstractmethod
    def start_shell(self, command: str) -> PopenEnds:
        """Start the program for a shell command.

        Raises:
            SshError: it cannot be started.
        """

    def close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.close()


class LocalConnection(ProgramConnection):
    """This machine as a host: runs commands without ssh, in the way sshd would."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.peer_address = "::1" if host.name == "::1" else "127.0.0.1"

    def start_shell(self, command: str) -> PopenEnds:
        account = pwd.getpwuid(os.getuid())
        folder = account.pw_dir if Path(account.pw_dir).is_dir() else "/"
        # As sshd does: the user's shell, in the home folder, in a new session.
        argv = [command_shell(account), "-c", command]
        return PopenEnds(start_here(argv, cwd=folder), self.host.name)


def start_here(
    argv: Sequence[str], *, cwd: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program on this machine, in a session of its own, with three pipes.

    Args:
        argv: the program and its arguments.
        cwd: its working directory.
        env: its environment; None: that of this process.

    Raises:
        SshError: it cannot be started.
    """
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise SshError(f"{argv[0]} cannot be started: {error}") from error


class PopenEnds:
    """Pipes of a command on this machine.

    Args:
        popen: the command, started with three pipes in a session of its own.
        host: name of the host that it runs on, or connects to.
    """

    def __init__(self, popen: subprocess.Popen[bytes], host: str) -> None:
        assert popen.stdin is not None, "started with three pipes"
        assert popen.stdout is not None, "started with three pipes"
        assert popen.stderr is not None, "started with three pipes"
        self._popen = popen
        self._stdin, self._stdout, self._stderr = popen.stdin, popen.stdout, popen.stderr
        self._ended = threading.Event()
        # Reaps the process even if nobody waits; several threads can wait with timeouts.
        threading.Thread(target=self._reap, name=f"process on {host}", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def read_stdout(self, size: int) -> bytes:
        return self._read(self._stdout, size)

    def read_stderr(self, size: int) -> bytes:
        return self._read(self._stderr, size)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._stdin.write(view) :]
        except ValueError as error:
            raise BrokenPipeError("the command's input is closed") from error

    def is_ready(self) -> bool:
        try:
            return has_room(self._stdin.fileno())
        except ValueError:  # it is closed
            return False

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait(self, timeout: float | None) -> int | None:
        if not self._ended.wait(timeout):
            return None
        code = self._popen.returncode
        return 128 - code if code < 0 else code

    def signal(self, name: str) -> None:
        if not self.ended:
            # It is the leader of its session, so its process group has the same id.
            os.killpg(self._popen.pid, signals.Signals[f"SIG{name}"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _read(self, pipe: Any, size: int) -> bytes:
        data: bytes = pipe.read(size)
        if not data:
            pipe.close()
        return data

    def _reap(self) -> None:
        self._popen.wait()
        self._ended.set()
