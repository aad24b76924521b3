"""Steers a run: carries out requests of users and decisions of the policy, and stops it."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_elastic import run_events
from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import StopCause
from hvd_elastic.control.events import StopRequested
from hvd_elastic.control.state_machine import Phase
from hvd_elastic.formatting import count
from hvd_elastic.hosts.hostfile import Host, name_as_listed
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.failover.failover import Failover
from hvd_elastic.leader.fetching import Fetching
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.leader.liveness import LivenessWatch
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.run_events import CommandDone, ReadEvent
from hvd_elastic.wire.messages import SaveState

if TYPE_CHECKING:
    from hvd_elastic.leader.scaling import Scaler


_PERIODS = 3.0
"""How many of the longest periods a stop waits for the last checkpoint. A period in flight may have
sent its requests before, so the ranks agree on the checkpoint at the end of the next one."""
_OTHERS_S = 60.0
"""How long a stop waits for the other shards of the last checkpoint after the first one [s]."""
_ASK_OTHERS_S = 2.0
"""Time for the first worker to respond before all are asked [s]; it does so after its step."""
_ASK_AGAIN_S = 5.0
"""Time between further requests to all workers [s], in case some were lost."""
# Signals that stop a run, with the cause that is recorded.
_SIGNALS = {
    signal.SIGINT: StopCause.INTERRUPT,
    signal.SIGTERM: StopCause.TERMINATE,
    signal.SIGHUP: StopCause.HANGUP,
}
_SHUTDOWN = {StopCause.TERMINATE, StopCause.HANGUP, StopCause.ALLOCATION}
"""A machine that shuts down may send both signals in a row, and Slurm one at an allocation's end;
together they are one request."""


class Stopping:
    """Stops a run when it is asked to.

    Args:
        failover: a takeover is awaited before the run is stopped.
        fetching: says how long a checkpoint takes.
        liveness: says how long steps take.

    Attributes:
        cause: why the run is to stop; None: it is not.
        hears_sigterm: whether SIGTERM stops the run; not where its leader has that signal blocked.
    """

    def __init__(
        self,
        run: LedRun,
        executor: Executor,
        failover: Failover,
        fetching: Fetching,
        liveness: LivenessWatch,
    ) -> None:
        self._run = run
        self._executor = executor
        self._failover = failover
        self._fetching = fetching
        self._liveness = liveness
        self._last: LastCheckpoint | None = None
        """The last checkpoint, while it is waited for."""
        self.cause: StopCause | None = None
        self.hears_sigterm = True

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop the run at signals, unless nohup has a hang-up ignored; afterwards ignore them."""

        def ask(number: int, _: Any) -> None:
            cause = _SIGNALS[signal.Signals(number)]
            self._run.loop.post(functools.partial(self.ask, cause))

        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread, which is the caller's
            return
        self.hears_sigterm = signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number in _SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, ask)
        try:
            yield
        finally:
            # A second Ctrl-C must not interrupt the end of the agents, or processes would remain.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def ask(self, cause: StopCause) -> None:
        """Stop the run: at the first request after a last checkpoint, at the second immediately."""
        if self.cause is not None:
            if self.cause is cause or not {self.cause, cause} <= _SHUTDOWN:
                self._stop_now()
                if self._executor.finish is not None:
                    self._run.loop.stop()  # without what is still to be fetched
            return
        self.cause = cause
        self._run.journal.emit(run_events.StopRequested(cause.value))
        self.begin_if_asked()

    def begin_if_asked(self) -> None:
        """Begin to stop if that was asked for and this leader leads the run.

        During a takeover workers may exist, and it is not yet known where and at which step.
        """
        if self.cause is None or self._executor.finish is not None or not self._failover.leads:
            return  # a run that has ended waits only for what is to be fetched
        progress, now = self._run.progress, time.monotonic()
        if self._run.spec.checkpoint_every_s and (progress.reached.step or not progress.is_known):
            # The others cannot reach a step boundary until a frozen worker counts as lost.
            patience_s = self._fetching.reserve_s + self._run.spec.failure_timeout_s
            self._last = LastCheckpoint(now, patience_s, step=progress.reached.step)
            self.ask_for_last_checkpoint(now)
        else:
            self._stop_now()

    def ask_for_last_checkpoint(self, now: float) -> None:
        """Ask for the last checkpoint, or give it up; called often while this leader leads."""
        if self._last is None:
            return
        self._last.wait_for_periods(self._liveness.longest_period_s)
        machine = self._executor.machine
        holders = machine.state_holders
        if not holders or now >= self._last.deadline:
            self._stop_now()
            return
        if machine.phase in (Phase.REGROUPING, Phase.ASSEMBLING):
            self._last.survives_at(max(worker.step for worker in holders))
        for worker in self._last.whom_to_ask([worker.name for worker in holders], now):
            self._executor.say(worker, SaveState())

    def shard_written(self, step: int) -> None:
        """Note that a worker has written its shard of the checkpoint of ``step``."""
        if self._last is not None:
            self._last.written(step, time.monotonic())

    def shard_failed(self) -> None:
        """Note that a worker could not write its shard of a checkpoint."""
        if self._last is not None:
            self._last.failed(time.monotonic())

    def checkpoint_kept(self, newest_step: int) -> None:
        """Stop the run if the checkpoint of ``newest_step``, now complete, is its last one."""
        if self._last is None or not self._last.is_kept(newest_step):
            return
        if newest_step == self._run.progress.written.step:
            # Steps after the last checkpoint are discarded by the stop.
            progress = self._run.progress
            progress.reached, progress.is_exact = progress.written, True
        self._stop_now()

    def _stop_now(self) -> None:
        self._last = None
        if self.cause is not None:
            self._executor.tell(StopRequested(self.cause.value))


class LastCheckpoint:
    """State of the request for the last checkpoint of a run that is stopped early.

    A worker that is asked may be frozen or dead, so others are asked if it does not respond. One
    response is enough: a training member makes its whole generation write, and a waiting worker
    writes the whole state by itself. Times are arguments.

    Args:
        now: when it is requested [s].
        patience_s: how long to wait for it [s], beside the steps until the ranks agree on it.
        step: last step that is known to be done; 0 if unknown. Only a checkpoint of this step or
            a later one counts.

    >>> last = LastCheckpoint(0.0, 15.0, step=90)
    >>> last.whom_to_ask(["rank 0", "rank 1"], 0.0), last.whom_to_ask(["rank 0", "rank 1"], 1.0)
    (['rank 0'], [])
    >>> last.whom_to_ask(["rank 1"], 2.0)
    ['rank 1']
    >>> last.written(90, 3.0)
    >>> last.is_kept(60), last.is_kept(90)
    (False, True)
    """

    def __init__(self, now: float, patience_s: float, *, step: int) -> None:
        self.deadline = now + patience_s
        self._begun = now
        self._patience_s = patience_s
        self._step = step
        self._failed = False
        self._ask_at = now
        self._asked = False
        self._written = math.inf

    def whom_to_ask(self, holders: Sequence[str], now: float) -> list[str]:
        """Return the workers to ask now, if any.

        Args:
            holders: live workers that hold the state, in order of preference.
            now: time [s].
        """
        if now < self._ask_at or not holders:
            return []
        asked = list(holders) if self._asked else [holders[0]]
        self._ask_at = now + (_ASK_AGAIN_S if self._asked else _ASK_OTHERS_S)
        self._asked = True
        return asked

    def survives_at(self, step: int) -> None:
        """Note that the newest state among the surviving workers is that of ``step``."""
        self._step = min(self._step, step)

    def wait_for_periods(self, longest_s: float) -> None:
        """Wait long enough for the ranks to agree.

        Args:
            longest_s: longest time between two steps with which they agree [s].
        """
        if not self._failed:
            until = self._begun + self._patience_s + _PERIODS * longest_s
            self.deadline = max(self.deadline, until)

    def written(self, step: int, now: float) -> None:
        """Note that a worker has written its shard of the checkpoint of ``step``."""
        if step < self._step:
            return
        # The first shard alone prolongs the wait, since workers that are asked again write again.
        if self._written == math.inf and not self._failed:
            self.deadline = max(self.deadline, now + _OTHERS_S)
        self._written = min(self._written, step)

    def failed(self, now: float) -> None:
        """Note that a worker could not write a shard, so that waiting longer is of little use."""
        self._failed = True
        self.deadline = min(self.deadline, now + self._patience_s)

    def is_kept(self, newest_step: int) -> bool:
        """Return whether the checkpoint of step ``newest_step`` is the requested one or newer."""
        return newest_step >= self._written


@dataclass(frozen=True)
class Answer:
    """The answer to a request, and the event that it causes.

    Attributes:
        event: event for the machine; None: the request changes nothing there.
    """

    message: str
    event: ev.TargetChanged | ev.HostDraining | ev.HostReturned | None = None
    ok: bool = True


class Steering:
    """Steers a run.

    Args:
        run: what all parts of the leader share; requests arrive in its folder.
        fetching: says how long a checkpoint takes.
    """

    def __init__(
        self, run: LedRun, executor: Executor, stopping: Stopping, fetching: Fetching
    ) -> None:
        self._run = run
        self._executor = executor
        self._stopping = stopping
        self._fetching = fetching
        self._scaler: Scaler | None = None

    def start_policy(self, events: Iterable[ReadEvent]) -> None:
        """Let the policy of the run decide, if it has one; ``events``: those of the run so far."""
        if self._run.spec.policy == "fixed":
            return
        from hvd_elastic.leader.scaling import Scaler

        past = [*events]
        age_s = max(0.0, time.time() - past[0].t) if past else 0.0
        scaler = Scaler(self._run.spec, self._run.journal.emit, time.monotonic() - age_s, past)
        self._run.journal.listeners.append(scaler.note_event)
        self._scaler = scaler

    def let_policy_decide(self, now: float) -> None:
        """Carry out what the policy decides, if anything."""
        if self._scaler is not None and self._stopping.cause is None:
            hosts = self._run.hostfile.hosts.values()
            change = self._scaler.decide_if_due(self._executor.machine, hosts, now)
            if change is not None:
                self._executor.tell(change)

    def look_for_requests(self, only: str | None = None) -> None:
        """Carry out and answer the requests that have arrived; ``only``: none but this one."""
        for request in self._run.folder.take_requests(only):
            answer = self._answer(request.op, request.fields)
            if answer.event is not None:
                self._executor.tell(answer.event)
            done = CommandDone(request.id, request.op, answer.ok, answer.message)
            done.values = dict(request.fields)
            self._run.journal.emit(done)

    def _answer(self, op: str, fields: Mapping[str, Any]) -> Answer:
        hosts, draining = self._run.hostfile.hosts, self._executor.machine.draining
        match op:
            case "stop":
                asked = {cause.value: cause for cause in StopCause}
                self._stopping.ask(asked.get(str(fields.get("reason")), StopCause.COMMAND))
                return Answer("the run is being stopped")
            case "scale":
                run_id, wanted = self._run.folder.run_id, fields.get("np")
                return scale(wanted, self._run.spec, run_id, hosts.values(), draining, self._scaler)
            case "policy":
                return steer_policy(fields.get("do"), self._scaler)
            case "drain":
                return drain(fields, hosts, draining, self._fetching.reserve_s)
        return Answer(f"the leader knows no request {op!r}", ok=False)


def scale(
    wanted: Any,
    spec: RunSpec,
    run_id: str,
    hosts: Iterable[Host],
    draining: Collection[str],
    scaler: Scaler | None,
) -> Answer:
    """Request a number of workers; None returns the choice to the options or the policy."""
    if wanted is None and scaler is not None:
        return steer_policy("resume", scaler)
    if wanted is None:
        message = "the number of workers follows the options of the run again"
        return Answer(message, ev.TargetChanged(None))
    if not isinstance(wanted, int) or wanted < 1:
        message = f"cannot scale to {wanted!r} workers: give a whole number of 1 or more"
        return Answer(message, ok=False)
    slots = sum(host.slots for host in hosts if host.name not in draining)
    limit = min(slots, spec.max_np or slots)
    if not spec.min_np <= wanted <= limit:
        message = (
            f"cannot scale to {count(wanted, 'worker')}: this run takes "
            f"{spec.min_np} to {limit} (--min-np, --max-np and the slots of the hostfile"
            f"{' that are not drained' if draining else ''})"
        )
        return Answer(message, ok=False)
    until = ""
    if scaler is not None:
        scaler.pause(f"{count(wanted, 'worker')} wanted by hvd-elastic scale")
        until = f"; the policy is paused until: hvd-elastic scale {run_id} auto"
    return Answer(f"{count(wanted, 'worker')} wanted{until}", ev.TargetChanged(wanted))


def steer_policy(do: Any, scaler: Scaler | None) -> Answer:
    """Pause or resume the policy, depending on ``do``."""
    if scaler is None:
        message = "this run has no policy to steer: it was started with --policy fixed"
        return Answer(message, ok=False)
    if do == "pause":
        scaler.pause("asked to by hvd-elastic policy")
        return Answer("the number of workers stays as it is")
    if do == "resume":
        scaler.resume("the policy may decide again", time.monotonic())
        return Answer("the policy decides the number of workers again")
    return Answer(f"a policy can pause or resume, not {do!r}", ok=False)


def drain(
    fields: Mapping[str, Any], hosts: Collection[str], draining: Collection[str], reserve_s: float
) -> Answer:
    """Drain a host, or allow its use again.

    Args:
        hosts: names of the hosts in the hostfile.
        draining: names of the drained hosts.
        reserve_s: part of the host's remaining time that is kept for a last checkpoint and for
            ending the processes [s].
    """
    host, leave_in_s = name_as_listed(str(fields.get("host")), hosts), fields.get("leave_in_s")
    if host not in hosts:
        message = f"the hostfile has no host {host!r}; it has {', '.join(hosts)}"
        return Answer(message, ok=False)
    if fields.get("undo"):
        if host not in draining:
            return Answer(f"host {host} is not drained", ok=False)
        return Answer(f"host {host} may be used again", ev.HostReturned(host))
    is_number = isinstance(leave_in_s, (int, float)) and not isinstance(leave_in_s, bool)
    if leave_in_s is not None and not (is_number and leave_in_s >= 0):
        message = f"a host can leave in 0 seconds or more, not in {leave_in_s!r}"
        return Answer(message, ok=False)
    return Answer(
        f"the run leaves host {host}, and does not use it until it is given back",
        host_draining(host, "asked to by hvd-elastic drain", leave_in_s, reserve_s, asked=True),
    )


def host_draining(
    host: str, cause: str, leave_in_s: float | None, reserve_s: float, *, asked: bool = False
) -> ev.HostDraining:
    """Return the event that drains a host; see :func:`drain` for the arguments."""
    train_for_s = None if leave_in_s is None else max(0.0, leave_in_s - reserve_s)
    return ev.HostDraining(host, cause, train_for_s, leave_in_s, asked)
