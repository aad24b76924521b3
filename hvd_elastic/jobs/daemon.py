"""The daemon of a cluster: decides which job holds which slots, and keeps runs and queue in step.

It has one thread. All that it needs to go on is in the store, in the hostfiles of the jobs and in
the run folders, of which the keeper tells, so it may be killed at any moment; the runs have leaders
of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import clock_words, count, one_line
from hvd_elastic.jobs.admission import within_limits
from hvd_elastic.jobs.gpus import HostGpus
from hvd_elastic.jobs.health import HardwareHealth, HostHealth
from hvd_elastic.jobs.host_wish import HostWish
from hvd_elastic.jobs.hosts import BarredHosts, ClusterHosts, Expansion, Use, barred_words
from hvd_elastic.jobs.job import (
    Answer,
    Cancelled,
    Down,
    Job,
    JobKind,
    JobStatus,
    StopReason,
)
from hvd_elastic.jobs.keeper import BeginLeader
from hvd_elastic.jobs.limits import LimitsFile
from hvd_elastic.jobs.notify import ClusterRecord
from hvd_elastic.jobs.operator_state import OperatorState
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.progress import RunProgress
from hvd_elastic.jobs.queue import JobQueue, eta_moved
from hvd_elastic.jobs.requests import QueueRequests
from hvd_elastic.jobs.rights import user_name
from hvd_elastic.jobs.runs import JobRuns
from hvd_elastic.jobs.server import RequestServer
from hvd_elastic.jobs.shares import ClusterShares
from hvd_elastic.jobs.slot_plan import (
    Candidate,
    Claim,
    Plan,
    awaited_slots,
    grant_slots,
    plan_slots,
)
from hvd_elastic.jobs.store import JobStore
from hvd_elastic.policy.schedule.decide import decide
from hvd_elastic.policy.schedule.policies import Policy
from hvd_elastic.policy.snapshot import HostOffer
from hvd_elastic.records.wording import awaited_words

_LOOK_S = 0.2
"""Time between two looks at the runs [s]."""
_IDLE_LOOK_S = 1.0
"""The same while no job runs [s]."""
_DECIDE_S = 10.0
"""Longest time between two decisions while jobs run [s]; most follow an event."""
_CUT_OFF_S = 2.0
"""How long other runs still hear from their hosts when one hears from none of its own [s], unless
the network of this machine has failed."""
_ORPHAN_S = 30.0
"""How long a job without keeper and leader keeps its slots, beside its leader's grace [s]."""
_TAKEN_DOWN = "the cluster was taken down"
_MOST_LEADER_LOSSES = 5
"""Leaders of a run that may die in a row without a step of training in between."""


@dataclass
class _Losses:
    """Deaths of a run's leader in a row."""

    number: int = 0
    again_at: float = 0.0


class Daemon:
    """The daemon of one cluster.

    Args:
        place: folder of the cluster, whose lock the caller holds.
        hostfile: the cluster's hostfile; it is read again whenever it is saved.
        ssh_config: ssh configuration of the cluster; None: the user's own.
        policy: decides which job has how many slots.
        operators: ids of users who may change the jobs of others.
        notify: shell command that is told of events; empty: none.
        drains: faults of its hardware that drain a host; see :class:`HardwareHealth`.
        notify_held_s: how long a job is held until that is an event [s]; None: as the job says.
        expansion: hosts that the cluster may get beside those of the hostfile.

    Raises:
        HostfileError: the hostfile cannot be used.
        StoreError: the database cannot be used.
        UsageError: the limits make no sense.
    """

    def __init__(
        self,
        place: ClusterFolder,
        hostfile: Path,
        ssh_config: str | None,
        begin_leader: BeginLeader,
        policy: Policy = decide,
        operators: Collection[int] = (),
        notify: str = "",
        drains: str = "",
        notify_held_s: float | None = None,
        expansion: Expansion = Expansion(),  # noqa: B008  (it is frozen)
    ) -> None:
        self._policy = policy
        self._record = record = ClusterRecord(place, notify)
        self._hosts = ClusterHosts(hostfile, record.warn)
        self._operator_state = OperatorState(place.operator_state)
        self._store = JobStore.create(place.database)
        self._queue = JobQueue(self._store, record.emit, self._tell_user, notify_held_s)
        self._health = HostHealth(hostfile, ssh_config)
        self._hardware = HardwareHealth(drains, self._operator_state, record)
        self._gpus = HostGpus(hostfile, ssh_config)
        self._limits = LimitsFile(place.limits, record.warn)
        self._shares = ClusterShares(place.shares, record.warn)
        self._requests = QueueRequests(
            place,
            operators,
            (self._queue, self._store),
            (self._hosts, self._health, self._hardware, self._operator_state, self._gpus),
            record,
            expansion,
            host_rows=self._host_rows,
            show_limits=self._show_limits,
            has_keeper=self._has_keeper,
        )
        self._server = RequestServer(place, self._requests.answer)
        self._runs = JobRuns(place, ssh_config, begin_leader, self._server, record.warn)
        self._wanted: dict[int, dict[str, int]] = {}
        self._reasons: dict[int, str] = {}
        """Why jobs are to have the slots that they are to have."""
        self._unwritten: set[int] = set()
        """Jobs whose hostfiles are older than their slots."""
        self._unknown: set[int] = set()
        """Jobs of which it is not known yet which slots their runs occupy: they keep what they
        hold."""
        self._orphans: dict[int, float] = {}
        """Jobs with neither keeper nor leader, with the time since when [Unix s]."""
        self._is_told = False
        """Whether the last decision, and what was done about it, is recorded."""
        self._losses: dict[int, _Losses] = {}
        self._decide_at = 0.0
        self._barred = BarredHosts((), (), 0.0)
        self._silent: dict[str, str] = {}
        """Hosts that nobody hears from, and that are not known to be lost, with the cause."""

    def run(self) -> None:
        """Serve until ``down`` or a signal asks for the end."""
        self._record.hosts(self._hosts.listed)
        for job in self._queue.with_status(JobStatus.RUNNING):
            self._wanted[job.number] = dict(job.held)
            self._hosts.remember(self._runs.written_hosts(job))
            self._runs.take_up(job, self._hosts.known.values())
        with self._signals():
            while not self._is_over():
                timeout_s = _IDLE_LOOK_S
                try:
                    timeout_s = self._do_what_is_due()
                    self._record.forget_warning()
                except RunError as error:  # a full disk, most likely: the jobs go on meanwhile
                    self._record.warn(str(error))
                self._server.serve(timeout_s)
        with contextlib.suppress(RunError):  # a full disk
            down = self._requests.down
            leaves = down is not None and down.leave_jobs
            self._queue.rest("the daemon was ended" if leaves else _TAKEN_DOWN)
        self._runs.close()
        self._server.close()
        self._health.close()
        self._gpus.close()
        self._record.close()
        self._store.close()

    def _is_over(self) -> bool:
        if (down := self._requests.down) is None:
            return False
        running = self._queue.with_status(JobStatus.RUNNING)
        ends = any(self._runs.has_keeper(job.request.user) for job in running)
        return down.leave_jobs or not ends

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have SIGTERM, SIGINT and SIGHUP end the daemon and leave the jobs; SIGCHLD wakes it."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._server.watch(read_end, lambda: _drain(read_end))

        def end(_number: int, _frame: Any) -> None:
            self._requests.down = Down(leave_jobs=True)

        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), end)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)

    # -- one look --------------------------------------------------------------------------

    def _do_what_is_due(self) -> float:
        """Do what is due; return how long to wait until the next look [s]."""
        self._runs.send_rest()
        self._queue.changed |= self._limits.changed(time.monotonic())
        self._queue.changed |= self._runs.take_moved()
        self._queue.changed |= self._operator_state.changed(time.time()) | self._gpus.changed()
        if self._hosts.changed():
            self._record.hosts(self._hosts.listed)
            self._health.forget_others(self._hosts.listed)
            self._hardware.forget_others(self._hosts.listed)
            self._gpus.ask_again(self._gpus.known.keys() - self._hosts.listed.keys())
            self._queue.changed = True
        self._record.work()
        self._health.retry_lost_hosts(time.monotonic(), self._host_changed)
        now = time.time()
        running = self._queue.with_status(JobStatus.RUNNING)
        self._shares.count_use(running, now)
        unknown = {job.number for job in running if not self._runs.is_known(job)}
        self._queue.changed |= unknown != self._unknown
        self._unknown = unknown
        for job in running:
            self._look_at_run(job)
        self._put_back_orphans(running, now)
        self._suspect_silent_hosts(now)
        self._queue.changed |= self._hardware.drain(self._hosts.listed, self._health.lost, now)
        for host in self._record.lost(self._health.lost, self._hosts.listed):
            self._queue.tell_lost(host, self._health.lost[host])
        if self._queue.changed or now >= self._decide_at:
            self._queue.changed = False
            self._decide_at = now + _DECIDE_S
            self._decide(now)
        self._write_hostfiles()
        self._move_slots()
        self._write_hostfiles()
        busy = self._queue.with_status(JobStatus.RUNNING) or self._queue.changed
        return _LOOK_S if busy else _IDLE_LOOK_S

    def _look_at_run(self, job: Job) -> None:
        """Follow the run of a job; act on its end."""
        progress = self._runs.progress(job)
        if job.number in self._unknown:
            return
        occupied = self._runs.occupied(job)
        # A slot that is empty now may be better for a job than one that it waits for.
        try:
            moved = progress.poll()
        except Exception as error:  # events of a user who means no good must not end the daemon
            if job.request.user is None:
                raise
            self._runs.distrust(job, repr(error))
            return
        self._queue.changed |= moved | (self._runs.occupied(job) != occupied)
        self._note_lost(job, progress)
        self._note_faults(job, progress)
        if progress.trained_at is not None:
            for host in progress.hosts.used:
                self._health.host_works(host, _python(job))
        self._runs.release(job)
        limit_s, whose = self._limits.limits.longest(job)
        if self._runs.is_led(job):
            progress.seen_at = time.time()
            job = self._queue.limit_time(job, limit_s, whose)
            if job.stop is StopReason.TIME_LIMIT:
                self._runs.stop(job, f"it has run as long as it may ({job.reason.split(':')[0]})")
            elif job.stop is not None:
                self._runs.stop(job, f"{job.stop.value} asked for by the queue")
            if progress.trained_at is not None:
                self._losses.pop(job.number, None)
            return
        # It may have ended while no daemon was there; its clock may have been set back.
        at = min(time.time(), max(progress.seen_at, job.started_at or 0.0))
        if (ending := self._runs.ending(job)) is not None:
            if all(map(self._health.is_judged, progress.hosts.unfit)):  # else in a moment
                job = self._queue.limit_time(job, limit_s, whose, at)
                self._run_ended(job, ending.status, ending.message, at)
        elif self._runs.failed_to_begin(job):
            self._run_ended(job, "failed", self._runs.why_not_begun(job))
        else:
            self._lead_on(job, at)

    def _put_back_orphans(self, running: list[Job], now: float) -> None:
        """Put jobs back that have neither keeper nor leader, when nothing of them is left."""
        for job in running:
            lost = not self._runs.has_keeper(job.request.user) and self._runs.has_lost_leader(job)
            since = self._orphans.setdefault(job.number, now) if lost else now
            if not lost:
                self._orphans.pop(job.number, None)
            elif now - since > job.request.spec.get("leader_grace_s", 0.0) + _ORPHAN_S:
                del self._orphans[job.number]
                why = "its keeper and its leader are gone"
                if job.stop in (StopReason.CANCEL, StopReason.TIME_LIMIT):
                    self._run_ended(job, "stopped", why)
                    continue
                self._wanted.pop(job.number, None)
                self._queue.put_back(job, why)
                self._runs.release(job, ended=True)

    def _note_lost(self, job: Job, progress: RunProgress) -> None:
        """Take out the hosts that a run has lost; where the job may be at fault, after a try."""
        is_others = job.request.user is not None  # then only what was given to it is tried
        for host, cause in progress.hosts.take_lost().items():
            if is_others and host not in job.held:
                continue
            if host in self._hosts.listed and host not in self._health.lost:
                suspicion = host in progress.hosts.unfit and progress.trained_at is None
                suspicion |= is_others
                now = time.monotonic()
                cause = one_line(cause)
                self._health.host_lost(host, cause, now, _python(job), is_suspicion=suspicion)
                self._queue.changed = True

    def _note_faults(self, job: Job, progress: RunProgress) -> None:
        """Note the faults of hosts of which a run has told."""
        for told in progress.hosts.take_faults():
            is_foreign = job.request.user is not None and told.host not in job.held
            if told.host in self._hosts.listed and not is_foreign:
                self._hardware.note_faults(told)

    def _suspect_silent_hosts(self, now: float) -> None:
        """Have the hosts tried that a run does not hear from, while other runs hear from theirs.

        Its leader waits, since it cannot tell whether its own network has failed. Others need not
        be sent there meanwhile.
        """
        running = [
            (job, self._runs.progress(job)) for job in self._queue.with_status(JobStatus.RUNNING)
        ]
        heard = {
            host
            for job, progress in running
            if not progress.hosts.silent
            for host in self._runs.occupied(job)
        }
        self._silent = {}
        for job, progress in running:
            silent = progress.hosts.silent
            if not silent:
                continue
            cause = f"no answer since {clock_words(min(silent.values()))}"
            hosts = silent.keys() & self._hosts.listed.keys() - heard
            if job.request.user is not None:
                hosts &= job.held.keys()
            if heard and not progress.is_tried and now >= progress.cut_off_at + _CUT_OFF_S:
                progress.is_tried = True
                at = time.monotonic()
                for host in hosts:
                    self._health.host_lost(host, cause, at, _python(job), is_suspicion=True)
            if heard:
                cause += ", being tried"
            else:
                cause += "; no run hears from a host, so this machine may be cut off"
            if progress.is_tried:  # those that answered are as good as others
                hosts &= self._health.suspects
            self._silent |= dict.fromkeys(hosts, cause)

    def _tell_user(
        self, job: Job, kind: str, fields: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._runs.tell_user(job, self._record.event(kind, fields), environment)

    def _host_changed(self, host: str) -> None:
        self._gpus.ask_again([host])
        self._queue.changed = True

    def _run_ended(self, job: Job, status: str, message: str, at: float | None = None) -> None:
        """Take the end of a run; ``at``: when that was [Unix s], None: now."""
        retries, failures = job.request.retries, job.failures
        if job.request.user is not None:
            message = one_line(message)
        self._record.forget_decided()  # its end has changed who holds what
        self._wanted.pop(job.number, None)
        self._reasons.pop(job.number, None)
        if status == "succeeded":
            for host in job.held:
                self._health.host_works(host, _python(job))
            ended = self._queue.ended(job, JobStatus.SUCCEEDED, message, at)
        elif job.stop is StopReason.CANCEL:
            cancelled = job.request.cancelled or Cancelled("its user")
            state, also = cancelled.cause.status, ""
            if status != "stopped":
                state, also = JobStatus.CANCELLED, f"; it ended with: {message}"
            ended = self._queue.ended(job, state, f"{cancelled}{also}", at)
        elif job.stop is StopReason.TIME_LIMIT:
            also = "" if status == "stopped" else f"; it ended with: {message}"
            ended = self._queue.ended(job, JobStatus.FAILED, job.reason + also, at)
        elif status == "stopped" and job.stop is StopReason.REQUEUE:
            self._queue.put_back(job, job.reason, at=at)
            self._runs.release(job, ended=True)
            return
        elif status == "stopped":
            why = "its run was stopped by its user"
            ended = self._queue.ended(job, JobStatus.CANCELLED, why, at)
        elif unfit := self._unfit_hosts(job):
            self._queue.put_back(job, f"waits: {unfit}", at=at)
            self._runs.release(job, ended=True)
            return
        elif failures < retries:
            why = f"failed, and is tried again ({failures + 1} of {retries}): {message}"
            self._queue.put_back(job, why, failed=True, at=at)
            self._runs.release(job, ended=True)
            return
        else:
            tried = f" ({count(failures + 1, 'attempt')})" if retries else ""
            ended = self._queue.ended(job, JobStatus.FAILED, f"{message}{tried}", at)
        self._runs.forget(ended)
        self._losses.pop(job.number, None)

    def _unfit_hosts(self, job: Job) -> str:
        """Return why the hosts of a job could not be used, if that was their fault; else nothing.

        If no other host is left for the job, it fails with what is wrong.
        """
        progress, lost = self._runs.progress(job), self._health.lost
        allowed = self._allowed(job.request.wish)
        usable = sum(
            n for host, n in self._usable_slots().items() if allowed is None or host in allowed
        )
        if progress.trained_at is not None or usable < job.request.min_np:
            return ""
        causes = (cause for host, cause in progress.hosts.unfit.items() if host in lost)
        return "; ".join(map(one_line, causes))

    def _lead_on(self, job: Job, at: float) -> None:
        """Start another leader for a run whose leader has died, at a time [Unix s]."""
        losses = self._losses.setdefault(job.number, _Losses())
        now = time.monotonic()
        if losses.number >= _MOST_LEADER_LOSSES:
            message = f"its leader died {losses.number} times in a row without training"
            self._run_ended(job, "failed", message)
        elif now >= losses.again_at:
            losses.again_at = now + 2.0 ** (losses.number + 1)
            self._runs.progress(job).trained_at = None
            self._start(job, job.held, at)
            losses.number += 1

    def _start(self, job: Job, held: Mapping[str, int], ran_until: float | None = None) -> None:
        """Start a leader; if that raises RunError (a full disk), the job is led on when it can.

        Args:
            ran_until: when the last leader of the run died [Unix s]; None: there was none.
        """
        started = self._queue.started(job, held, ran_until)
        try:
            environment = self._store.environment(started)
            self._runs.start(started, self._hosts.known.values(), environment)
        except RunError:
            self._runs.ask_anew(started)
            raise

    # -- decisions -------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self._requests.down is not None:
            self._stop_all()
            return
        ready = self._with_keepers(self._queue.ready())
        self._runs.dismiss_others({job.request.user for job in self._queue.active.values()})
        if by := self._operator_state.paused_by:
            self._queue.tell_waiting(ready, f"waits: {by} has paused the cluster (up --pause)")
            ready = []
        held_back = self._queue.active.keys() - {job.number for job in ready}
        for job in self._queue.with_status(JobStatus.QUEUED):
            if job.number in held_back:  # slots that it was to have before
                self._wanted.pop(job.number, None)
        running = self._queue.with_status(JobStatus.RUNNING)
        wishes = {job.request.wish for job in [*running, *ready]}
        if any(wish.asks_gpus(self._hosts.listed) for wish in wishes):
            self._gpus.ask(self._hosts.listed.keys() - self._health.lost.keys())
        jobs = [*(job for job in running if not self._is_bound(job)), *ready]
        self._bar_hosts([*running, *ready], now)
        hosts_of = {wish: self._allowed(wish) for wish in wishes}
        candidates = [self._candidate(job, hosts_of[job.request.wish]) for job in jobs]
        bound = [use for use in self._uses() if self._is_bound(use.job)]
        hosts = [
            HostOffer(name, slots - sum(use.taken(name) for use in bound))
            for name, slots in self._usable_slots().items()
        ]
        usable = [host for host in hosts if host.slots > 0]
        limits, shares = self._limits.limits, None
        if self._policy is decide:
            shares = self._shares.weigh(limits, self._queue.active.values())
        allowed, held = within_limits(candidates, [use.job for use in bound], limits, shares)
        plan = plan_slots(allowed, usable, now, self._policy, shares)
        for job in jobs:
            if job.number in plan.reasons and (barred := sorted(self._barred.of(job))):
                told = [barred_words(host, job.request.user) for host in barred]
                plan.reasons[job.number] = "; ".join([plan.reasons[job.number], *told])
        preempts = self._adopt(
            plan, [each.job for each in candidates if each.job.number not in held]
        )
        self._hold_to_limits(held)
        if preempts:  # these have slots until they end, which count in the limits of their users
            self._decide(now)

    def _bar_hosts(self, jobs: Collection[Job], now: float) -> None:
        """Find the hosts on which jobs can start nothing; warn of those that are new."""
        known = self._barred.causes
        begun = ((job, self._runs.progress(job).hosts) for job in jobs if job.attempts)
        self._barred = BarredHosts(begun, self._hosts.listed.keys() - self._health.lost.keys(), now)
        new: dict[int | None, list[str]] = {}
        for (user, host), cause in self._barred.causes.items():
            if (user, host) not in known:
                told = barred_words(host, user, one_line(cause, 300))
                new.setdefault(user, []).append(told)
        for user, texts in new.items():
            self._runs.warn_of(user, "; ".join(texts))

    def _candidate(self, job: Job, allowed: frozenset[str] | None) -> Candidate:
        if barred := self._barred.of(job):
            allowed = frozenset(self._hosts.listed if allowed is None else allowed) - barred
        if not job.attempts:
            return Candidate(job, hosts=allowed)
        progress = self._runs.progress(job)
        occupied = self._runs.occupied(job)
        if allowed is not None and job.request.kind is JobKind.PLAIN:
            allowed |= {host for host in job.held if host in occupied or host not in barred}
        return Candidate(job, progress.measured, occupied, progress.hosts.unheard, allowed)

    def _allowed(self, wish: HostWish) -> frozenset[str] | None:
        return wish.allowed(self._hosts.known, self._gpus.known)

    def _hold_to_limits(self, held: Mapping[int, str]) -> None:
        """Have jobs wait whose users may have no more, and say so."""
        for number in held:
            self._wanted.pop(number, None)
        jobs = [self._queue.active[number] for number in held]
        changed = [job for job in jobs if (job.reason, job.eta) != (held[job.number], None)]
        self._queue.update(replace(job, reason=held[job.number], eta=None) for job in changed)

    def _adopt(self, plan: Plan, jobs: list[Job]) -> bool:
        """Have jobs hold the slots of a plan; return whether some are preempted for it."""
        changed = []
        for job in jobs:
            number = job.number
            slots, reason, eta = plan.slots[number], plan.reasons[number], plan.etas.get(number)
            self._wanted[number], self._reasons[number] = slots, reason
            stop = job.stop
            reason = job.reason if slots else reason  # that of slots is told as they are granted
            if job.status is JobStatus.RUNNING and not slots:
                stop, reason = StopReason.REQUEUE, f"preempted: {reason}"
                self._wanted.pop(number)
            if (stop, reason) != (job.stop, job.reason) or eta_moved(eta, job.eta):
                changed.append(replace(job, stop=stop, reason=reason, eta=eta))
        self._queue.update(changed)
        self._is_told = False
        return any(job.stop for job in changed)

    def _stop_all(self) -> None:
        """Have all runs end, after a checkpoint if they train, to be started by the next daemon."""
        stopping = [
            replace(job, stop=StopReason.REQUEUE, reason=_TAKEN_DOWN)
            for job in self._queue.with_status(JobStatus.RUNNING)
            if not job.stop
        ]
        self._queue.update(stopping)

    def _with_keepers(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs whose keepers are there; say of the others that they wait for them."""
        found, waiting = [], []
        for job in jobs:
            if self._runs.has_keeper(job.request.user):
                found.append(job)
                continue
            name = user_name(job.request.user)
            reason = f"waits for the keeper of user {name}, which the next submit by {name} starts"
            if job.reason != reason or job.eta is not None:
                waiting.append(replace(job, reason=reason, eta=None))
        self._queue.update(waiting)
        return found

    def _is_bound(self, job: Job) -> bool:
        """Return whether the slots of a job that runs cannot be changed now."""
        return bool(job.stop) or job.number in self._unknown

    def _uses(self) -> list[Use]:
        """Return what the jobs that run use of the hosts."""
        uses = []
        for job in self._queue.with_status(JobStatus.RUNNING):
            occupied = job.held if job.number in self._unknown else self._runs.occupied(job)
            uses.append(Use(job, occupied, self._runs.progress(job).hosts.lost))
        return uses

    def _has_keeper(self, user: int | None) -> bool:
        return self._runs.has_keeper(user)

    def _host_rows(self) -> list[dict[str, Any]]:
        drained = self._operator_state.drained
        causes = self._barred.causes
        told = (self._health.lost, self._silent, drained, self._hardware.faults, causes)
        return self._hosts.rows(self._uses(), *told)

    def _show_limits(self) -> Answer:
        self._queue.changed |= self._limits.changed(time.monotonic())
        rows = self._shares.rows(self._limits.limits, self._queue.active.values())
        return Answer(self._limits.problem, data=rows)

    def _usable_slots(self) -> dict[str, int]:
        """Return the slots of the hosts that no run has lost; silent ones have no free ones."""
        uses = self._uses()
        slots = self._hosts.slots(uses, self._operator_state.closed)
        found = {h: n for h, n in slots.items() if h not in self._health.lost}
        for host in self._silent.keys() & found.keys():
            found[host] = min(found[host], sum(use.taken(host) for use in uses))
        return found

    def _move_slots(self) -> None:
        """Give the slots that are free to those that are to have them, and start jobs."""
        active = self._queue.active
        claims: dict[str, Claim] = {}
        uses = self._uses()
        for use in uses:
            job = use.job
            wanted = self._wanted.get(job.number, job.held)
            wanted = job.held if self._is_bound(job) else wanted
            claims[str(job.number)] = Claim(wanted, job.held, use.occupied, job.request.min_np)
        for job in self._queue.with_status(JobStatus.QUEUED):
            if planned := self._wanted.get(job.number):
                claims[str(job.number)] = Claim(planned, {}, {}, job.request.min_np)
        granted = grant_slots(claims, self._hosts.slots(uses, self._operator_state.closed))
        awaited = awaited_slots(claims, granted)
        changed = []
        for name, held in granted.items():
            job = active[int(name)]
            reason = self._reasons.get(job.number, job.reason)
            if unheard := self._runs.progress(job).hosts.unheard if job.attempts else "":
                reason = unheard
            elif waits := awaited.get(name):
                leaving = {host: [active[int(n)].run_id for n in waits[host]] for host in waits}
                reason = awaited_words(reason, leaving, runs=job.status is JobStatus.RUNNING)
            told = job if job.stop else replace(job, reason=reason)
            if job.status is JobStatus.RUNNING:
                if held and held != job.held:
                    told = replace(told, held=held)
                    self._unwritten.add(job.number)
            elif sum(held.values()) >= job.request.min_np and self._requests.down is None:
                self._start(told, held)
                self._is_told = False
                continue
            if told != job:
                changed.append(told)
        self._queue.update(changed)
        if changed or not self._is_told:
            self._is_told = True
            self._record.decided(self._queue.active)

    def _write_hostfiles(self) -> None:
        """Write the hostfiles of jobs whose slots have changed, also if it failed before."""
        if self._unwritten:
            for running in self._queue.with_status(JobStatus.RUNNING):
                self._runs.release(running)  # what one gives up, another may have
        for number in list(self._unwritten):
            job = self._queue.active.get(number)
            if job is not None and job.held:
                self._runs.write_hostfile(job, self._hosts.known.values())
            self._unwritten.discard(number)


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)


def _python(job: Job) -> str:
    """Return the interpreter of the agents of a job's run; the daemon runs none of other users'."""
    if job.request.user is not None:
        return sys.executable
    return str(job.request.spec.get("python") or sys.executable)
