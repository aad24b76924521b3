"""The led run, which all parts of a leader share."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_elastic.control.progress import Position
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import shown_line
from hvd_elastic.leader.agents.agents import Agents
from hvd_elastic.leader.failover.fencing import Fence
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.events import append_event
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import Event, Output, Warned

Show = Callable[[Event], None]
ShowOutput = Callable[[str, int, str], None]


class Journal:
    """Writes the events of a run, the examples that it read, and the output of rank 0.

    Args:
        show_output: called with (host, local rank, line) for each line that rank 0 prints.

    Attributes:
        recorded_step: last step whose examples are recorded; None: there is none.
    """

    def __init__(
        self, folder: RunFolder, show: Show, show_output: ShowOutput, *, audit: bool
    ) -> None:
        self._events = EventLog(folder.events)
        self._audit = EventLog(folder.audit) if audit else None
        self._output = EventLog(folder.output)
        self._show = show
        self._show_output = show_output
        self.listeners = [show]
        self.recorded_step: int | None = None

    def emit(self, event: Event) -> None:
        """Record an event and pass it to the listeners, even if it cannot be written to disk."""
        try:
            append_event(self._events, event)
        except RunError as error:
            self._show(Warned(str(error), t=event.t, mono=event.mono))
        for listen in self.listeners:
            listen(event)

    def warn(self, message: str) -> None:
        self.emit(Warned(message))

    def read(self, kind: str, fields: Mapping[str, Any], *, late: bool = False) -> None:
        """Record which examples were read, or that a checkpoint was restored, if audited.

        Args:
            late: whether it was read before the agent that tells it was started.
        """
        if self._audit is None:
            return
        try:
            self._audit.append(kind, fields)
        except RunError as error:
            self.warn(str(error))
        else:
            if not late:
                self.recorded_step = fields.get("step", self.recorded_step)

    def output(self, host: str, local_rank: int, line: str) -> None:
        """Record and show a line that rank 0 printed."""
        line = shown_line(line)
        self._show_output(host, local_rank, line)
        with contextlib.suppress(RunError):  # the event log warns about the disk
            append_event(self._output, Output(host, local_rank, line))

    def close(self) -> None:
        for log in (self._events, self._audit, self._output):
            if log is not None:
                log.close()


class Loop:
    """Runs posted calls one after the other in the thread that called :meth:`run`.

    Other threads only use :meth:`post`, so data that the calls use needs no lock.

    Args:
        deadline: returns when ``on_deadline`` is due [monotonic s], None for never; called after
            every call.
        on_deadline: called when that time has passed.
        clock: returns the time [monotonic s].
    """

    def __init__(
        self,
        deadline: Callable[[], float | None],
        on_deadline: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deadline = deadline
        self._on_deadline = on_deadline
        self._clock = clock
        self._stopped = False

    def post(self, call: Callable[[], None]) -> None:
        """Schedule ``call`` in the loop; may be used from any thread and from signal handlers."""
        self._calls.put(call)

    def stop(self) -> None:
        """End :meth:`run` after the current call."""
        self._stopped = True

    def run(self) -> None:
        """Wait for calls and deadlines, and run them, until :meth:`stop`."""
        while not self._stopped:
            due = self._deadline()
            timeout = None if due is None else max(0.0, due - self._clock())
            if timeout == 0.0:
                self._on_deadline()  # calls may come without a pause, so it does not wait for one
                if self._stopped:
                    return
            try:
                call = self._calls.get(timeout=timeout)
            except queue.Empty:
                continue
            call()


_START = Position(0, 0, 0, 0)  # before the first step


@dataclass
class TrainingProgress:
    """The progress of training as far as the leader knows it.

    Attributes:
        is_exact: whether training has not gone on from there, as far as is known: metrics come less
            often than steps, and who crashes tells nothing more.
        written: position of the newest checkpoint of which a worker has written its shard.
        is_known: False after a takeover of workers, until they report their position.
        stopped: why the script has ended training early; empty: it has not.
    """

    reached: Position = _START
    is_exact: bool = True
    written: Position = _START
    is_known: bool = True
    stopped: str = ""

    def passed(self, progress: Position) -> None:
        """Note where training is while it continues.

        Metrics that a script reports after its last step say nothing of a further one.
        """
        if progress != self.reached:
            self.reached, self.is_exact = progress, False

    def ended_at(self, progress: Position | None) -> None:
        """Note where a worker has ended its part, unless another one was further."""
        if progress is not None and progress.step >= self.reached.step:
            self.reached, self.is_exact = progress, True


@dataclass(frozen=True)
class LedRun:
    """A run as the parts of its leader share it; all of it is used in the leader's loop.

    Attributes:
        folder: run folder, whose lock this process holds.
        fence: identity of this leader, and whether it has to end for another one.
        journal: records events, readings of the dataset, and the output of rank 0.
    """

    spec: RunSpec
    folder: RunFolder
    fence: Fence
    loop: Loop
    journal: Journal
    hostfile: HostfileWatch
    agents: Agents
    workers: Workers
    readers: InputHosts
    progress: TrainingProgress = field(default_factory=TrainingProgress)
