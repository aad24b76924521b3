"""Show a run on the terminal: a line for each important event, and a line of progress.

On a terminal the progress line stays at the bottom and is redrawn. Elsewhere (a file, a pipe, CI)
it is printed every few seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TextIO

from msgspec import structs

from hvd_elastic import run_events as ev
from hvd_elastic.formatting import count, duration_words, printable, unfiltered, worker_name
from hvd_elastic.records.events import as_record
from hvd_elastic.records.wording import Line, Narrator, progress_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

PLAIN_INTERVAL_S = 5.0
REDRAW_INTERVAL_S = 0.1
_REMEMBERED = 100
"""Lines of output that are remembered, so that a failure is not told twice."""
_MOST_WAITING, _PATIENCE_S = 10_000, 1.0
"""Most lines of output that wait for a terminal, and how long another one waits for room [s]."""

_STYLES = {
    "good": "green",
    "bad": "red",
    "change": "cyan",
    "note": "yellow",
    "plain": "",
}


class RunView(AbstractContextManager["RunView"]):
    """Shows the events of a run as they come; call :meth:`close` at the end.

    Args:
        stream: stream to write to; None: stdout.
        live: whether to keep a progress line at the bottom; None: if ``stream`` is a terminal.
        interval_s: time between printed progress lines without a live line [s].
        clock: monotonic clock [s].
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.RLock()
        self._narrator = Narrator()
        self._metrics: dict[str, Any] = {}
        self._size = 0
        self._started: float | None = None
        self._state = ""
        self._plain = False
        self._rescaling_to: int | None = None
        self._rescaling_generation = 0
        self._outputs: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        self._shown_at = float("-inf")
        self._unshown = False
        self._console: Console | None = None
        self._live: Live | None = None
        if self._stream.isatty() if live is None else live:
            self._start_live(force=live is True)

    def show(self, event: ev.ReadEvent) -> None:
        """Show one event, if it is important, and the progress."""
        with self._lock:
            event = self._without_repetition(event)
            before = self._state
            ended = isinstance(event, ev.RunFinished)
            lines = self._narrator.tell(event)
            if self._unshown and (ended or (lines and self._live is None)):
                # Print the progress before the event that ends or changes it. At the end of the run
                # it gets the time of the end, since output of the script may come before.
                self._print_progress(event.t if ended else self._metrics.get("t"))
            self._show_event(event)
            for line in lines:
                self._print(line, event.t)
            if not ended and (isinstance(event, ev.Metrics) or self._state != before):
                self._show_progress(at_once=self._state != before)

    def print(self, text: str) -> None:
        """Print another line above the progress line."""
        with self._lock:
            self._print(Line(text), None)

    def output(self, host: str, local_rank: object, line: str) -> None:
        """Print a line that a worker has printed."""
        self._outputs.append((worker_name(host, local_rank), line.strip()))
        self.print(f"[{host}:{local_rank}] {line}")

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Show the last progress and release the terminal; further calls do nothing."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None
            if self._unshown:
                self._print_progress(self._metrics.get("t"))

    # ------------------------------------------------------------------------------------------

    def _without_repetition(self, event: ev.ReadEvent) -> ev.ReadEvent:
        """Return a failure with its last line alone if the worker itself has printed them all."""
        if isinstance(event, ev.ScriptFailed):
            last = event.traceback.rstrip().rpartition("\n")[2]
            worker = worker_name(event.host, event.local_rank)
            if (worker, last.strip()) in self._outputs:
                return structs.replace(event, traceback=last)
        return event

    def _start_live(self, *, force: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(
            file=unfiltered(self._stream), force_terminal=True if force else None, highlight=False
        )
        # Redrawn when events come instead of by a thread, since training needs the cores.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def _show_event(self, event: ev.ReadEvent) -> None:
        match event:
            case ev.RunStarted():
                self._started, self._plain = event.t, event.plain
                self._state = "starting"
            case ev.WorkerStarted() if self._plain:
                self._state = ""
            case ev.Metrics(size=size):
                # Metrics of an evaluation lack values that those of a step have: keep the newest.
                self._metrics.update(as_record(event))
                self._unshown = True
                if size == self._rescaling_to:
                    # A script that takes no further step never reports the end of the rescale.
                    self._rescaled(size)
            case ev.RescaleStarted(from_size=before, to_size=after):
                self._rescaling_to, self._rescaling_generation = after, event.generation
                self._state = f"rescaling {before} → {after}"
            case ev.RescaleFinished(generation=generation, size=size):
                if self._rescaling_to is None or generation == self._rescaling_generation:
                    self._rescaled(size)
            case ev.Waiting():
                self._state = "waiting"
            case ev.StopRequested():
                self._state = "stopping"
            case ev.RunFinished():
                self._state = ""

    def _rescaled(self, size: int) -> None:
        self._size = size
        self._rescaling_to = None
        self._state = ""

    def _show_progress(self, *, at_once: bool) -> None:
        now = self._clock()
        if self._live is not None:
            if at_once or now - self._shown_at >= REDRAW_INTERVAL_S:
                self._shown_at = now
                self._live.update(self._progress_text(), refresh=True)
        elif self._unshown and now - self._shown_at >= self._interval_s:
            self._print_progress(self._metrics.get("t"))

    def _print_progress(self, t: Any) -> None:
        self._unshown = False
        self._shown_at = self._clock()
        words = progress_words(self._metrics, self._size)
        if words:
            self._print(Line(words), t)

    def _progress_text(self) -> Text:
        from rich.text import Text

        parts = [progress_words(self._metrics, self._size)]
        t = self._metrics.get("t")
        if self._started is not None and t is not None:
            parts.append(duration_words(max(0.0, t - self._started)))
        text = Text(no_wrap=True, overflow="ellipsis")
        if self._state:  # first, so that a narrow window does not cut it off
            text.append(printable(f"{self._state} …  "), "bold yellow")
        return text.append(printable(" · ".join(part for part in parts if part)), "bold")

    def _print(self, line: Line, t: Any) -> None:
        stamp = time.strftime("%H:%M:%S  ", time.localtime(t)) if t is not None else ""
        shown = printable(line.text)
        if self._console is not None:
            from rich.text import Text

            text = Text().append(stamp, "dim").append(shown, _STYLES[line.tone])
            self._console.print(text, soft_wrap=True)
        else:
            self._stream.write(f"{stamp}{shown}\n")
            self._stream.flush()


class LastingView(RunView):
    """A view for processes that must continue whatever becomes of their output, such as a leader.

    After a closed window, a pipe whose reader is gone or a full disk, output is lost. A thread
    writes it, so a terminal that is held (Ctrl-S) or a pager that reads no further holds nothing
    up: output waits, and lines beyond ``_MOST_WAITING`` are left out, with a note.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        super().__init__(stream, live=live)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_held = False
        self._left_out = 0
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._writer.start()

    def show(self, event: ev.ReadEvent) -> None:
        self._calls.put(functools.partial(super().show, event))

    def print(self, text: str, *, keep: bool = False) -> None:
        """Print another line above the progress line.

        Args:
            keep: never leave it out.
        """
        if not (keep or self._has_room()):
            self._left_out += 1
            return
        self._note_left_out()
        self._calls.put(functools.partial(super().print, text))

    def close(self) -> None:
        self._note_left_out()
        self._calls.put(None)
        self._writer.join()

    def _has_room(self) -> bool:
        """Return whether another line may wait, which takes a moment where many are written."""
        end = time.monotonic() + (0.0 if self._is_held else _PATIENCE_S)
        while self._calls.qsize() >= _MOST_WAITING:
            if time.monotonic() >= end:
                self._is_held = True
                return False
            time.sleep(0.01)
        self._is_held = False
        return True

    def _note_left_out(self) -> None:
        if self._left_out:
            lines, self._left_out = count(self._left_out, "line"), 0
            text = f"… {lines} left out here, where nobody read; hvd-elastic logs has them"
            self._calls.put(functools.partial(super().print, text))

    def _write(self) -> None:
        while (call := self._calls.get()) is not None:
            with unless_nobody_reads():
                call()
        with unless_nobody_reads():
            super().close()


@contextlib.contextmanager
def unless_nobody_reads() -> Iterator[None]:
    """Ignore errors of output inside the context.

    If stdout or stderr lead to a closed window or to a pipe without a reader, they are redirected
    to /dev/null, so that later output, also at the end of the interpreter, does not fail.
    """
    try:
        yield
    except (OSError, SystemExit):  # rich exits where a pipe is broken
        ends = select.poll()
        for descriptor in (1, 2):
            ends.register(descriptor, 0)
        for descriptor, found in ends.poll(0):
            if found & (select.POLLERR | select.POLLHUP):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
