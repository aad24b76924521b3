"""A command on a host as a process with pipes, the same over ssh and on this machine.

Two threads for each process read its stdout and stderr into memory. So a caller that writes a lot
before it reads, or never reads stderr, does not block. Over ssh this is essential: stdout and
stderr share one flow-control window, and when it is full, stdin stops as well.
"""

from __future__ import annotations

import contextlib
import select
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_elastic.errors import SshError

# Maximum output that is kept unread; beyond it the process blocks, as with a full pipe.
BUFFER_BYTES = 64 * 1024 * 1024
STDERR_TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 64 * 1024
_TOLD_LENGTH = 80  # of a command in a message
# A background child may keep the pipes open after the command has ended. Output that arrives within
# this time still belongs to the result.
STRAGGLER_S = 2.0
_DRAIN_PARTS = 10
# Time between TERM and KILL.
TERMINATE_GRACE_S = 2.0
# Maximum wait for a busy host at each step of sending a signal.
SIGNAL_S = 10.0

Command = str | Sequence[str]
Sink = Callable[[bytes], None] | None
"""Callback that receives each piece of a command's output."""


class CommandTimeoutError(SshError):
    """A command did not end in time; ``stdout`` and ``stderr`` are its output until then."""

    def __init__(self, message: str, stdout: bytes, stderr: bytes) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class Result:
    """Result of a command that has ended.

    Attributes:
        exit_status: exit status; after signal N 128 + N on this machine, -1 over ssh.
        stdout, stderr: its complete output.
        seconds: duration [s].
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
        """Stdout as text, without the last line break."""
        return self.stdout.decode("utf-8", errors="replace").removesuffix("\n")


class ProcessEnds(Protocol):
    """Operations that a transport provides for a process; reads return b"" at the end."""

    def read_stdout(self, size: int) -> bytes: ...
    def read_stderr(self, size: int) -> bytes: ...
    def write(self, data: bytes) -> None: ...
    def is_ready(self) -> bool: ...
    def close_stdin(self) -> None: ...
    def wait(self, timeout: float | None) -> int | None: ...
    def signal(self, name: str) -> None: ...
    def close(self) -> None: ...


def has_room(descriptor: int) -> bool:
    """Return whether the kernel's buffer of a pipe or socket has room for more."""
    looking = select.poll()
    looking.register(descriptor, select.POLLOUT)
    return bool(looking.poll(0))


def as_command(command: Command) -> str:
    """Return one shell command line; the words of a list are quoted, a string stays unchanged.

    >>> as_command(["echo", "a b", "$HOME"])
    "echo 'a b' '$HOME'"
    """
    return command if isinstance(command, str) else shlex.join(command)


class ByteStream:
    """Buffer that one thread fills and another reads, by line or by chunk."""

    def __init__(self, limit: int = BUFFER_BYTES) -> None:
        self._limit = limit
        self._data = bytearray()
        self._searched = 0
        self._ended = self._ends_when_full = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> None:
        """Append bytes; blocks while the limit of unread bytes is reached."""
        with self._changed:
            while len(self._data) >= self._limit and not self._ended:
                if self._ends_when_full:
                    self.mark_end()
                else:
                    self._changed.wait()
            if not self._ended:
                self._data += data
                self._changed.notify_all()

    def end_when_full(self) -> None:
        """End, from now on, where :meth:`put` would block."""
        with self._changed:
            self._ends_when_full = True
            self._changed.notify_all()

    def mark_end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def read(self, size: int = -1, timeout: float | None = None) -> bytes:
        """Return everything until the end, or up to ``size`` available bytes; b"" at the end.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._ended or (size >= 0 and bool(self._data)), timeout
            ):
                raise TimeoutError
            return self._take_bytes(len(self._data) if size < 0 else min(size, len(self._data)))

    def readline(self, timeout: float | None = None) -> bytes:
        """Return the next line with its line break; b"" at the end.

        Raises:
            TimeoutError: no line arrived in time.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_line, timeout):
                raise TimeoutError
            end = self._data.find(b"\n", self._searched)
            return self._take_bytes(len(self._data) if end < 0 else end + 1)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _has_line(self) -> bool:
        if self._data.find(b"\n", self._searched) >= 0:
            return True
        self._searched = len(self._data)
        # A line longer than the buffer is returned in pieces, because it would block forever.
        return self._ended or len(self._data) >= self._limit

    def _take_bytes(self, count: int) -> bytes:
        data = bytes(self._data[:count])
        del self._data[:count]
        self._searched = 0
        self._changed.notify_all()
        return data


class _Stdin:
    """Input of a process, unbuffered."""

    def __init__(self, ends: ProcessEnds) -> None:
        self._ends = ends
        self._lock = threading.Lock()

    def write(self, data: bytes) -> int:
        """Send all of the data; blocks while the process does not read.

        Raises:
            BrokenPipeError: the process or the connection is gone.
        """
        with self._lock:
            self._ends.write(data)
        return len(data)

    def is_ready(self) -> bool:
        """Return whether 4 KB can be written without waiting, if nobody else writes."""
        return not self.is_in_use and self._ends.is_ready()

    @property
    def is_in_use(self) -> bool:
        """Whether a thread is writing to it."""
        return self._lock.locked()

    def flush(self) -> None:
        """Do nothing; makes the object usable in place of a file."""

    def close(self) -> None:
        """Close the input; the process reads its end."""
        with contextlib.suppress(OSError, EOFError):
            self._ends.close_stdin()


class RemoteProcess:
    """A running command.

    Attributes:
        command: the shell command line.
        host: name of the host that it runs on.
        stdin: input, with ``write(bytes)``, ``flush()`` and ``close()``.
        stdout: output; iterate over its lines (bytes), or use ``readline(timeout)`` or
            ``read(size, timeout)``. Empty if a callback receives it.
        stderr_tail: last 64 KiB of stderr, even if a callback receives it.
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
        """The last line of stderr, usually the reason of a failure; "" if there is none.

        Of a command that has ended it is waited for, since it may still be on its way.
        """
        if self._ends.wait(0.0) is not None:
            self._pumps[1].join(STRAGGLER_S)
        lines = self._tail.decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the command ends and return its exit status.

        After signal N it is 128 + N on this machine. Over ssh it is -1 after a signal or if the
        connection was lost.

        Raises:
            TimeoutError: it is still running.
        """
        status = self._ends.wait(timeout)
        if status is None:
            raise TimeoutError(f"'{self.command}' on {self.host} still runs after {timeout} s")
        return status

    def wait_drained(self, timeout: float) -> bool:
        """Wait for all output and return whether it arrived; a background child can delay it.

        While this machine or process is paused, no output is read, so a pause uses up only one of
        several parts of the time.
        """
        for _ in range(_DRAIN_PARTS):
            deadline = time.monotonic() + timeout / _DRAIN_PARTS
            for pump in self._pumps:
                pump.join(max(0.0, deadline - time.monotonic()))
            if not any(pump.is_alive() for pump in self._pumps):
                return True
        return False

    def signal(self, name: str) -> None:
        """Send TERM, KILL, INT, … to the command's process group, if it can still be reached."""
        # Errors of paramiko are not OSErrors; a host that is gone needs no signal.
        with contextlib.suppress(Exception):
            self._ends.signal(name)

    def close(self) -> None:
        """Close the pipes: the command reads the end of its input and cannot write any more.

        This does not kill it; use :meth:`signal` for that, or :meth:`stop` for both.
        """
        self._ends.close()
        self.stdout.mark_end()

    def stop(self, grace_s: float = TERMINATE_GRACE_S) -> bool:
        """Send TERM, after ``grace_s`` KILL, then :meth:`close`.

        It takes at most 3 x ``grace_s``, and :data:`SIGNAL_S` more if the host is slow.

        Returns:
            Whether it is known to have ended; False if the host does not answer.
        """

        def ask() -> None:
            for name in ("TERM", "KILL"):
                self.signal(name)
                with contextlib.suppress(TimeoutError):
                    self.wait(grace_s)
                    return

        # Behind output that nobody reads its exit status would not arrive.
        self.stdout.end_when_full()
        # On a dead connection a send can block for minutes; closing it releases the thread.
        asking = threading.Thread(target=ask, name=f"stop on {self.host}", daemon=True)
        asking.start()
        asking.join(3 * grace_s + SIGNAL_S)
        ended = self._ends.wait(0) is not None
        self.close()
        return ended

    def _pump_stdout(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while data := self._ends.read_stdout(CHUNK_BYTES):
                self._on_stdout(data)
        self.stdout.mark_end()

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
    """Run a command with the given input until it ends, and return its output.

    Args:
        start: starts the command with a callback for its stderr.
        timeout_s: maximum duration [s]; None for no limit.
        stdin: input of the command; None for an empty input.

    Raises:
        CommandTimeoutError: it did not end in time and was stopped.
        SshError: it could not be started.
    """
    started = time.monotonic()
    out, err = bytearray(), bytearray()
    process = start(err.extend)

    def feed() -> None:
        # A command may end without reading all of its input, as head does; that is not an error.
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


def _shorten(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= _TOLD_LENGTH else f"{line[: _TOLD_LENGTH - 1]}…"
