"""The one place that waits: a queue of things that happened, and deadlines."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

__all__ = ["Loop"]


class Loop:
    """Runs posted calls one after the other in the thread that called :meth:`run`.

    Other threads only ever :meth:`post`, so what the calls touch needs no lock.

    Args:
        deadline: when the next timed call is due [monotonic seconds]; None for never. Asked
            after every call.
        on_deadline: called when it has passed.
        clock: monotonic seconds.
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
        """Have ``call`` run in the loop; from any thread and from signal handlers."""
        self._calls.put(call)

    def stop(self) -> None:
        """Return from :meth:`run` after the call that is running."""
        self._stopped = True

    def run(self) -> None:
        """Wait and call until :meth:`stop`."""
        while not self._stopped:
            due = self._deadline()
            try:
                timeout = None if due is None else max(0.0, due - self._clock())
                call = self._calls.get(timeout=timeout)
            except queue.Empty:
                self._on_deadline()
            else:
                call()
