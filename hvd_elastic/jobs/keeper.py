"""The keeper: a process of a user that leads the runs of that user's jobs, as the daemon asks.

It opens the run folders, starts the leaders and reads their events, so that the daemon opens no
path of a user. All that the two say to each other goes over one connection. A keeper that dies
takes nothing with it: the leaders go on, and the next keeper finds their runs by their folders.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError, StrangerError
from hvd_elastic.jobs.keeper_link import (
    Follow,
    Forget,
    FromKeeper,
    Grant,
    Lead,
    Leave,
    Link,
    News,
    StopRun,
    Tell,
    ToKeeper,
    Trouble,
)
from hvd_elastic.jobs.notify import Notifier, NotifyCommand
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import READ_KINDS
from hvd_elastic.jobs.secrets import JobSecrets
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.json_lines import LineFollower
from hvd_elastic.records.run_folder import RunFolder, check_run_id
from hvd_elastic.replaced_files import write_whole

BeginLeader = Callable[[RunSpec, RunFolder, Mapping[str, str], bool], int]
"""Starts the leader of a run in a process of its own that outlives this one; returns its process
id. Arguments: specification, run folder, environment, whether the run had a leader before."""

STARTING_S = 5.0
"""How long a leader that an earlier keeper started may take to lock its run folder [s]."""
_AGAIN_S = 1.0
"""Time between two tries to reach the daemon [s]."""
_LOOK_S = 0.2
"""Time between two looks at the runs [s]."""
_PART_BYTES = 4 << 20
"""About how many bytes of events are sent at once."""
_LOG_BYTES = 4096


class _Kind(msgspec.Struct):
    kind: str


_kind = msgspec.json.Decoder(_Kind)


@dataclass
class _Run:
    """A run that the keeper reports on.

    Attributes:
        child: process id of its leader, if this keeper started it.
        fault: why its leader cannot be started, ever.
        hosts: hostfile that is still to be written.
        lead: what its leader is still to be started with.
        stop: what its leader is still to be told.
        told: what was said last about its leader.
        until: when the keeper stops looking at it, as it has no leader [s, monotonic].
    """

    folder: RunFolder
    attempt: int
    lines: LineFollower
    until: float
    child: int | None = None
    is_own: bool = False
    fault: str = ""
    hosts: str | None = None
    lead: Lead | None = None
    stop: str | None = None
    told: tuple[bool, bool] | None = None


class Keeper:
    """Leads the runs of this user's jobs.

    Args:
        begin_leader: starts a leader.
        secrets: what only this user's processes know of the jobs; None: the daemon tells all.
    """

    def __init__(self, begin_leader: BeginLeader, secrets: JobSecrets | None = None) -> None:
        self._begin_leader = begin_leader
        self._secrets = secrets
        self._runs: dict[str, _Run] = {}
        self._trouble = ""
        self._warnings: list[FromKeeper] = []
        self._notifier = Notifier(self._warn)

    def keep(self, place: ClusterFolder) -> None:
        """Serve a daemon of another user, and the next one when it is gone, until it says so."""
        while place.path.is_dir():
            try:
                connection = place.connect("keepers.sock", None)
            except (OSError, StrangerError):  # the daemon is not there
                time.sleep(_AGAIN_S)
                continue
            with connection:
                if self.serve(connection):
                    return
            time.sleep(_AGAIN_S)

    def serve(self, connection: socket.socket) -> bool:
        """Do what the daemon says, and tell it what is new, until it is gone.

        Returns:
            Whether it has said that the keeper is to end.
        """
        import hvd_elastic.leader.leader  # noqa: F401  # once, not in each leader that is forked

        link: Link[ToKeeper] = Link(connection, ToKeeper, "the daemon")
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        while True:
            is_busy = self._notifier.is_busy or any(map(self._is_watched, self._runs.values()))
            select.select([link.fileno(), read_end], [], [], _LOOK_S if is_busy else None)
            with contextlib.suppress(BlockingIOError):
                os.read(read_end, 4096)
            messages = link.receive()
            for message in messages or ():
                if isinstance(message, Leave):
                    self._notifier.close()
                    if self._secrets is not None:
                        self._secrets.forget_environments()
                    return True
                self._handle(message)
            if messages is None:
                self._notifier.close()
                signal.set_wakeup_fd(-1)
                os.close(read_end)
                os.close(write_end)
                return False
            self._notifier.work()
            link.send(*self._news(), *self._warnings)
            self._warnings.clear()

    def _warn(self, message: str) -> None:
        if not self._warnings:  # one at a time says it, and a flood of them would hurt the daemon
            self._warnings.append(Trouble(message))

    def _tell(self, message: Tell) -> None:
        fields, environment = message.fields, message.environment
        try:
            if self._secrets is not None:
                fields, environment = self._secrets.read(message.secret or "")
        except RunError as error:
            self._warn(f"--notify: {error}")
            return
        text, folder = fields.get("notify") or "", fields.get("cwd")
        self._notifier.tell(NotifyCommand(text, environment or None, folder), message.event)

    def _handle(self, message: Follow | Lead | Grant | StopRun | Forget | Tell) -> None:
        known = self._runs.get(message.run_id)
        if self._secrets is not None and not self._secrets.allows(message.run_id):
            return  # the daemon has no say about this user's other runs
        match message:
            case Tell():
                self._tell(message)
            case Follow(run_id, attempt, offset, hosts) | Lead(run_id, attempt, offset, hosts):
                run = self._runs[run_id] = _new_run(run_id, attempt, offset, hosts)
                if isinstance(message, Lead):
                    run.lead = message
                elif known is not None and known.attempt == attempt:  # of another daemon
                    run.child, run.is_own, run.lead = known.child, known.is_own, known.lead
            case Grant(_, hosts) if known is not None:
                known.hosts = hosts
            case StopRun(_, reason) if known is not None:
                known.stop = reason
            case Forget(run_id) if known is not None:
                known.folder.hosts.unlink(missing_ok=True)
                del self._runs[run_id]

    @staticmethod
    def _is_watched(run: _Run) -> bool:
        is_led = run.told is None or run.told[0]
        return bool(is_led or run.hosts or run.stop or time.monotonic() < run.until)

    def _news(self) -> list[FromKeeper]:
        """Do what is left to be done for the runs; return what is new of them."""
        found: list[FromKeeper] = []
        trouble = ""
        for run in filter(self._is_watched, list(self._runs.values())):
            try:
                self._do_what_is_due(run)
            except RunError as error:  # a full disk, most likely: it is tried again
                trouble = str(error)
            found += self._news_of(run)
        if trouble and trouble != self._trouble:
            found.append(Trouble(trouble))
        self._trouble = trouble
        return found

    def _do_what_is_due(self, run: _Run) -> None:
        if run.lead is not None:
            self._start(run, run.lead)
            run.lead = None
        elif run.hosts is not None and run.folder.path.exists():
            _write_hosts(run)
        if run.stop is not None and run.folder.leader_alive():
            run.folder.send_request("stop", {"reason": run.stop})
            run.stop = None

    def _start(self, run: _Run, lead: Lead) -> None:
        folder = run.folder
        fields, environment = lead.fields, lead.environment
        try:
            if self._secrets is not None:
                fields, environment = self._secrets.complete(lead.secret or "", fields, environment)
            fields = {**fields, "hostfile": str(folder.hosts)}
            spec = RunSpec.from_dict(fields, run.folder.run_id)
        except RunError as error:  # no time mends this
            run.is_own, run.fault = True, str(error)
            return
        if not folder.path.exists():
            origin = {"cluster": lead.cluster, "job": lead.job}
            RunFolder.create(folder.run_id, {**spec.as_dict(), **origin})
        _write_hosts(run)
        resumed = folder.events.exists()
        run.is_own = True
        run.child = self._begin_leader(spec, folder, environment, resumed)

    def _news_of(self, run: _Run) -> list[FromKeeper]:
        """Return what is new of a run, of many events the first ones."""
        led = self._is_led(run)  # before reading, so that its last events are read too
        before = run.lines.offset
        lines = run.lines.poll(_PART_BYTES)
        is_all = run.lines.offset < before + _PART_BYTES
        state = led or not is_all, run.is_own
        if not lines and state == run.told:
            return []
        run.told = state
        return [
            News(
                run.folder.run_id,
                run.attempt,
                run.lines.offset,
                [line.decode(errors="replace") for line in lines if _is_read(line)],
                is_all,
                *state,
                last_line=run.fault or _last_line(run.folder) if state == (False, True) else "",
                pid=run.child or (int(run.folder.leader().get("pid") or 0) if led else 0),
            )
        ]

    @staticmethod
    def _is_led(run: _Run) -> bool:
        """Return whether a process leads a run, or is about to."""
        if run.lead is not None:
            return True
        if run.child is not None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(run.child, os.WNOHANG)
                if not ended:
                    return True
                if os.WIFSIGNALED(status):  # it was killed, which is no fault of the job
                    run.is_own = False
            run.child = None
        return run.folder.leader_alive()


def _new_run(run_id: str, attempt: int, offset: int, hosts: str | None) -> _Run:
    folder = RunFolder(runs_folder() / check_run_id(run_id))
    lines = LineFollower(folder.events, offset=offset)
    return _Run(folder, attempt, lines, time.monotonic() + STARTING_S, hosts=hosts)


def _write_hosts(run: _Run) -> None:
    path = run.folder.hosts
    try:
        write_whole(path, run.hosts or "", mode=0o600)
    except OSError as error:
        raise RunError(f"cannot write the hostfile {path}: {error.strerror}") from error
    run.hosts = None


def _is_read(line: bytes) -> bool:
    """Return whether the daemon reads an event; the others are the user's own affair."""
    with contextlib.suppress(msgspec.DecodeError):
        return _kind.decode(line).kind in READ_KINDS
    return False


def _last_line(folder: RunFolder) -> str:
    """Return the last line that the leader of a run has written."""
    try:
        with folder.leader_log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("error: ") if lines else ""
