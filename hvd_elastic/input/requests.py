"""The batches of an epoch as a rank takes them: not asked for yet, asked for, read, or to be read.

No thread and no connection is here; :class:`~hvd_elastic.input.reader.InputReader` calls
this under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_elastic.input.link import Want


class Asked(Protocol):
    """A process that is asked for batches.

    Attributes:
        host: name of its host; empty: it is one of the rank's own.
        is_late: whether it was late and has not answered since.
    """

    host: str
    is_late: bool


@dataclass
class Request:
    """A batch that was asked for.

    Attributes:
        want: what was asked for.
        sent_at: when [s].
        by: who was asked for it; None: nobody yet.
        is_repeated: whether it was asked for once more elsewhere.
        is_trial: whether the rank reads it too, to see how long it takes alone.
    """

    want: Want
    sent_at: float = 0.0
    by: Asked | None = None
    is_repeated: bool = False
    is_trial: bool = False

    @property
    def host(self) -> str:
        """Name of the input host that was asked for it; empty: none."""
        return self.by.host if self.by is not None else ""

    @property
    def is_with_a_late_process(self) -> bool:
        """Return whether who was asked for it has been late and has not answered since."""
        return self.by is not None and self.by.is_late


class Requests:
    """Numbers the batches of a rank, and holds those that it has not taken yet.

    Attributes:
        epoch: number of the epoch that is read.
        next: number of the batch that the rank takes next.
        is_over: whether all passes were asked for.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.next = 0
        self.is_over = False
        self._passes: Iterator[list[int]] = iter(())
        self._asked = 0
        """Number of the batch to ask for next."""
        self._again: deque[Request] = deque()
        self._open: dict[int, Request] = {}
        self._ready: dict[int, tuple[Any, list[int]]] = {}
        self._failed: dict[int, tuple[Request, str]] = {}

    def begin_passes(self, epoch: int, passes: Iterator[list[int]]) -> None:
        """Begin with other passes; what was asked for is dropped, also if it comes later."""
        self.epoch, self._passes = epoch, passes
        self.next = self._asked
        self.is_over = False
        for each in (self._again, self._open, self._ready, self._failed):
            each.clear()

    # -- the rank ----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch was read."""
        return self.next in self._ready

    def pop(self) -> tuple[Any, list[int]]:
        """Return the next batch and its indices; it was read."""
        self.next += 1
        return self._ready.pop(self.next - 1)

    def to_read_here(self, *, has_readers: bool) -> Request | None:
        """Return the request for the next batch if the rank has to read it itself, else None.

        Args:
            has_readers: whether there is a process that reads in time.

        Raises:
            StopIteration: the epoch is over.
        """
        if self.next in self._failed:
            return self._failed[self.next][0]
        if self.is_over and self.next >= self._asked:
            raise StopIteration
        if has_readers:
            return None
        for request in self._again:
            if request.want.number == self.next:
                self._again.remove(request)
                return request
        if self.next < self._asked:
            asked = self._open.get(self.next)
            if asked is not None and asked.is_with_a_late_process:
                return asked
            return None  # its process is just lost, and gives it back
        new = self._ask()
        if new is None:
            raise StopIteration
        return new

    def trial(self) -> Request | None:
        """Return the request for the next batch, to be read by the rank too; None: there is none.

        Who was asked for it may answer later, for nothing.
        """
        request = self._open.get(self.next)
        if request is not None:
            request.is_trial = True
        return request

    def was_read_here(self) -> tuple[Request, str] | None:
        """Go on after a batch that the rank has read itself.

        Returns:
            The request for it that has failed elsewhere, and the error; None: none has.
        """
        number, self.next = self.next, self.next + 1
        self._open.pop(number, None)
        self._ready.pop(number, None)
        return self._failed.pop(number, None)

    def late(self, now: float, late_s: float) -> list[Request]:
        """Have the next batch asked for once more if it is late.

        Args:
            now: time [s].
            late_s: time after which an answer is late [s].

        Returns:
            The request for it, and then all others that are late by now; empty: it is not late.
            If it waits to be asked for once more: those late by now whose process is not yet
            known to be, since none may be left that asks.
        """
        request = self._open.get(self.next)
        overdue = [each for each in self._open.values() if now - each.sent_at >= late_s]
        if any(each.want.number == self.next for each in self._again):
            return [each for each in overdue if not each.is_with_a_late_process]
        if request is None or request.is_repeated:
            return []
        if now - request.sent_at < late_s and not request.is_with_a_late_process:
            return []
        request.is_repeated = True
        self._again.appendleft(Request(request.want))
        return [request, *(each for each in overdue if each is not request)]

    # -- who reads ---------------------------------------------------------------------------

    def take_request(self, by: Asked, now: float, window: int) -> Request | None:
        """Return what a process is to read next; None: nothing now.

        Args:
            now: time [s].
            window: most batches that the rank has ahead.
        """
        request: Request | None = None
        while request is None and self._again:
            request = self._again.popleft()
            if not self._is_wanted(request):
                request = None
        if request is None and not self.is_over and self._asked - self.next < window:
            request = self._ask()
        if request is not None:
            request.sent_at, request.by = now, by
            self._open[request.want.number] = request
        return request

    def answered(self, request: Request, batch: Any, indices: list[int]) -> None:
        """Hold a batch for the rank, unless it has come from elsewhere."""
        if self._is_wanted(request):
            self._open.pop(request.want.number, None)
            self._ready[request.want.number] = batch, indices

    def failed(self, request: Request, error: str) -> None:
        """Have the rank itself read a batch that a process could not read."""
        if self._is_wanted(request):
            self._failed[request.want.number] = request, error

    def lost(self, requests: Sequence[Request]) -> None:
        """Have others read what a lost process was asked for."""
        for request in reversed(requests):
            if self._is_wanted(request):
                self._open.pop(request.want.number, None)
                self._again.appendleft(Request(request.want))

    def _ask(self) -> Request | None:
        """Return the request for the next pass; None: there is none."""
        try:
            indices = next(self._passes)
        except StopIteration:
            self.is_over = True
            return None
        self._asked += 1
        return Request(Want(self._asked - 1, self.epoch, list(indices)))

    def _is_wanted(self, request: Request) -> bool:
        return self.next <= request.want.number not in self._ready
