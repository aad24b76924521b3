"""Writes and reads records of a run as JSON lines: one writer, any number of readers.

A record is one JSON object on one line: ``{"t": unix seconds, "mono": seconds, "kind": str, ...}``.
``events.jsonl`` and ``audit.jsonl`` of a run folder are such files.

Each line is written with a single ``write`` to a descriptor opened with ``O_APPEND``, so it is
complete even if the writer is killed by SIGKILL. Only on a full disk or after a power failure can
the last line be incomplete: readers skip it, and a later writer starts a new line.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from hvd_elastic.errors import RunError

Record = dict[str, Any]
Read = TypeVar("Read")
"""What a line is read as."""
Decode = Callable[[bytes], Read | None]
"""Reads a line; None: it is damaged and skipped."""

SYNCED_KINDS = frozenset({"run_started", "checkpoint", "run_finished"})
"""Kinds of records that are synced to the disk, because a resumed run needs them.

After a power failure, others may be lost; all survive the death of the process.
"""

_STAMPS = frozenset({"t", "mono", "kind"})  # set by the writer, never taken from the fields
_READ_BYTES = 1 << 20  # most bytes per read of a followed file
_DECODER = msgspec.json.Decoder()  # three times as fast as json


class EventLog(AbstractContextManager["EventLog"]):
    """Appends records to a file, each in one write; safe for several threads.

    Args:
        path: path of the file; created with mode 0600 if missing. If an earlier writer left an
            incomplete last line, it is ended first, so that it does not spoil the next record.

    Raises:
        RunError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.lost = 0  # number of records lost since the last one that was written
        self._lock = threading.Lock()
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
            self._torn = _ends_inside_a_line(self._fd)
        except OSError as error:
            raise RunError(
                f"cannot open {self.path} to record the run: {error.strerror}. "
                "Check that the folder exists and is writable, or set HVD_ELASTIC_HOME elsewhere."
            ) from error

    def append(self, kind: str, fields: Mapping[str, Any] | None = None) -> Record:
        """Write one record; return it as written, with ``t`` and ``mono``.

        Raises:
            RunError: see :meth:`write`.
        """
        t, mono = stamps()
        own = {key: value for key, value in (fields or {}).items() if key not in _STAMPS}
        record = {"t": t, "mono": mono, "kind": kind, **own}
        self.write(record)
        return record

    def write(self, record: Record) -> None:
        """Write one record as it is.

        Raises:
            RunError: the disk is full or broken. It is raised for the first lost record only, so
                that the log does not end a training run. Further losses are counted in ``lost``
                and reported by a ``warning`` record once writing works again.
        """
        line = encode_line(record)
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed; no record can be added")
            head = b"\n" if self._torn else b""
            if self.lost:
                head += encode_line(self._loss_warning(record))
            try:
                self._write(head + line)
                if record["kind"] in SYNCED_KINDS:
                    os.fsync(self._fd)
            except OSError as error:
                self.lost += 1
                if self.lost > 1:
                    return
                raise RunError(
                    f"cannot write to {self.path}: {error.strerror}. The run continues, but its "
                    "events are not recorded until there is room again; free space on that disk."
                ) from error
            self.lost = 0

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Sync and close the file; further calls do nothing."""
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            except OSError:
                pass  # failed writes were reported when they happened
            finally:
                os.close(fd)

    def _write(self, data: bytes) -> None:
        while data:  # repeats only if the disk has just filled up, to get the error for it
            done = os.write(self._fd, data)
            self._torn = done < len(data)
            data = data[done:]

    def _loss_warning(self, record: Record) -> Record:
        return {
            "t": record["t"],
            "mono": record["mono"],
            "kind": "warning",
            "message": f"{self.lost} records before this one were lost: the disk could not take "
            "them",
        }


def stamps() -> tuple[float, float]:
    """Return the time for a record: Unix seconds, and seconds of the monotonic clock."""
    return round(time.time(), 6), round(time.monotonic(), 6)


def iter_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, oldest first; nothing if there is no such file yet.

    Lines that are not a JSON object with a ``kind`` are skipped: the disk was full, or the file
    was edited.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> with EventLog(path) as log:
    ...     _ = log.append("host_lost", {"host": "node3"})
    >>> with path.open("a") as file:
    ...     _ = file.write('{"t": 3, "ki')
    >>> [record["host"] for record in iter_records(path)]
    ['node3']
    """
    return read_lines(path, decode_record)


def read_records(path: Path) -> list[Record]:
    """Return all records of a file; see :func:`iter_records`."""
    return list(iter_records(path))


def read_lines(path: Path, decode: Decode[Read]) -> Iterator[Read]:
    """Yield what the lines of a file are read as; nothing if there is no such file yet."""
    if Path(path).exists():
        with Path(path).open("rb") as file:
            yield from decoded(file, decode)


def decoded(lines: Iterable[bytes], decode: Decode[Read]) -> Iterator[Read]:
    """Yield what lines are read as; damaged ones are skipped."""
    return (found for line in lines if (found := decode(line)) is not None)


class LineFollower:
    """Returns the lines that were added to a file since the last call, like ``tail -f``.

    A line is returned once its end has been written. A file that does not exist yet counts as
    empty; one that became shorter is read again from its start.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset  # of the first byte that was not returned yet

    def poll(self, max_bytes: float = math.inf) -> list[bytes]:
        """Return the new complete lines, without line ends.

        Args:
            max_bytes: about how many bytes to read at most; the next call continues there.
        """
        lines: list[bytes] = []
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                pending = b""
                begin = self.offset
                while self.offset - begin < max_bytes and (chunk := file.read(_READ_BYTES)):
                    whole, newline, pending = (pending + chunk).rpartition(b"\n")
                    if newline:
                        lines.extend(whole.split(b"\n"))
                        self.offset += len(whole) + 1
        except FileNotFoundError:
            return []
        return lines

    def poll_rest(self) -> list[bytes]:
        """Return the new lines, including an incomplete last line that will not be continued."""
        lines = self.poll()
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                rest = file.read()
        except FileNotFoundError:
            return lines
        self.offset += len(rest)
        return [*lines, rest] if rest else lines


class Follower(Generic[Read]):
    """Returns what was added to a file since the last call.

    Args:
        last_bytes: how much of what is there already is returned at most, from its end.
    """

    def __init__(self, path: Path, decode: Decode[Read], *, last_bytes: float = math.inf) -> None:
        size = Path(path).stat().st_size if Path(path).exists() else 0
        self._lines = LineFollower(path, offset=int(size - min(size, last_bytes)))
        self._decode = decode

    @property
    def offset(self) -> int:
        """Return how many bytes of the file have been read."""
        return self._lines.offset

    def poll(self, max_bytes: float = math.inf) -> list[Read]:
        """Return what is new; damaged lines are skipped.

        Args:
            max_bytes: about how many bytes to read at most; the next call continues there.
        """
        return [*decoded(self._lines.poll(max_bytes), self._decode)]


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def encode_line(record: Record) -> bytes:
    """Return a record as a line of JSON."""
    try:
        text = json.dumps(record, default=as_plain, allow_nan=False, separators=(",", ":"))
    except ValueError:
        # JSON lacks NaN and infinity, as of a diverged loss: null is written instead.
        text = json.dumps(without_nan(record), default=as_plain, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def decode_record(line: bytes) -> Record | None:
    """Return the record of a line."""
    try:
        record = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Words of a command that are not UTF-8 are strings with lone surrogates, which only the
        # standard library decodes.
        try:
            record = without_nan(json.loads(line))
        except (ValueError, RecursionError):
            return None
    if isinstance(record, dict) and isinstance(record.get("kind"), str):
        return record
    return None


def as_plain(value: Any) -> Any:
    """Return a JSON value for numbers of numpy and torch, paths, sets and other objects."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    for name in ("tolist", "item"):
        convert = getattr(value, name, None)
        if callable(convert):
            return without_nan(convert())
    return str(value)


def without_nan(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples, and None for what is no finite number.

    >>> without_nan({"points": [(1, float("nan"))]})
    {'points': [[1, None]]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value
