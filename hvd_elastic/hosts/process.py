"""A command on a host, as a process with pipes: the same over ssh and on this machine.

Two threads of each process empty its stdout and stderr into memory, so a caller that writes much
before it reads, or never reads stderr, does not hang. ssh makes this necessary: stdout and stderr
share one flow-control window, and a full window stops stdin too.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_elastic.errors import SshError

# What a process may have written that nobody has read yet; beyond that it is stopped, as by a pipe.
BUFFER_BYTES = 64 * 1024 * 1024
STDERR_TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 64 * 1024
# A background child may hold the pipes open after the command ended; what comes within this time
# after the end still belongs to the result.
STRAGGLER_S = 2.0
TERMINATE_GRACE_S = 2.0

Command = str | Sequence[str]
Sink = Callable[[bytes], None] | None
"""What is given each piece of a command's output."""


class CommandTimeoutError(SshError):
    """A command did not end in time; ``stdout`` and ``stderr`` hold what it had written."""

    def __init__(self, message: str, stdout: bytes, stderr: bytes) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class Result:
    """How a command ended.

    Attributes:
        exit_status: 128 + N after signal N on this machine; -1 when the host told none (a signal).
        stdout, stderr: all it wrote.
        seconds: from start to end.
    """

    exit_status: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.exit_status == 0

    @property
    def text(self) -> str:
        """Stdout as text without the last line end."""
        return self.stdout.decode("utf-8", errors="replace").removesuffix("\n")


class ProcessEnds(Protocol):
    """The five things a transport must do for a process; reads return b"" at the end."""

    def read_stdout(self, size: int) -> bytes: ...
    def read_stderr(self, size: int) -> bytes: ...
    def write(self, data: bytes) -> None: ...
    def close_stdin(self) -> None: ...
    def wait(self, timeout: float | None) -> int | None: ...
    def signal(self, name: str) -> None: ...
    def close(self) -> None: ...


def as_command(command: Command) -> str:
    """One shell command line; a list is quoted, a string is the caller's own shell text.

    >>> as_command(["echo", "a b", "$HOME"])
    "echo 'a b' '$HOME'"
    """
    return command if isinstance(command, str) else shlex.join(command)


class ByteStream:
    """Bytes that a thread puts in and a caller takes out, by line or by chunk."""

    def __init__(self, limit: int = BUFFER_BYTES) -> None:
        self._limit = limit
        self._data = bytearray()
        self._searched = 0
        self._ended = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> None:
        """Adds bytes; waits while more than the limit stand unread."""
        with self._changed:
            while len(self._data) >= self._limit and not self._ended:
                self._changed.wait()
            if not self._ended:
                self._data += data
                self._changed.notify_all()

    def end(self) -> None:
        """No more will come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def read(self, size: int = -1, timeout: float | None = None) -> bytes:
        """All until the end, or what there is up to ``size`` (b"" at the end).

        Raises:
            TimeoutError: nothing came in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._ended or (size >= 0 and bool(self._data)), timeout
            ):
                raise TimeoutError
            return self._take(len(self._data) if size < 0 else min(size, len(self._data)))

    def readline(self, timeout: float | None = None) -> bytes:
        """The next line with its line end; b"" at the end.

        Raises:
            TimeoutError: no line came in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_line, timeout):
                raise TimeoutError
            end = self._data.find(b"\n", self._searched)
            return self._take(len(self._data) if end < 0 else end + 1)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _has_line(self) -> bool:
        if self._data.find(b"\n", self._searched) >= 0:
            return True
        self._searched = len(self._data)
        # A line longer than the buffer comes in pieces rather than never.
        return self._ended or len(self._data) >= self._limit

    def _take(self, count: int) -> bytes:
        data = bytes(self._data[:count])
        del self._data[:count]
        self._searched = 0
        self._changed.notify_all()
        return data


class _Stdin:
    """The way in; every write is sent at once."""

    def __init__(self, ends: ProcessEnds) -> None:
        self._ends = ends
        self._lock = threading.Lock()

    def write(self, data: bytes) -> int:
        """Sends all of it, waiting while the process does not read.

        Raises:
            BrokenPipeError: the process or the connection is gone.
        """
        with self._lock:
            self._ends.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back; here so that it can stand where a file does."""

    def close(self) -> None:
        """The process reads the end of its input."""
        with contextlib.suppress(OSError, EOFError):
            self._ends.close_stdin()


class RemoteProcess:
    """A running command.

    Attributes:
        command: the shell command line.
        host: where it runs.
        stdin: ``write(bytes)``, ``flush()``, ``close()``.
        stdout: iterate over lines (bytes), or ``readline(timeout)``, ``read(size, timeout)``;
            empty where a callback takes it.
        stderr_tail: the last 64 KiB of stderr, whether or not somebody listens.
    """

    def __init__(
        self,
        ends: ProcessEnds,
        command: str,
        host: str,
        on_stderr: Sink = None,
        on_stdout: Sink = None,
    ) -> None:
        self.command = command
        self.host = host
        self.stdin = _Stdin(ends)
        self.stdout = ByteStream()
        self._tail = bytearray()
        self._ends = ends
        self._on_stderr = on_stderr
        self._on_stdout = on_stdout or self.stdout.put
        self._pumps = [
            threading.Thread(target=self._pump_stdout, name=f"stdout of {host}", daemon=True),
            threading.Thread(target=self._pump_stderr, name=f"stderr of {host}", daemon=True),
        ]
        for pump in self._pumps:
            pump.start()

    @property
    def stderr_tail(self) -> bytes:
        return bytes(self._tail)

    @property
    def last_line(self) -> str:
        """The last line of stderr, which mostly says why a command failed; "" if there is none."""
        lines = self._tail.decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; 128 + N after signal N on this machine, -1 when the host told none.

        Over ssh -1 means ended by a signal, or the connection was lost.

        Raises:
            TimeoutError: it still runs.
        """
        status = self._ends.wait(timeout)
        if status is None:
            raise TimeoutError(f"'{self.command}' on {self.host} still runs after {timeout} s")
        return status

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Whether all output has arrived (a background child can hold a pipe open)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pump in self._pumps:
            pump.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(pump.is_alive() for pump in self._pumps)

    def signal(self, name: str) -> None:
        """Sends TERM, KILL, INT, … to the command's process group, if it can still be reached."""
        # paramiko's errors are no OSErrors; a host that is gone needs no signal.
        with contextlib.suppress(Exception):
            self._ends.signal(name)

    def close(self) -> None:
        """Lets go of it: it reads the end of its input and cannot write any more.

        It is not killed: call :meth:`signal` for that, or :meth:`stop` for both.
        """
        self._ends.close()
        self.stdout.end()

    def stop(self, grace_s: float = TERMINATE_GRACE_S) -> bool:
        """TERM, ``grace_s``, KILL, then :meth:`close`; never longer than 3 x ``grace_s``.

        Returns:
            Whether it is known to have ended; a host that does not answer cannot say.
        """

        def ask() -> None:
            for name in ("TERM", "KILL"):
                self.signal(name)
                with contextlib.suppress(TimeoutError):
                    self.wait(grace_s)
                    return

        # A cut connection can hold a send back for minutes; closing it sets the thread free.
        asking = threading.Thread(target=ask, name=f"stop on {self.host}", daemon=True)
        asking.start()
        asking.join(3 * grace_s)
        ended = self._ends.wait(0) is not None
        self.close()
        return ended

    def _pump_stdout(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while data := self._ends.read_stdout(CHUNK_BYTES):
                self._on_stdout(data)
        self.stdout.end()

    def _pump_stderr(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while data := self._ends.read_stderr(CHUNK_BYTES):
                self._tail += data
                del self._tail[:-STDERR_TAIL_BYTES]
                if self._on_stderr is not None:
                    self._on_stderr(data)


def collect(
    start: Callable[[Callable[[bytes], None]], RemoteProcess],
    timeout_s: float | None,
    stdin: bytes | None = None,
) -> Result:
    """Starts a command, feeds it, waits for its end and gathers what it wrote.

    Args:
        start: starts it with the stderr callback it is given.
        timeout_s: most seconds it may run; None waits for ever.
        stdin: what it reads; None is an empty input.

    Raises:
        CommandTimeoutError: it did not end in time; it was stopped.
        SshError: it could not be started.
    """
    started = time.monotonic()
    out, err = bytearray(), bytearray()
    process = start(err.extend)

    def feed() -> None:
        # A command may end without reading all its input (head); that is no failure.
        with contextlib.suppress(OSError, EOFError):
            if stdin:
                process.stdin.write(stdin)
        process.stdin.close()

    def gather() -> None:
        while chunk := process.stdout.read(1 << 20):
            out.extend(chunk)

    feeder = threading.Thread(target=feed, name=f"stdin of {process.host}", daemon=True)
    gatherer = threading.Thread(target=gather, name=f"result of {process.host}", daemon=True)
    feeder.start()
    gatherer.start()
    try:
        status = process.wait(timeout_s)
    except TimeoutError:
        ended = process.stop()
        advice = (
            "and was stopped. Give it more time with --timeout"
            if ended
            else "and cannot be stopped: the host does not answer. It may still run there"
        )
        raise CommandTimeoutError(
            f"host {process.host}: '{_shorten(process.command)}' did not end within "
            f"{timeout_s:g} s {advice}",
            bytes(out),
            bytes(err),
        ) from None
    except BaseException:
        process.stop()
        raise
    seen = len(out) + len(err)
    while not process.wait_drained(STRAGGLER_S) and seen != len(out) + len(err):
        seen = len(out) + len(err)
    process.close()
    gatherer.join()
    return Result(status, bytes(out), bytes(err), time.monotonic() - started)


def _shorten(text: str, limit: int = 80) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
