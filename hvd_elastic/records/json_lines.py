"""Records of a run as JSON lines: one writer, any number of readers.

A record is one JSON object on one line: ``{"t": unix seconds, "mono": seconds, "kind": str, ...}``.
``events.jsonl`` and ``audit.jsonl`` of a run folder are such files.

A line goes out in a single ``write`` on a descriptor opened with ``O_APPEND``, so it reaches the
kernel whole and stays there when the writer is killed with -9. What can still be torn is the last
line on a full disk or after a power failure: readers skip it, and a later writer starts a new line.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError

__all__ = ["EventFollower", "EventLog", "LineFollower", "Record", "RecordNotWrittenError"]
__all__ += ["iter_events", "read_events", "read_last_events"]

Record = dict[str, Any]

SYNCED_KINDS = frozenset({"run_started", "checkpoint", "run_finished"})
"""Kinds that are synced to the disk: a resumed run relies on them even after a power failure.

All others survive the death of the process, not that of the machine.
"""

_STAMPS = frozenset({"t", "mono", "kind"})  # the writer's, whatever the fields say
_READ_BYTES = 1 << 20


class RecordNotWrittenError(RunError):
    """A record could not be written; ``record`` holds it, so that it can still be shown."""

    def __init__(self, message: str, record: Record) -> None:
        super().__init__(message)
        self.record = record


class EventLog(AbstractContextManager["EventLog"]):
    """Append-only writer of records; safe to share between threads, one process at a time.

    Args:
        path: the file; created with mode 0600 when missing. A torn last line that an earlier
            writer left is closed first, so that it cannot swallow the next record.

    Raises:
        RunError: the file cannot be opened; names it and why.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.lost = 0  # records not written since the last one that was
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
        """Write one record and return it as written (with ``t`` and ``mono``).

        Raises:
            RecordNotWrittenError: the disk is full or broken. Raised for the first record that is
                lost only: a training run should not die of its own log. Later losses are counted
                in ``lost``, and a ``warning`` record tells them once writing works again.
        """
        record: Record = {
            "t": round(time.time(), 6),
            "mono": round(time.monotonic(), 6),
            "kind": kind,
            **{key: value for key, value in (fields or {}).items() if key not in _STAMPS},
        }
        line = _encode(record)
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed; no record can be added")
            head = b"\n" if self._torn else b""
            if self.lost:
                head += _encode(self._loss_warning(record))
            try:
                self._write(head + line)
                if kind in SYNCED_KINDS:
                    os.fsync(self._fd)
            except OSError as error:
                self.lost += 1
                if self.lost > 1:
                    return record
                raise RecordNotWrittenError(
                    f"cannot write to {self.path}: {error.strerror}. The run goes on, but its "
                    "events are not recorded until there is room again; free space on that disk.",
                    record,
                ) from error
            self.lost = 0
        return record

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Sync and close; further calls do nothing."""
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            except OSError:
                pass  # whatever could not reach the disk was reported when it was written
            finally:
                os.close(fd)

    def _write(self, data: bytes) -> None:
        while data:  # a second turn only when the disk just filled; it has the reason
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


def iter_events(path: Path) -> Iterator[Record]:
    """The records of a file, oldest first; nothing when there is no such file yet.

    A line that is not a JSON object with a ``kind`` (torn by a full disk, or edited) is skipped.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> with EventLog(path) as log:
    ...     _ = log.append("host_lost", {"host": "node3"})
    >>> with path.open("a") as file:
    ...     _ = file.write('{"t": 3, "ki')
    >>> [record["host"] for record in iter_events(path)]
    ['node3']
    """
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        for line in file:
            record = _decode(line)
            if record is not None:
                yield record


def read_events(path: Path) -> list[Record]:
    """All records of a file; see :func:`iter_events`."""
    return list(iter_events(path))


def read_last_events(path: Path, max_bytes: int) -> list[Record]:
    """The records that begin in the last ``max_bytes`` of a file: enough to see how a run ended."""
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError:
        return []
    lines = LineFollower(path, offset=max(0, size - max_bytes)).poll_rest()
    decoded = (_decode(line) for line in lines)  # a first line cut in two is no record
    return [record for record in decoded if record is not None]


class LineFollower:
    """Hands out the lines that were added to a file since the last call, like ``tail -f``.

    A line is held back until its end has been written. A file that does not exist yet counts as
    empty, one that became shorter is read again from its start.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset  # of the first byte that has not been handed out

    def poll(self) -> list[bytes]:
        """The new complete lines, without their line ends."""
        lines: list[bytes] = []
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                pending = b""
                while chunk := file.read(_READ_BYTES):
                    whole, newline, pending = (pending + chunk).rpartition(b"\n")
                    if newline:
                        lines.extend(whole.split(b"\n"))
                        self.offset += len(whole) + 1
        except FileNotFoundError:
            return []
        return lines

    def poll_rest(self) -> list[bytes]:
        """As :meth:`poll`, and a last line without an end as well: nobody will finish it."""
        lines = self.poll()
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                rest = file.read()
        except FileNotFoundError:
            return lines
        self.offset += len(rest)
        return [*lines, rest] if rest else lines


class EventFollower:
    """Hands out the records that were added to a file since the last call."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        offset = 0
        if from_end and Path(path).exists():
            offset = Path(path).stat().st_size
        self._lines = LineFollower(path, offset=offset)

    def poll(self) -> list[Record]:
        """The new records; broken lines are skipped."""
        decoded = (_decode(line) for line in self._lines.poll())
        return [record for record in decoded if record is not None]


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _encode(record: Record) -> bytes:
    try:
        text = json.dumps(record, default=_plain, allow_nan=False, separators=(",", ":"))
    except ValueError:
        # A diverged loss is not a number; JSON has no word for it but null.
        text = json.dumps(_without_nan(record), default=_plain, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _decode(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if isinstance(record, dict) and isinstance(record.get("kind"), str):
        return record
    return None


def _plain(value: Any) -> Any:
    """JSON's stand-in for what it does not know: numbers of numpy and torch, paths, sets."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    for name in ("tolist", "item"):
        convert = getattr(value, name, None)
        if callable(convert):
            return _without_nan(convert())
    return str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
