"""Records the events of a run in its folder and passes them on to be shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from hvd_elastic.errors import RunError
from hvd_elastic.formatting import shown_line
from hvd_elastic.records.events import append_event
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import Event, Output, Warned

Show = Callable[[Event], None]
ShowOutput = Callable[[str, int, str], None]


class Journal:
    """Writes the events of a run, the examples that it read, and the output of rank 0.

    Args:
        folder: run folder.
        show: called with every event, to display it.
        show_output: called with (host, local rank, line) for each line that rank 0 prints.
        audit: whether to record which examples were read.

    Attributes:
        listeners: functions that are called with every event.
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
        """Record a warning."""
        self.emit(Warned(message))

    def read(self, kind: str, fields: Mapping[str, Any], *, late: bool = False) -> None:
        """Record which examples were read, or that a checkpoint was restored, if audited.

        Args:
            kind, fields: of the record.
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
        """Close all files."""
        for log in (self._events, self._audit, self._output):
            if log is not None:
                log.close()
