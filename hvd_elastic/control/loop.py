"""The event loop of the leader: waits for posted calls and for the next deadline."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable


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
