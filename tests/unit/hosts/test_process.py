from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.hosts import process
from hvd_elastic.hosts.process import BUFFER_BYTES, CHUNK_BYTES, ByteStream, RemoteProcess
from tests.paths import LIMIT_S


class Ends:
    """A command that has ended; what it wrote last comes after its status was asked for."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._left = [b"No such file or ", b"directory\n", b""]

    def read_stdout(self, _: int) -> bytes:
        return b""

    def read_stderr(self, _: int) -> bytes:
        assert self.asked.wait(LIMIT_S)
        return self._left.pop(0)

    def wait(self, _: float | None) -> int:
        self.asked.set()
        return 1


def test_the_last_line_of_a_command_that_has_ended_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STRAGGLER_S", LIMIT_S)
    ends: Any = Ends()
    assert RemoteProcess(ends, "cat", "gpu1").last_line == "No such file or directory"


class SlowEnds:
    """A command on a host that takes its time to pass a signal on."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.close = self._ended.set

    def read_stdout(self, _: int) -> bytes:
        self._ended.wait()
        return b""

    read_stderr = read_stdout

    def wait(self, timeout_s: float | None) -> int | None:
        return 0 if self._ended.wait(timeout_s) else None

    def signal(self, _: str) -> None:
        time.sleep(0.5)
        self._ended.set()


def test_a_signal_is_waited_for_although_the_host_is_slow() -> None:
    ends: Any = SlowEnds()
    assert RemoteProcess(ends, "sleep 100", "gpu1").stop(grace_s=0.05)


class UnreadEnds:
    """A command whose status comes behind its output, more than is kept unread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._left = BUFFER_BYTES // CHUNK_BYTES + 2

    def read_stdout(self, size: int) -> bytes:
        self._left -= 1
        if self._left > 0:
            return bytes(size)
        self._ended.set()
        return b""

    def read_stderr(self, _: int) -> bytes:
        return b""

    def wait(self, timeout_s: float | None) -> int | None:
        return 0 if self._ended.wait(timeout_s) else None

    def signal(self, _: str) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_command_whose_output_nobody_reads_is_known_to_have_ended_once_stopped() -> None:
    ends: Any = UnreadEnds()
    remote = RemoteProcess(ends, "yes", "gpu1")
    assert remote.stop(grace_s=LIMIT_S / 10)
    assert len(remote.stdout.read()) == BUFFER_BYTES, "what has been kept can be read"


def test_output_is_waited_for_although_this_machine_was_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock has moved by an hour when the wait has begun, and no thread has run meanwhile."""
    ends: Any = Ends()
    remote = RemoteProcess(ends, "cat", "gpu1")
    clock = itertools.chain([0.0], itertools.repeat(3600.0))

    def now() -> float:
        if (found := next(clock)) > 0.0:
            ends.asked.set()
        return found

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=now))
    assert remote.wait_drained(10 * LIMIT_S)
    assert remote.stderr_tail == b"No such file or directory\n"


def test_lines_and_pieces() -> None:
    stream = ByteStream()
    stream.put(b"one\ntw")
    assert stream.readline() == b"one\n"
    with pytest.raises(TimeoutError):
        stream.readline(timeout=0)
    stream.put(b"o\nthree")
    assert stream.readline() == b"two\n"
    assert stream.read(2) == b"th"
    stream.mark_end()
    assert stream.readline() == b"ree"
    assert stream.readline() == b""
    assert stream.read(5) == b""
    stream.put(b"late")
    assert stream.read() == b""


def test_a_full_buffer_holds_the_writer_until_it_is_read() -> None:
    stream = ByteStream(limit=10)
    stream.put(b"0123456789")
    written = threading.Event()

    def write() -> None:
        stream.put(b"more\n")
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not written.wait(0.05)
    # A line longer than the buffer comes in pieces.
    assert stream.readline(timeout=LIMIT_S) == b"0123456789"
    assert written.wait(LIMIT_S)
    assert stream.readline(timeout=LIMIT_S) == b"more\n"
    writer.join(LIMIT_S)


def test_the_end_sets_a_held_writer_free() -> None:
    stream = ByteStream(limit=1)
    stream.put(b"x")
    writer = threading.Thread(target=stream.put, args=(b"y",))
    writer.start()
    stream.mark_end()
    writer.join(LIMIT_S)
    assert not writer.is_alive()
    assert stream.read() == b"x"
