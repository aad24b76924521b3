"""Keeps the queue of a cluster in SQLite: every job that was ever submitted, and its state."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.errors import RunError
from hvd_elastic.jobs.job import Job, JobRequest, JobStatus, StopReason

VERSION = 3
"""Version of the tables; a database of another version is refused."""
_TABLES = """
CREATE TABLE environments (
    number INTEGER PRIMARY KEY,
    variables TEXT NOT NULL UNIQUE
);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    run_id TEXT NOT NULL,
    request TEXT NOT NULL,
    environment INTEGER REFERENCES environments (number),
    status TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    message TEXT NOT NULL DEFAULT '',
    submitted_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    eta REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    stop TEXT,
    held TEXT NOT NULL DEFAULT '{}',
    ran_s REAL NOT NULL DEFAULT 0
);
CREATE INDEX jobs_by_status ON jobs (status);
CREATE INDEX jobs_by_name ON jobs (name);
CREATE INDEX jobs_by_environment ON jobs (environment);
"""
_MOST_VALUES = 900
"""Values in one statement; SQLite takes 999 or more."""
_MOST_INTEGER = 2**63 - 1
"""The largest number that SQLite knows."""
_ACTIVE = (JobStatus.QUEUED.value, JobStatus.RUNNING.value)
# Result codes of SQLite (sqlite3.h); the module has names for them from Python 3.11 on.
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _PERM, _NOTADB = (
    *(5, 6, 8, 10, 11, 13, 14, 3, 26),
)
_CODES = {
    "database is locked": _BUSY,
    "database table is locked": _LOCKED,
    "attempt to write a readonly database": _READONLY,
    "disk I/O error": _IOERR,
    "database disk image is malformed": _CORRUPT,
    "database or disk is full": _FULL,
    "unable to open database file": _CANTOPEN,
    "access permission denied": _PERM,
    "file is not a database": _NOTADB,
}
"""What SQLite says of each, for Python 3.10, whose errors have no code."""
_COLUMNS = (
    *("number", "run_id", "request", "environment", "status", "reason", "message"),
    *("submitted_at", "queued_at", "started_at", "ended_at"),
    *("eta", "attempts", "failures", "stop", "held", "ran_s"),
)
_UPDATE = (
    f"UPDATE jobs SET {', '.join(f'{each} = :{each}' for each in _COLUMNS)} WHERE number = :number"
)

_requests = msgspec.json.Decoder(JobRequest)


class StoreError(RunError):
    """The database of a queue cannot be read or written."""


class JobStore:
    """The queue of a cluster.

    Use :meth:`create` in the daemon and :meth:`read_only` elsewhere. The daemon is the only writer.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        weakref.finalize(self, connection.close)  # a reader is not always closed
        self._select_jobs = f"SELECT {', '.join(_COLUMNS)} FROM jobs"

    @classmethod
    def create(cls, path: Path) -> JobStore:
        """Open the database for writing; make it if there is none.

        Raises:
            StoreError: it cannot be used; the message says why and what to do.
        """
        with _explained(path), contextlib.ExitStack() as opened:
            # The environment of a job may hold secrets, so nobody else may read the file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = _connect(path)
            opened.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            _check_version(path, version)
            if not version:
                connection.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {VERSION};COMMIT;")
            opened.pop_all()
        return cls(path, connection)

    @classmethod
    def read_only(cls, path: Path) -> JobStore:
        """Open the database for reading, also while a daemon writes.

        Raises:
            StoreError: it cannot be used, or there is none.
        """
        if not path.exists():
            raise StoreError(
                f"there is no queue at {path}: no daemon was ever started there. Start one with: "
                "hvd-elastic up HOSTFILE"
            )
        with _explained(path), contextlib.ExitStack() as opened:
            # Not mode=ro: readers of a WAL write to its index.
            connection = _connect(path)
            opened.callback(connection.close)
            connection.execute("PRAGMA query_only = ON")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            _check_version(path, version)
            opened.pop_all()
        return cls(path, connection)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # -- changes ---------------------------------------------------------------------------

    def add_jobs(
        self, requests: Sequence[JobRequest], environment: Mapping[str, str], now: float
    ) -> list[Job]:
        """Add jobs with one environment; return them.

        Raises:
            StoreError: nothing was added, because the disk is full for example.
        """
        with self._transaction():
            kept = self._keep_environment(environment)
            found = []
            for request in requests:
                cursor = self._db.execute(
                    "INSERT INTO jobs"
                    " (name, run_id, request, environment, status, submitted_at, queued_at)"
                    " VALUES (?, '', ?, ?, ?, ?, ?)",
                    (request.name, _encode(request), kept, JobStatus.QUEUED.value, now, now),
                )
                number = int(cursor.lastrowid or 0)
                # Unlike the run of any other leader, which may have the same hosts and user.
                run_id = f"{request.name[:48]}-{number}-{secrets.token_hex(2)}"
                self._db.execute("UPDATE jobs SET run_id = ? WHERE number = ?", (run_id, number))
                found.append(
                    Job(number, request, run_id, submitted_at=now, queued_at=now, environment=kept)
                )
        return found

    def save(self, jobs: Iterable[Job]) -> None:
        """Write jobs that are in the database; all of them or none.

        The environment of a job that has ended is removed: it may hold secrets.

        Raises:
            StoreError: nothing was written.
        """
        with self._transaction():
            rows = [_row_of(job) for job in jobs]
            self._db.executemany(_UPDATE, rows)
            removed = 0
            if any(row["environment"] is None for row in rows):
                removed = self._db.execute(
                    "DELETE FROM environments WHERE NOT EXISTS"
                    " (SELECT 1 FROM jobs WHERE jobs.environment = environments.number)"
                ).rowcount
        if removed:
            with _explained(self.path):  # else it would stay in the write-ahead log
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def renew_environment(self, job: Job, environment: Mapping[str, str]) -> Job:
        """Return the job with another environment, which is written at once."""
        with self._transaction():
            kept = self._keep_environment(environment)
            self._db.execute("UPDATE jobs SET environment = ? WHERE number = ?", (kept, job.number))
        return replace(job, environment=kept)

    def _keep_environment(self, environment: Mapping[str, str]) -> int:
        text = json.dumps(dict(sorted(environment.items())))
        self._db.execute("INSERT OR IGNORE INTO environments (variables) VALUES (?)", (text,))
        row = self._db.execute(
            "SELECT number FROM environments WHERE variables = ?", (text,)
        ).fetchone()
        return int(row[0])

    # -- reading ---------------------------------------------------------------------------

    def active(self) -> list[Job]:
        """Return the jobs that wait or run, oldest first."""
        return self._select("WHERE status IN (?, ?) ORDER BY number", _ACTIVE)

    def with_status(self, status: JobStatus, limit: int | None = None, after: int = 0) -> list[Job]:
        """Return the jobs of a state whose numbers are above ``after``, oldest first."""
        most = -1 if limit is None else limit
        where = "WHERE status = ? AND number > ? ORDER BY number LIMIT ?"
        return self._select(where, (status.value, after, most))

    def ended(self, limit: int | None = None, before: int = _MOST_INTEGER) -> list[Job]:
        """Return jobs that have ended with numbers below ``before``, the last submitted first."""
        most = -1 if limit is None else limit
        where = "WHERE status NOT IN (?, ?) AND number < ? ORDER BY number DESC LIMIT ?"
        return self._select(where, (*_ACTIVE, before, most))

    def counts(self) -> dict[JobStatus, int]:
        """Return the number of jobs of each state that has any."""
        with _explained(self.path):
            rows = self._db.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall()
        return {JobStatus(status): int(number) for status, number in rows}

    def numbers(self, first: int, last: int) -> list[int]:
        """Return the numbers of the jobs from ``first`` to ``last``."""
        with _explained(self.path):
            rows = self._db.execute(
                "SELECT number FROM jobs WHERE number BETWEEN ? AND ? ORDER BY number",
                tuple(max(0, min(each, _MOST_INTEGER)) for each in (first, last)),
            ).fetchall()
        return [int(number) for (number,) in rows]

    def find(self, words: str, user: int | None = None) -> list[Job]:
        """Return the jobs that a user names, oldest first; a name is first that of own jobs.

        Args:
            words: a job's number, name, name and number (``train-3``), or run id.
            user: id of the user; None: the daemon's.
        """
        if words.isascii() and words.isdigit():
            return self._select("WHERE number = ?", (min(int(words), _MOST_INTEGER),))
        one = self._select("WHERE ? IN (run_id, name || '-' || number)", (words,))
        named = one or self._select("WHERE name = ? ORDER BY number", (words,))
        return [job for job in named if job.request.user == user] or named

    def jobs(self, numbers: Collection[int]) -> dict[int, Job]:
        """Return jobs by number; unknown ones are left out."""
        wanted = [*filter(_is_number, dict.fromkeys(numbers))]  # one may be named a million times
        rows = self._numbered(", ".join(_COLUMNS), wanted)
        found = {job.number: job for job in map(_job_of, rows)}
        return {number: found[number] for number in wanted if number in found}

    def statuses(self, numbers: Collection[int]) -> dict[int, JobStatus]:
        """Return the states of jobs by number; unknown ones are left out."""
        rows = self._numbered("number, status", [*filter(_is_number, numbers)])
        return {number: JobStatus(status) for number, status in rows}

    def _numbered(self, columns: str, numbers: Sequence[int]) -> Iterator[Sequence[Any]]:
        """Yield columns of the jobs that have some numbers."""
        with _explained(self.path):
            for first in range(0, len(numbers), _MOST_VALUES):
                some = (*numbers[first : first + _MOST_VALUES],)
                marks = ", ".join("?" * len(some))
                where = f"SELECT {columns} FROM jobs WHERE number IN ({marks})"
                yield from self._db.execute(where, some).fetchall()

    def environment(self, job: Job) -> dict[str, str]:
        """Return the environment of a job; empty if it was removed."""
        with _explained(self.path):
            row = self._db.execute(
                "SELECT variables FROM environments WHERE number = ?", (job.environment,)
            ).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Job]:
        with _explained(self.path):
            rows = self._db.execute(f"{self._select_jobs} {where}", values).fetchall()
            return [_job_of(row) for row in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise


def _is_number(number: int) -> bool:
    """Return whether a job can have a number: users may name others."""
    return 0 < number <= _MOST_INTEGER


def _encode(request: JobRequest) -> str:
    return msgspec.json.encode(request).decode()


def _row_of(job: Job) -> dict[str, Any]:
    return {column: getattr(job, column) for column in _COLUMNS} | {
        "request": _encode(job.request),
        "environment": job.environment if job.status.active else None,
        "status": job.status.value,
        "stop": job.stop and job.stop.value,
        "held": json.dumps(dict(job.held)),
    }


def _job_of(row: Sequence[Any]) -> Job:
    fields = dict(zip(_COLUMNS, row, strict=True))
    stop = fields.pop("stop")
    return Job(
        **{
            **fields,
            "request": _requests.decode(fields["request"]),
            "status": JobStatus(fields["status"]),
            "stop": None if stop is None else StopReason(stop),
            "held": {} if fields["held"] == "{}" else json.loads(fields["held"]),
        }
    )


def _check_version(path: Path, version: int) -> None:
    if version not in (0, VERSION):  # 0: it has no tables yet
        which = "a newer" if version > VERSION else "an earlier"
        raise StoreError(
            f"the queue {path} was written by {which} hvd_elastic (format {version}, this one "
            f"knows {VERSION}). Use that one, or start another cluster with --name."
        )


def _connect(path: Path) -> sqlite3.Connection:
    # One that is not closed is by the garbage collection, in any thread.
    return sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into StoreError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", _CODES.get(str(error), 0)) & 0xFF
        if code in (_FULL, _IOERR):
            why, do = "the disk is full or broken", "free space there; nothing was changed"
        elif code in (_NOTADB, _CORRUPT):
            why = "it is damaged, or no database"
            do = "move the file away; runs of its jobs stay in the runs folder"
        elif code in (_BUSY, _LOCKED):
            why, do = "another process has locked it", "try again"
        elif code in (_READONLY, _CANTOPEN, _PERM):
            why, do = f"it cannot be opened ({error})", "mend the permissions or free space there"
        else:
            why, do = str(error), "look at the file with sqlite3"
        raise StoreError(f"the queue {path} cannot be used: {why}. What to do: {do}.") from error
    except OSError as error:
        raise StoreError(
            f"the queue {path} cannot be used: {error.strerror}. Free space or mend the "
            "permissions there."
        ) from error
