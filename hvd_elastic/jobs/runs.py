"""The runs of jobs, as their keepers tell of them; each run has a leader process of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hvd_elastic.errors import HostfileError, RunError
from hvd_elastic.formatting import one_line
from hvd_elastic.hosts.hostfile import Host, format_hostfile, parse_hostfile, write_hostfile
from hvd_elastic.jobs.job import Job, JobKind
from hvd_elastic.jobs.keeper import STARTING_S, BeginLeader
from hvd_elastic.jobs.keeper_link import Follow, Forget, Grant, Lead, News, StopRun, Tell, Trouble
from hvd_elastic.jobs.keepers import Keepers
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import ClaimedHosts, Ending, RunProgress
from hvd_elastic.jobs.secrets import INDEX_VARIABLE
from hvd_elastic.jobs.server import RequestServer
from hvd_elastic.own_files import user_words
from hvd_elastic.programs.processes import read_process
from hvd_elastic.records.events import decode_event
from hvd_elastic.records.json_lines import decoded
from hvd_elastic.run_events import ReadEvent

_LEAVING_S = 60.0
"""How long after a daemon's start other users' jobs may be in more slots than they hold [s]."""
_WARN_S = 60.0
"""Least time between two warnings of another user's keeper [s]."""
_MOST_LINE = 1 << 20
"""Bytes of an event of another user's run."""
_MOST_TEXT = 1000
"""Characters that are kept of the last line of a leader."""


@dataclass
class _Run:
    """What the keeper has told of a run.

    Attributes:
        offset: what was read of its events [bytes].
        is_followed: whether the present keeper was asked for news.
        is_known: whether its progress is known, as far as its events go.
        news: the last of this keeper; None: there are none yet.
        asked_to_stop: last attempt that was asked to end.
        pid: process id of its leader; 0: not known.
        given: most slots of each host that this attempt was given; None: not known.
        claimed: the hosts that its events name.
        attempt, began: the last attempt that this daemon has started, and when [s, monotonic].
    """

    user: int | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    offset: int = 0
    is_followed: bool = False
    is_known: bool = False
    news: News | None = None
    asked_to_stop: int = 0
    pid: int = 0
    given: dict[str, int] | None = None
    claimed: ClaimedHosts = field(default_factory=ClaimedHosts)
    attempt: int = 0
    began: float = 0.0


class JobRuns:
    """The runs of a cluster's jobs.

    Args:
        ssh_config: ssh configuration of the cluster; None: the user's own.
        begin_leader: starts a leader, in the keeper.
        server: has :meth:`receive` called when the keeper says something.
        warn: called with what a keeper cannot do now.
    """

    def __init__(
        self,
        place: ClusterFolder,
        ssh_config: str | None,
        begin_leader: BeginLeader,
        server: RequestServer,
        warn: Callable[[str], None],
    ) -> None:
        self._place = place
        self._ssh_config = ssh_config
        self._keepers = Keepers(place, begin_leader, server, self.receive, self.warn_of)
        self._warn = warn
        self._warned_at: dict[int, float] = {}
        """When it was last warned of each other user's keeper [s, monotonic]."""
        self._begun = time.monotonic()
        self._began_at: dict[int | None, float] = {}
        self._moved = False
        self._runs: dict[str, _Run] = {}
        self._devices = Devices()

    def receive(self) -> None:
        """Take what the keepers have said."""
        told = self._keepers.receive()
        self._note_moved()
        for user, message in told:
            if isinstance(message, Trouble):
                self.warn_of(user, message.message)
                continue
            run = self._runs.get(message.run_id, _Run())
            if run.is_followed and run.user == user:
                run.pid = message.pid
                lines = [line.encode(errors="replace") for line in message.lines]
                try:
                    if user is not None and max(map(len, lines), default=0) > _MOST_LINE:
                        raise ValueError(f"an event of more than {_MOST_LINE} bytes")
                    events: Iterator[ReadEvent] = decoded(lines, decode_event)
                    run.progress.add(events if user is None else run.claimed.checked(events))
                except Exception as error:  # as in the daemon's look at the run
                    if user is None:
                        raise
                    self._keepers.drop(user, repr(error))
                    continue
                run.offset, run.is_known = message.offset, run.is_known or message.is_all
                message.lines.clear()
                message.last_line = message.last_line[:_MOST_TEXT]
                run.news = message

    def warn_of(self, user: int | None, text: str) -> None:
        """Warn of a keeper; of another user's once a minute, since that user decides how often."""
        if user is None:
            self._warn(one_line(text))
        elif time.monotonic() - self._warned_at.get(user, -_WARN_S) >= _WARN_S:
            self._warned_at[user] = time.monotonic()
            self._warn(f"the keeper of {user_words(user)}: {one_line(text)}")

    def take_moved(self) -> bool:
        """Return whether keepers have come or gone since the last call."""
        self._note_moved()
        found, self._moved = self._moved, False
        return found

    def _note_moved(self) -> None:
        """Have runs followed anew whose keepers have come or gone."""
        for user in self._keepers.take_moved():
            self._began_at[user] = time.monotonic()
            self._moved = True
            for run in self._runs.values():
                if run.user == user:
                    run.is_followed, run.news, run.asked_to_stop = False, None, 0

    def send_rest(self) -> None:
        """Send what keepers could not take before."""
        self._keepers.send_rest()

    def has_keeper(self, user: int | None) -> bool:
        """Return whether the keeper of a user is there; None is the daemon's user."""
        return self._keepers.has(user)

    def dismiss_others(self, users: Collection[int | None]) -> None:
        """End the keepers of all users but the daemon's and these."""
        for user in [user for user in self._keepers.others if user not in users]:
            self._keepers.dismiss(user)

    def distrust(self, job: Job, why: str) -> None:
        """Send the keeper of a job's user away, since what it has said makes no sense."""
        if (user := job.request.user) is not None and self._keepers.has(user):
            self._keepers.drop(user, why)

    def close(self) -> None:
        """End the keeper of this user; the leaders go on."""
        self._keepers.close()

    def progress(self, job: Job) -> RunProgress:
        """Return what the events of the job's run say; new ones are read by its ``poll``."""
        return self._run(job).progress

    def occupied(self, job: Job) -> Mapping[str, int]:
        """Return the slots in which processes of a job live; of other users', as far as given."""
        run = self._run(job)
        found = run.progress.hosts.occupied
        if run.user is None:
            return found
        if run.given is None:  # by an earlier daemon, from whose time processes may be leaving
            if time.monotonic() < self._begun + _LEAVING_S:
                return found
            run.given = dict(job.held)
        return {host: min(n, run.given[host]) for host, n in found.items() if host in run.given}

    def is_known(self, job: Job) -> bool:
        """Return whether it is known which slots the run of a job occupies."""
        return self._run(job).is_known and self.has_keeper(job.request.user)

    def has_lost_leader(self, job: Job) -> bool:
        """Return whether a job whose keeper is gone has certainly no leader on this machine."""
        if pid := self._run(job).pid:
            found = read_process(pid)
            return found is None or user_of(pid) != job.request.user
        return psutil.boot_time() > (job.started_at or 0.0)

    def _run(self, job: Job) -> _Run:
        user = job.request.user
        run = self._runs.setdefault(job.run_id, _Run(user))
        if not run.is_followed and self.has_keeper(user):
            run.is_followed = True
            hosts = format_hostfile(self.written_hosts(job)) if job.held else ""
            self._keepers.send(user, Follow(job.run_id, job.attempts, run.offset, hosts or None))
        return run

    def forget(self, job: Job) -> None:
        """Drop what is kept of the run of a job that has ended."""
        self.release(job, ended=True)
        self._runs.pop(job.run_id, None)

    # -- start and end ---------------------------------------------------------------------

    def take_up(self, job: Job, hosts: Iterable[Host]) -> None:
        """Take over what an earlier daemon has given to a job that runs.

        Raises:
            RunError: the hostfile of the job cannot be written.
        """
        written = self.written_hosts(job)
        self._devices.restore(job.run_id, written)
        if {host.name: host.slots for host in written} != dict(job.held):
            self._write_hostfile(job, hosts)  # that daemon was killed before it could
        self._run(job)

    def written_hosts(self, job: Job) -> Sequence[Host]:
        """Return the hosts of a job's hostfile as it was written last."""
        try:
            return parse_hostfile(self.hostfile(job)).hosts
        except HostfileError:
            return ()

    def release(self, job: Job, *, ended: bool = False) -> None:
        """Free the GPUs in which no process of a job is left; all that it has if its run ended."""
        if ended:
            self._devices.forget(job.run_id)
            self.hostfile(job).unlink(missing_ok=True)
            self._keepers.send(job.request.user, Forget(job.run_id))
        else:
            self._devices.release(job.run_id, job.held, self.occupied(job))

    def start(self, job: Job, hosts: Iterable[Host], environment: Mapping[str, str]) -> None:
        """Start a leader for a job that holds slots, or one that leads its run on.

        Args:
            environment: variables of the shell that submitted it.

        Raises:
            RunError: the hostfile cannot be written.
        """
        text = self._write_hostfile(job, hosts)
        request = job.request
        fields = {
            "min_np": request.min_np,
            "np": None,
            "max_np": None,
            "plain": request.kind is JobKind.PLAIN,
            "policy": "fixed",
        }
        if request.user is None:
            ssh_config = request.spec.get("ssh_config") or self._ssh_config
            fields = {**request.spec, **fields, "ssh_config": ssh_config}
        else:  # the rest is in the file that its keeper has
            environment = {}
        if request.array_index is not None:
            environment = {**environment, INDEX_VARIABLE: str(request.array_index)}
        run = self._runs.setdefault(job.run_id, _Run(request.user))
        run.is_followed = run.is_known = True
        run.news, run.pid, run.given = None, 0, dict(job.held)
        run.attempt, run.began = job.attempts, time.monotonic()
        origin = (self._place.name, job.number)
        told = (fields, *origin, dict(environment), request.secret)
        lead = Lead(job.run_id, job.attempts, run.offset, text, *told)
        self._keepers.send(request.user, lead)

    def ask_anew(self, job: Job) -> None:
        """Ask the keeper who leads a run: nobody, if a leader of this attempt was not started."""
        run = self._run(job)
        run.news, run.is_followed, run.is_known = None, False, False

    def is_led(self, job: Job) -> bool:
        """Return whether a process leads the run of a job, or is about to."""
        news = self._run(job).news
        if news is None or news.attempt != job.attempts or news.led:
            return True
        if news.is_own:
            return False
        # A daemon or a keeper that was killed may just have started it.
        fresh = job.started_at is not None and time.time() - job.started_at < STARTING_S
        began_at = self._began_at.get(job.request.user, self._begun)
        started_before = time.monotonic() - began_at < STARTING_S
        return fresh and started_before and not self._has_begun(job)

    def failed_to_begin(self, job: Job) -> bool:
        """Return whether the leader that this keeper has started ended before the run began.

        If an earlier one was to start it, that one was probably killed before it did.
        """
        news = self._run(job).news
        return news is not None and news.is_own and not self._has_begun(job)

    def ending(self, job: Job) -> Ending | None:
        """Return how the present attempt of a job ended; None: it has not, as far as is known."""
        ending = self.progress(job).ending
        if ending is not None and self._is_of_attempt(job, ending.at, ending.mono):
            return ending
        return None

    def _has_begun(self, job: Job) -> bool:
        began = self.progress(job).began
        return began is not None and self._is_of_attempt(job, began.t, began.mono)

    def _is_of_attempt(self, job: Job, at: float, mono: float) -> bool:
        """Return whether an event of these times belongs to the present attempt of a job.

        The wall clock may have been set back since, so it counts only if another daemon started
        the attempt, perhaps before the machine was.
        """
        run = self._run(job)
        if run.attempt == job.attempts:
            return run.began <= mono <= time.monotonic()
        return at >= (job.started_at or 0.0)

    def stop(self, job: Job, reason: str) -> None:
        """Ask the leader of a job's run to end it with a last checkpoint; asks only once."""
        run = self._run(job)
        if run.asked_to_stop != job.attempts:
            run.asked_to_stop = job.attempts
            self._keepers.send(job.request.user, StopRun(job.run_id, reason))

    def tell_user(self, job: Job, event: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Have the user of a job told of an event, by a command with this environment."""
        told = {key: job.request.spec.get(key) for key in ("notify", "cwd")}
        secret = job.request.secret
        message = Tell(job.run_id, dict(event), told, dict(environment), secret)
        self._keepers.send(job.request.user, message)

    def why_not_begun(self, job: Job) -> str:
        """Return the last line that a leader wrote before it ended without an event."""
        news = self._run(job).news
        return one_line(news.last_line if news else "") or "its leader did not begin"

    # -- hostfiles -------------------------------------------------------------------------

    def hostfile(self, job: Job) -> Path:
        """Return the path of the hostfile with the slots and GPUs that a job was given last."""
        return self._place.hostfiles / job.run_id

    def write_hostfile(self, job: Job, hosts: Iterable[Host]) -> None:
        """Give a job that runs the slots that it holds.

        Raises:
            RunError: its hostfile cannot be written.
        """
        run = self._run(job)
        if run.given is not None:
            for host, slots in job.held.items():
                run.given[host] = max(slots, run.given.get(host, 0))
        self._keepers.send(job.request.user, Grant(job.run_id, self._write_hostfile(job, hosts)))

    def _write_hostfile(self, job: Job, hosts: Iterable[Host]) -> str:
        """Note the slots and GPUs that a job has, for the next daemon; return the hostfile."""
        lines = [
            replace(
                host,
                slots=job.held[host.name],
                max_slots=max(host.slots, host.max_slots or 0),
                devices=self._devices.assign(job.run_id, host, job.held[host.name]),
            )
            for host in hosts
            if job.held.get(host.name)
        ]
        path = self.hostfile(job)
        try:
            write_hostfile(path, lines)
        except OSError as error:
            raise RunError(f"cannot write the hostfile {path}: {error.strerror}") from error
        return format_hostfile(lines)


def user_of(pid: int) -> int | None:
    """Return the user id of a process; None: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


class Devices:
    """The GPUs of the slots of all jobs, by host.

    The slots of a job on a host are a stack: it gives up the last one first, so the others keep
    their GPUs. A GPU that was given up is free once the process that used it is gone.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[str, tuple[int, ...]]] = {}

    def restore(self, job: str, hosts: Sequence[Host]) -> None:
        """Take over what an earlier daemon wrote into the hostfile of a job."""
        self._of[job] = {host.name: host.devices for host in hosts if host.devices}

    def forget(self, job: str) -> None:
        """Free the GPUs of a job whose run has ended."""
        self._of.pop(job, None)

    def release(self, job: str, held: Mapping[str, int], occupied: Mapping[str, int]) -> None:
        """Free the GPUs of slots that a job neither holds nor has a process in."""
        for host, devices in list(self._of.get(job, {}).items()):
            self._of[job][host] = devices[: max(held.get(host, 0), occupied.get(host, 0))]

    def assign(self, job: str, host: Host, slots: int) -> tuple[int, ...]:
        """Return the GPUs of a job's slots on a host, new ones for the slots that it lacks.

        Args:
            host: the host as in the cluster's hostfile; its ``devices`` are those that may be used.
        """
        own = self._of.setdefault(job, {}).get(host.name, ())
        taken = {
            device
            for name, hosts in self._of.items()
            if name != job
            for device in hosts.get(host.name, ())
        }
        others = [each for each in host.devices or range(host.slots) if each not in own]
        # Those of another job come last: only if its process there is about to end.
        free = sorted(others, key=taken.__contains__)
        kept = (*own, *free[: max(0, slots - len(own))])
        self._of[job][host.name] = kept
        return kept[:slots]
