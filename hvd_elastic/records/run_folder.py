"""The folder of a run: its files, its lock, and requests to its leader.

    runs/<run-id>/
      run.json         specification of the run (written by the leader)
      events.jsonl     all events
      audit.jsonl      indices of the examples that were read (only with --audit)
      logs/            <host>.<local_rank>.log
      checkpoints/
      saved/           files that the script saved by name
      tensorboard/     event files (only with --tensorboard)
      commands/        one file for each request to the leader
      hosts            hosts that an engine such as Slurm, or a queue, has given to the run
      leader.lock      locked while a leader is alive
      leader.log       output of a detached leader

Requests are plain files, so the leader needs no open port, and file permissions decide who may
send them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.json_text import parse_json
from hvd_elastic.own_files import private_folder
from hvd_elastic.records.events import decode_event
from hvd_elastic.records.json_lines import Follower, LineFollower, decoded, read_lines
from hvd_elastic.records.process_lock import is_locked, take_lock
from hvd_elastic.records.wording import IN_QUEUE, run_state
from hvd_elastic.replaced_files import write_whole
from hvd_elastic.run_events import CommandDone, ReadEvent, RunFinished, RunStarted

if TYPE_CHECKING:
    from hvd_elastic.records.summary import RunSummary

COMMAND_TIMEOUT_S = 60.0
"""How long to wait for the leader's answer [s]; during a takeover, it answers no requests."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAIL_BYTES = 256 * 1024  # holds the last events of most runs
_PIECE_BYTES = 1 << 21  # of events that are read together
_SAMPLE = b'"kind":"host_sample"'  # of what nearly all lines are while a run waits
_POLL_S = 0.05  # between two readings of the events while a user waits for an answer


@dataclass(frozen=True)
class Request:
    """A request to the leader, which answers with the event ``command_done {id, ok}``."""

    id: str
    op: str
    fields: Mapping[str, Any]


def new_run_id(now: float | None = None) -> str:
    """Return a new run id such as ``20261121-153012-a3f``: local time and three random digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{secrets.token_hex(2)[:3]}"


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is a valid run id.

    Raises:
        UsageError: it is not; the message says which characters are valid.

    >>> check_run_id("digits-3.b")
    'digits-3.b'
    """
    if _RUN_ID.fullmatch(run_id):
        return run_id
    raise UsageError(
        f"run id {run_id!r} is not valid. A run id has 1 to 64 of the characters A-Z a-z 0-9 . _ - "
        "and starts with a letter or a digit, for example 'digits-3'."
    )


class RunFolder:
    """The folder of one run; use :meth:`create` for a new run, :meth:`open` for an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.run_json = path / "run.json"
        self.events = path / "events.jsonl"
        self.audit = path / "audit.jsonl"
        self.output = path / "output.jsonl"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.saved = path / "saved"
        self.tensorboard = path / "tensorboard"
        self.commands = path / "commands"
        self.hosts = path / "hosts"
        self.lock = path / "leader.lock"
        self.leader_log = path / "leader.log"
        self.secrets = path / "secrets.jsonl"

    # -- finding and making ----------------------------------------------------------------

    @classmethod
    def create(
        cls,
        run_id: str | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        root: Path | None = None,
    ) -> RunFolder:
        """Create the folder of a new run.

        Args:
            run_id: name of the run; None: a new one is chosen.
            fields: specification of the run, for run.json.
            root: folder of all runs; None: the default one.

        Raises:
            UsageError: the run id is not valid.
            RunError: the run id is in use, or the folder cannot be written.
            StrangerError: the folder of all runs belongs to another user.
        """
        parent = runs_folder() if root is None else Path(root)
        while True:
            folder = cls(parent / (new_run_id() if run_id is None else check_run_id(run_id)))
            is_made = False
            try:
                # Only the owner may read it: it holds paths and output of the job.
                private_folder(parent)
                folder.path.mkdir(mode=0o700)
                is_made = True
                for part in (folder.logs, folder.checkpoints, folder.commands):
                    part.mkdir(mode=0o700)
                own = {"run_id": folder.run_id, "created": time.time()}
                folder.write_run({**(fields or {}), **own})
            except FileExistsError as error:
                if not folder.path.is_dir():
                    raise RunError(
                        f"cannot make the run folder {folder.path}: a file is in its place. "
                        "Remove it or set HVD_ELASTIC_HOME elsewhere."
                    ) from error
                if run_id is None:
                    continue
                raise RunError(folder._in_use()) from error
            except OSError as error:
                if is_made:
                    shutil.rmtree(folder.path, ignore_errors=True)  # so that the id stays free
                raise RunError(
                    f"cannot make the run folder {folder.path}: {error.strerror}. Free space or "
                    "fix the permissions there, or set HVD_ELASTIC_HOME to a folder on another "
                    "disk."
                ) from error
            return folder

    @classmethod
    def find(cls, run_id: str, *, root: Path | None = None) -> RunFolder | None:
        """Return the folder of a run; None: there is no such run.

        Raises:
            UsageError: the run id is not valid.
        """
        folder = cls((runs_folder() if root is None else root) / check_run_id(run_id))
        return folder if folder.path.is_dir() else None

    @classmethod
    def open(cls, run_id: str | None = None, *, root: Path | None = None) -> RunFolder:
        """Return the folder of an existing run; without ``run_id``, that of the newest run.

        Raises:
            UsageError: the run id is not valid.
            RunError: there is no such run; the message names the newest ones.
        """
        parent = runs_folder() if root is None else Path(root)
        if run_id is not None and (folder := cls.find(run_id, root=parent)) is not None:
            return folder
        runs = list_runs(root=parent)
        if run_id is None and runs:
            return runs[0]
        wanted = "there is no run yet" if run_id is None else f"there is no run {run_id!r}"
        if runs:
            newest = ", ".join(run.run_id for run in runs[:5])
            raise RunError(
                f"{wanted} in {parent}. The newest are: {newest}. See all with: hvd-elastic list"
            )
        raise RunError(
            f"{wanted} in {parent}. Start one with: hvd-elastic run --hostfile HOSTFILE -- "
            "python train.py   (runs of another HVD_ELASTIC_HOME are not seen)"
        )

    # -- what it holds -----------------------------------------------------------------------

    def log_path(self, host: str, local_rank: int) -> Path:
        """Return the path of a worker's log."""
        return self.logs / f"{host.replace('/', '_')}.{local_rank}.log"

    def read_run(self) -> dict[str, Any]:
        """Return the content of run.json; empty if it is missing or unreadable."""
        try:
            found = parse_json(self.run_json.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_submitted(self) -> bool:
        """Return whether the run was submitted to Slurm, in whose queue it may be."""
        return "slurm" in self.read_run()

    @property
    def resume_command(self) -> str:
        """Return the command with which the run continues, or what else does it."""
        verb = "slurm submit" if self.is_submitted else "run"
        return self.read_run().get("resume") or f"hvd-elastic {verb} --resume {self.run_id}"

    def write_run(self, fields: Mapping[str, Any]) -> None:
        """Set these fields of run.json and keep the others; the file is replaced as a whole."""
        _write_json(self.run_json, {**self.read_run(), **fields})

    @property
    def created(self) -> float:
        """Return when the run was created [Unix seconds]."""
        value = self.read_run().get("created")
        if isinstance(value, (int, float)):
            return float(value)
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @property
    def began_elsewhere(self) -> bool:
        """Return whether another machine led the run before and has its earlier records."""
        return bool(self.read_run().get("began_elsewhere"))

    def read_events(self) -> list[ReadEvent]:
        """Return all events so far, oldest first; those of a week may take gigabytes."""
        return [*self.iter_events()]

    def iter_events(self) -> Iterator[ReadEvent]:
        """Yield all events so far, oldest first."""
        return read_lines(self.events, decode_event)

    def last_events(self, *kinds: type[ReadEvent]) -> list[ReadEvent]:
        """Return the events at the end, from the last one of some kinds or earlier.

        Nearly all samples of hosts are left out.
        """
        size = self.events.stat().st_size if self.events.exists() else 0
        tail_bytes = _TAIL_BYTES
        while True:
            follower = LineFollower(self.events, offset=max(0, size - tail_bytes))
            events: list[ReadEvent] = []
            while lines := follower.poll(_PIECE_BYTES) or follower.poll_rest():
                # The very last line has the time of the last event.
                told = [line for line in lines[:-1] if _SAMPLE not in line]
                events += decoded([*told, lines[-1]], decode_event)
            if tail_bytes >= size or any(isinstance(event, kinds) for event in events):
                return events
            tail_bytes *= 4

    def follow_events(self, *, last_bytes: float = math.inf) -> Follower[ReadEvent]:
        """Return what returns new events; see :class:`Follower`."""
        return Follower(self.events, decode_event, last_bytes=last_bytes)

    # -- the leader ------------------------------------------------------------------------

    def take_lead(self, *, for_child: bool = False) -> FileIO:
        """Return the lock that makes this process the run's leader, until it is closed.

        Args:
            for_child: whether a process that is forked later leads, with :meth:`name_leader`.

        Raises:
            RunError: another process leads the run, or the folder cannot be written.
        """
        try:
            lock = take_lock(self.lock)
        except OSError as error:
            raise RunError(
                f"cannot make {self.lock}: {error.strerror}. Free space or fix the permissions "
                "there; only the user who started a run may lead it."
            ) from error
        if lock is None:
            raise RunError(
                f"run {self.run_id} has a live leader{self._leader_words()}. Look at it with: "
                f"hvd-elastic attach {self.run_id}   End it with: hvd-elastic stop {self.run_id}"
            )
        with contextlib.suppress(OSError):
            lock.truncate(0)  # the last leader's name
        if not for_child:
            self.name_leader(lock)
        return lock

    @staticmethod
    def name_leader(lock: FileIO) -> None:
        """Write into the lock that this process leads."""
        with contextlib.suppress(OSError):  # on a full disk, the lock is valid without the text
            lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def leader_alive(self) -> bool:
        """Return whether a process leads this run now."""
        return is_locked(self.lock)

    def leaderless_until(self, last_event: float | None) -> float | None:
        """Return when the hosts of a run without a leader stop waiting for one [Unix seconds].

        They count from the moment they lost the leader, which is close to its last event. The
        result is None if that time has passed, or if they do not wait.

        Args:
            last_event: time of the leader's last event [Unix seconds]; None: there is none.
        """
        grace_s = self.read_run().get("leader_grace_s")
        if last_event is None or not isinstance(grace_s, (int, float)):
            return None
        until = last_event + grace_s
        return until if time.time() < until else None

    def state_of(self, summary: RunSummary, *, alive: bool) -> tuple[str, float | None]:
        """Return the state of the run as shown to users, and how long its hosts wait.

        Args:
            summary: of its events.
            alive: what :meth:`leader_alive` returned before they were read.

        Returns:
            The state, and the time until which hosts train on without a leader [Unix seconds];
            None: they do not.
        """
        until = None if alive else self.leaderless_until(summary.ended)
        waiting = bool(summary.waiting)
        return run_state(summary.status, alive=alive, waiting=waiting, until=until), until

    def leader(self) -> dict[str, Any]:
        """Return ``{"pid", "host"}`` of the current or last leader; empty if unknown."""
        try:
            found = parse_json(self.lock.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # -- requests --------------------------------------------------------------------------

    def send_request(self, op: str, fields: Mapping[str, Any] | None = None) -> str:
        """Write a request for the leader; return its id."""
        request_id = f"{time.time_ns():020d}-{secrets.token_hex(3)}"
        self.commands.mkdir(mode=0o700, exist_ok=True)
        try:
            _write_json(
                self.commands / f"{request_id}.json", {**(fields or {}), "id": request_id, "op": op}
            )
        except OSError as error:
            raise RunError(
                f"cannot leave a request in {self.commands}: {error.strerror}. Only the user who "
                "started the run may steer it, and its disk needs room."
            ) from error
        return request_id

    def take_requests(self, only: str | None = None) -> list[Request]:
        """Remove and return the waiting requests, oldest first; called by the leader.

        Args:
            only: operation to return; other requests are left. None: all operations.
        """
        requests = []
        try:
            paths = sorted(self.commands.glob("[!.]*.json"))
        except OSError:
            return []
        for path in paths:
            try:
                found = parse_json(path.read_bytes())
                request_id, op = str(found.pop("id")), str(found.pop("op"))
            except FileNotFoundError:
                continue  # its sender gave up and removed it
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                # An invalid request cannot be answered. It may be a folder, or the file server
                # may fail for a moment.
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            if only in (None, op):
                path.unlink(missing_ok=True)
                requests.append(Request(request_id, op, found))
        return requests

    def ask_leader(
        self,
        op: str,
        fields: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> str:
        """Send a request, wait for the answer, and return the leader's message.

        Args:
            op: operation, such as ``stop`` or ``scale``.
            fields: arguments of the operation.
            timeout_s: how long to wait for the answer [s].

        Raises:
            RunError: there is no live leader, no answer came in time, or the leader refused.
        """
        self.need_leader(op)
        follower = self.follow_events(last_bytes=0)
        request_id = self.send_request(op, fields)
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.leader_alive()  # before reading, so that its last events are read too
            for event in follower.poll():
                if isinstance(event, CommandDone) and event.id == request_id:
                    if event.ok:
                        return event.message
                    raise RunError(
                        f"the leader of run {self.run_id} refused '{op}': {event.message}"
                    )
            if not alive or time.monotonic() > deadline:
                # A later leader of this run must not carry out an old request.
                (self.commands / f"{request_id}.json").unlink(missing_ok=True)
                why = f"did not answer within {timeout_s:g} s" if alive else "ended meanwhile"
                raise RunError(
                    f"the leader of run {self.run_id}{self._leader_words()} {why}; '{op}' may not "
                    f"have been done. See: hvd-elastic status {self.run_id}   and "
                    f"{self.leader_log if self.leader_log.exists() else 'its terminal'}"
                )
            time.sleep(_POLL_S)

    def need_leader(self, op: str) -> None:
        """Raise RunError, with the last state of the run, if there is no live leader."""
        if self.leader_alive():
            return
        ended = "it never began"
        for event in self.iter_events():
            if isinstance(event, RunFinished):
                ended = f"it has {event.status}"
            elif isinstance(event, RunStarted):
                ended = f"its leader died; resume with: {self.resume_command}"
        if self.is_submitted:
            ended += f". {IN_QUEUE}"
        raise RunError(f"run {self.run_id} has no live leader, so '{op}' cannot reach it: {ended}.")

    def _leader_words(self) -> str:
        leader = self.leader()
        return f" (pid {leader.get('pid')} on {leader.get('host')})" if leader else ""

    def _in_use(self) -> str:
        state = "it is not running"
        way_on = f"continue it with: {self.resume_command}"
        if self.leader_alive():
            state = "it is running"
            way_on = (
                f"follow it with: hvd-elastic attach {self.run_id}, or end it with: "
                f"hvd-elastic stop {self.run_id}"
            )
        return (
            f"run id {self.run_id!r} is in use ({state}; its folder is {self.path}). Choose "
            f"another --run-id or none, or {way_on}"
        )


def list_runs(*, root: Path | None = None) -> list[RunFolder]:
    """Return all runs, newest first."""
    parent = runs_folder() if root is None else Path(root)
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    runs = [RunFolder(parent / name) for name in names if _RUN_ID.fullmatch(name)]
    return sorted(runs, key=lambda run: (run.created, run.run_id), reverse=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, default=str) + "\n"
    write_whole(path, text, mode=0o600, synced=True)
