"""A thread for each process that reads for a rank: it connects to it and asks it for batches."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_elastic import __version__
from hvd_elastic.input.answer_times import mean
from hvd_elastic.input.link import Batch, Failed, Link, LinkError, Offer, connect
from hvd_elastic.input.requests import Request
from hvd_elastic.input.server import LocalReader
from hvd_elastic.worker.checks.data_digest import ALIKE, difference
from hvd_elastic.worker.input_source import Source

DEPTH = 2
"""Requests for each process: while it sends the answer to one, it reads the next."""
_LONG_REQUEST = 4096
"""Indices of a request above which no second one is sent: both sides would send and none read."""
_END_S = 10.0
"""Longest wait for the end of a process that has closed its link [s]."""
_AGAIN_S = 2.0
"""Time between two attempts to connect to a process of an input host [s]."""


class Peer(Protocol):
    """A process that reads."""

    @property
    def host(self) -> str:
        """Name of its host; empty: it is one of the rank's own."""

    def open(self) -> Link:
        """Connect to it."""

    def has_failed(self) -> bool:
        """Return whether it has ended by an error, or was killed."""


@dataclass(frozen=True)
class InputProcess:
    """A process of an input host that reads.

    Attributes:
        host: name of the host.
        address, port: where it listens.
        certificate: certificate of the run.
    """

    host: str
    address: str
    port: int
    certificate: str = field(repr=False)

    def open(self) -> Link:
        return connect(self.address, self.port, self.certificate, f"input host {self.host}")

    def has_failed(self) -> bool:
        """See :class:`Peer`; the leader watches the processes of input hosts."""
        return False


class OwnProcess:
    """A process of the rank's own."""

    host = ""

    def __init__(self, local: LocalReader) -> None:
        self._local = local

    def open(self) -> Link:
        """Return the link to it."""
        return self._local.link

    def has_failed(self) -> bool:
        """See :class:`Peer`."""
        process = self._local.process
        process.join(_END_S)
        # multiprocessing ends its processes by SIGTERM when this one exits.
        return process.exitcode not in (None, 0, -signal.SIGTERM)


class Asks(Protocol):
    """The reader of a rank, as its threads call it; see :class:`reader.InputReader`.

    Attributes:
        source: what is read.
    """

    source: Source

    def take_request(self, thread: AskingThread, *, wait: bool) -> Request | None:
        """Return what a process is to read next; None: nothing now, or it is not needed further."""

    def answered(self, request: Request, answer: Batch, buffers: Sequence[memoryview]) -> None:
        """Take the batch in these buffers, which a process has read."""

    def failed(self, request: Request, error: str) -> None:
        """Have the rank itself read a batch that a process could not read."""

    def lost(self, requests: Sequence[Request]) -> None:
        """Have others read what a lost process was asked for."""

    def no_use(self, host: str, why: str) -> None:
        """Stop using an input host, and warn of the reason."""

    def process_failed(self) -> None:
        """Warn that a process of the rank's own has failed."""

    def changed(self) -> None:
        """Have the rank look again whether a process can read."""

    def pause(self, thread: AskingThread, seconds: float) -> None:
        """Wait before a process is connected to again, unless it is not needed further."""


class AskingThread:
    """Asks one process for batches.

    Args:
        reader: the reader of the rank.
        peer: the process.

    Attributes:
        host: name of its host; empty: it is one of the rank's own.
        is_connected: whether it answers.
        is_stopped: whether it is not needed further.
        is_late: whether it was late and has not answered since.
        batch_s: time that it takes for a batch, the way included [s]; not a number: not known.
    """

    def __init__(self, reader: Asks, peer: Peer) -> None:
        self._reader = reader
        self._peer = peer
        self._link: Link | None = None
        self.host = peer.host
        self.is_connected = not peer.host
        self.is_stopped = self.is_late = False
        self.batch_s = math.nan
        self._free_at = 0.0
        """When it has answered last [s]."""

    @property
    def reads(self) -> bool:
        """Return whether it answers in time."""
        return self.is_connected and not self.is_late

    def stop(self) -> None:
        """Have the thread end soon."""
        self.is_stopped = True
        link = self._link
        if link is not None:
            link.cut()

    def run(self) -> None:
        """Connect, again after a failure, and ask for batches until there is no need."""
        while not self.is_stopped:
            open_requests: deque[Request] = deque()
            self.is_late = False
            try:
                self._link = self._peer.open()
                if self.is_stopped:
                    self._link.cut()
                self._converse(self._link, open_requests)
            except (OSError, LinkError):
                pass
            finally:
                self.is_connected = False
                if self._link is not None:
                    self._link.close()
                self._reader.lost(open_requests)
            if not self.host:
                if not self.is_stopped and self._peer.has_failed():
                    self._reader.process_failed()
                return
            self._reader.pause(self, _AGAIN_S)

    def _converse(self, link: Link, open_requests: deque[Request]) -> None:
        reader = self._reader
        offer, _ = link.receive()
        unfit = _unfit(offer, reader.source)
        if unfit:
            reader.no_use(self.host, unfit)
            return
        self.is_connected = True
        reader.changed()
        while not self.is_stopped:
            while len(open_requests) < DEPTH:
                if open_requests and len(open_requests[0].want.indices) > _LONG_REQUEST:
                    break
                request = reader.take_request(self, wait=not open_requests)
                if request is None:
                    break
                open_requests.append(request)
                link.send(request.want)
            if not open_requests:
                return
            answer, buffers = link.receive()
            request = open_requests[0]
            self._note_answer(request)
            if getattr(answer, "number", None) != request.want.number:
                raise LinkError(f"{self.host or 'a loader process'} answered out of turn")
            match answer:
                case Batch():
                    reader.answered(request, answer, buffers)
                case Failed(error=error):
                    reader.failed(request, error)
            open_requests.popleft()

    def _note_answer(self, request: Request) -> None:
        now = time.monotonic()
        self.batch_s = mean(self.batch_s, now - max(self._free_at, request.sent_at))
        self._free_at = now


def _unfit(offer: Any, source: Source) -> str:
    """Return why a process that makes this offer is not to be used; empty: it is."""
    if not isinstance(offer, Offer):
        return "it does not speak this protocol"
    if offer.version != __version__:
        return f"it has hvd_elastic {offer.version}, and this host {__version__}"
    if offer.examples != source.examples:
        return (
            f"its data set has {offer.examples} examples, and that of this host {source.examples}: "
            "copy the same data there (copyclust)"
        )
    if field := difference(source.fields, offer.fields):
        return f"its data set differs from that of this host in {field!r}. {ALIKE}"
    return ""
