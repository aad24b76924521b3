"""Stops a run on request: at the first request after a last checkpoint, at the second at once."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvd_elastic import run_events
from hvd_elastic.control.endings import StopCause
from hvd_elastic.control.events import StopRequested
from hvd_elastic.control.machine import Phase
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.wire.messages import SaveState

_CHECKPOINT_S = 10.0
"""How long a stop waits for the last checkpoint [s], beside the time to notice a frozen worker."""
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
        leads: returns whether this leader already leads the run; a takeover is awaited first.

    Attributes:
        cause: why the run is to stop; None: it is not.
    """

    def __init__(self, run: LedRun, executor: Executor, leads: Callable[[], bool]) -> None:
        self._run = run
        self._executor = executor
        self._leads = leads
        self._last: LastCheckpoint | None = None
        """The last checkpoint, while it is waited for."""
        self.cause: StopCause | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop the run at signals, unless nohup has a hang-up ignored; afterwards ignore them."""

        def ask(number: int, _: Any) -> None:
            cause = _SIGNALS[signal.Signals(number)]
            self._run.loop.post(functools.partial(self.ask, cause))

        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread, which is the caller's
            return
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
        if self.cause is None or self._executor.finish is not None or not self._leads():
            return  # a run that has ended waits only for what is to be fetched
        progress, now = self._run.progress, time.monotonic()
        if self._run.spec.checkpoint_every_s and (progress.reached.step or not progress.is_known):
            # The others cannot reach a step boundary until a frozen worker counts as lost.
            patience_s = _CHECKPOINT_S + self._run.spec.failure_timeout_s
            self._last = LastCheckpoint(now, patience_s, step=progress.reached.step)
            self.look(now)
        else:
            self._stop_now()

    def look(self, now: float) -> None:
        """Ask for the last checkpoint, or give it up; called often while this leader leads."""
        if self._last is None:
            return
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
            self._last.written(step)

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
        patience_s: how long to wait for it [s].
        step: last step that is known to be done; 0 if unknown. Only a checkpoint of this step or
            a later one counts.

    >>> last = LastCheckpoint(0.0, 15.0, step=90)
    >>> last.whom_to_ask(["rank 0", "rank 1"], 0.0), last.whom_to_ask(["rank 0", "rank 1"], 1.0)
    (['rank 0'], [])
    >>> last.whom_to_ask(["rank 1"], 2.0)
    ['rank 1']
    >>> last.written(90)
    >>> last.is_kept(60), last.is_kept(90)
    (False, True)
    """

    def __init__(self, now: float, patience_s: float, *, step: int) -> None:
        self.deadline = now + patience_s
        self._step = step
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

    def written(self, step: int) -> None:
        """Note that a worker has written its shard of the checkpoint of ``step``."""
        if step >= self._step:
            self._written = min(self._written, step)

    def is_kept(self, newest_step: int) -> bool:
        """Return whether the checkpoint of step ``newest_step`` is the requested one or newer."""
        return newest_step >= self._written
