"""Gives a rank its batches in order, from processes of its own and of input hosts.

Each process is asked for another batch as soon as it has answered, so all share the work by their
speed. At most a few batches for each process are asked for ahead of the one that the rank takes
next, which bounds the memory and holds fast processes back. What a lost process had to read is
read by another one, or by the rank itself if there is none.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from hvd_elastic import __version__
from hvd_elastic.training.input.link import Batch, Failed, Link, LinkError, Offer, Want, connect
from hvd_elastic.training.input.server import LocalReader, Source

_DEPTH = 2
"""Requests for each process: while it sends the answer to one, it reads the next."""
_AHEAD_BYTES = 1 << 30
"""Size of all batches that a rank may have ahead [bytes], but four of them."""
_LONG_REQUEST = 4096
"""Indices of a request above which no second one is sent: both sides would send and none read."""
_AGAIN_S = 2.0
"""Time between two attempts to connect to a process of an input host [s]."""
_LATE_FACTOR = 4.0
"""Multiple of the usual time for an answer after which a batch is asked for once more."""
_LATE_AT_LEAST_S = 0.5
_FIRST_ANSWER_S = 5.0
"""Time for an answer that is taken as usual before the first [s]: files are opened, code loaded."""
_KEPT = 64
"""Latest answers whose time is kept."""
_LATE_LIMIT = 8
"""Late answers of a host, more than those in time, after which it is not used any more."""


@dataclass(frozen=True)
class InputServer:
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


@dataclass
class _Request:
    """A batch that was asked for."""

    want: Want
    sent_at: float = 0.0
    by: _ReadingThread | None = None
    """Who was asked for it; None: nobody yet."""
    is_repeated: bool = False

    @property
    def host(self) -> str:
        """Name of the input host that was asked for it; empty: none."""
        return self.by.host if self.by is not None else ""

    @property
    def is_with_a_late_process(self) -> bool:
        """Whether who was asked for it has been late and has not answered since."""
        return self.by is not None and self.by.is_late


class _Peer(Protocol):
    """A process that reads."""

    host: str

    def open(self) -> Link:
        """Connect to it."""

    def has_failed(self) -> bool:
        """Return whether it has ended by an error, or was killed."""


class InputReader:
    """Reads the batches of one rank.

    Args:
        source: what is read.
        warn: called with a problem of an input host, from any thread.

    Attributes:
        processes: number of processes of the rank's own.
    """

    def __init__(self, source: Source, processes: int, warn: Callable[[str], None]) -> None:
        self.processes = processes
        self._source = source
        self._warn = warn
        self._change = threading.Condition()
        self._threads: dict[InputServer | int, _ReadingThread] = {}
        self._locals: list[LocalReader] = []
        self._passes: Iterator[list[int]] = iter(())
        self._epoch = 0
        self._is_over = False
        """Whether all passes were asked for."""
        self._next = self._asked = 0
        """Number of the batch that the rank takes next, and of the one to ask for next."""
        self._again: deque[_Request] = deque()
        self._open: dict[int, _Request] = {}
        self._ready: dict[int, tuple[Any, list[int]]] = {}
        self._failed: dict[int, tuple[_Request, str]] = {}
        self._took_s: deque[float] = deque(maxlen=_KEPT)
        self._health: dict[str, list[int]] = {}
        """Answers in time and late answers by host."""
        self._refused: set[str] = set()
        self._helped_s = 0.0
        self._batch_bytes = 0
        """Size of the last batch that was read elsewhere [bytes]."""

    # -- the rank ----------------------------------------------------------------------------

    def use(self, servers: Sequence[InputServer]) -> None:
        """Read from these processes of input hosts, and no others, beside the rank's own."""
        with self._change:
            self._refused &= {server.host for server in servers}  # one that comes back is tried
            wanted = {server for server in servers if server.host not in self._refused}
            gone = [key for key in self._threads if not isinstance(key, int) and key not in wanted]
            for key in gone:
                self._threads.pop(key).stop()
            for server in wanted - self._threads.keys():
                self._start(server, _Remote(server))
            self._change.notify_all()

    def begin(self, epoch: int, passes: Iterator[list[int]]) -> None:
        """Begin to read an epoch from another place; batches that were asked for are dropped.

        Args:
            epoch: number of the epoch.
            passes: dataset indices of the passes of this rank, in order.
        """
        with self._change:
            self._epoch, self._passes = epoch, passes
            self._next = self._asked
            self._is_over = False
            self._again.clear()
            self._open.clear()
            self._ready.clear()
            self._failed.clear()
            self._change.notify_all()
        if not self._locals:
            # Forked by the main thread, like the processes of a loader.
            self._locals = [LocalReader(self._source, n) for n in range(self.processes)]
            with self._change:
                for number, local in enumerate(self._locals):
                    self._start(number, _Local(local))

    def next(self) -> tuple[Any, list[int]]:
        """Return the next batch and its indices; waits for it.

        Raises:
            StopIteration: the epoch is over.
            Exception: what the script's data set raised, also in this process.
        """
        with self._change:
            number = self._next
            request = self._wait_for(number)
            if request is None:
                self._next += 1
                self._change.notify_all()
                return self._ready.pop(number)
        batch = self._source.make_here(self._epoch, request.want.indices)
        with self._change:
            self._next += 1
            self._open.pop(number, None)
            self._ready.pop(number, None)
            failed = self._failed.pop(number, None)
            self._change.notify_all()
        if failed is not None and failed[0].host:
            self.no_use(failed[0].host, f"it cannot read what this host can: {failed[1]}")
        return batch, request.want.indices

    def pids(self) -> list[int]:
        """Return the process ids of the rank's own processes."""
        return [local.process.pid for local in self._locals if local.process.pid is not None]

    def helpers(self) -> tuple[int, float]:
        """Return the number of processes of input hosts that read, and their processor time [s]."""
        remote = [each for each in self._threads.copy().values() if each.host]
        return sum(each.is_connected for each in remote), self._helped_s

    def close(self) -> None:
        """End the rank's own processes and all connections."""
        with self._change:
            for thread in self._threads.values():
                thread.stop()
            self._threads.clear()
            self._passes = iter(())
            self._ready.clear()
            self._again.clear()
            self._change.notify_all()
        for local in self._locals:
            local.close()
        self._locals = []

    def _wait_for(self, number: int) -> _Request | None:
        """Wait for a batch; return the request if this process has to read it itself."""
        while number not in self._ready:
            request = self._to_read_here(number)
            if request is not None:
                return request
            self._repeat_if_late(number)
            self._change.wait(_LATE_AT_LEAST_S / 2)
        return None

    def _to_read_here(self, number: int) -> _Request | None:
        """Return the request for a batch if this process has to read it itself."""
        if number in self._failed:
            return self._failed[number][0]
        if self._is_over and number >= self._asked:
            raise StopIteration
        if any(thread.reads for thread in self._threads.values()):
            return None
        for request in self._again:
            if request.want.number == number:
                self._again.remove(request)
                return request
        if number < self._asked:
            asked = self._open.get(number)
            if asked is not None and asked.is_with_a_late_process:
                return asked
            return None  # its process is just lost, and gives it back
        asked = self._ask()
        if asked is None:
            raise StopIteration
        return asked

    def _repeat_if_late(self, number: int) -> None:
        """Have another process read a batch that is late."""
        request = self._open.get(number)
        if request is None or request.is_repeated:
            return
        usual_s = median(self._took_s) if self._took_s else _FIRST_ANSWER_S
        late_s = max(_LATE_AT_LEAST_S, _LATE_FACTOR * usual_s)
        is_late = time.monotonic() - request.sent_at >= late_s
        if not (is_late or request.is_with_a_late_process):
            return
        request.is_repeated = True
        now = time.monotonic()
        for each in self._open.values():  # processes of one host are late together
            if each.by is not None and (each is request or now - each.sent_at >= late_s):
                each.by.is_late = True
        self._again.appendleft(_Request(request.want))
        self._change.notify_all()
        if request.host:
            health = self._health.setdefault(request.host, [0, 0])
            health[1] += 1
            if health[1] >= _LATE_LIMIT and health[1] > health[0]:
                self.no_use(
                    request.host,
                    f"most of its answers take longer than {late_s:.1f} s, which is "
                    f"{_LATE_FACTOR:g} times as long as those of others: its link or its cores "
                    "are too slow",
                )

    def no_use(self, host: str, why: str) -> None:
        """Stop using an input host, and warn of the reason."""
        with self._change:
            if host in self._refused:
                return
            self._refused.add(host)
            gone = [key for key in self._threads if not isinstance(key, int) and key.host == host]
            for key in gone:
                self._threads.pop(key).stop()
            self._change.notify_all()
        self._warn(f"input host {host} is not used: {why}")

    # -- the threads -------------------------------------------------------------------------

    def _start(self, key: InputServer | int, peer: _Peer) -> None:
        thread = _ReadingThread(self, peer)
        self._threads[key] = thread
        threading.Thread(target=thread.run, name="hvd_elastic-input", daemon=True).start()

    def _ask(self) -> _Request | None:
        """Return the request for the next batch of the epoch; None: there is none."""
        try:
            indices = next(self._passes)
        except StopIteration:
            self._is_over = True
            self._change.notify_all()
            return None
        request = _Request(Want(self._asked, self._epoch, list(indices)))
        self._asked += 1
        return request

    @property
    def _window(self) -> int:
        fit = _AHEAD_BYTES // max(self._batch_bytes, 1)
        return min(_DEPTH * (len(self._threads) + 1), max(2 * _DEPTH, fit))

    def take(self, thread: _ReadingThread, *, wait: bool) -> _Request | None:
        """Return what a process is to read next; None: nothing now, or it is not needed further."""
        with self._change:
            while not thread.is_stopped:
                request = None
                if self._again:
                    request = self._again.popleft()
                    if request.want.number < self._next or request.want.number in self._ready:
                        continue
                elif self._asked - self._next < self._window:
                    request = self._ask()
                if request is not None:
                    request.sent_at, request.by = time.monotonic(), thread
                    self._open[request.want.number] = request
                    return request
                if not wait:
                    return None
                self._change.wait()
            return None

    def answered(self, request: _Request, batch: Any, answer: Batch, size: int) -> None:
        """Take a batch of this size [bytes] that a process has read."""
        with self._change:
            self._batch_bytes = size
            if request.host:
                self._helped_s += answer.cpu_s
            number = request.want.number
            self._took_s.append(time.monotonic() - request.sent_at)
            if request.by is not None:
                request.by.is_late = False
            if request.host:
                self._health.setdefault(request.host, [0, 0])[0] += 1
            if self._is_open(request):
                self._open.pop(number, None)
                self._ready[number] = batch, answer.indices
                self._change.notify_all()

    def failed(self, request: _Request, error: str) -> None:
        """Have the rank itself read a batch that a process could not read."""
        with self._change:
            if self._is_open(request):
                self._failed[request.want.number] = request, error
                self._change.notify_all()

    def lost(self, requests: Sequence[_Request]) -> None:
        """Have others read what a lost process was asked for."""
        with self._change:
            for request in reversed(requests):
                if self._is_open(request):
                    self._open.pop(request.want.number, None)
                    self._again.appendleft(_Request(request.want))
            self._change.notify_all()

    def _is_open(self, request: _Request) -> bool:
        return self._next <= request.want.number not in self._ready

    @property
    def examples(self) -> int:
        """Number of examples of the data set."""
        return self._source.examples

    def unpack(self, buffers: list[Any]) -> Any:
        """Return the batch in buffers."""
        return self._source.unpack(buffers)

    def process_failed(self) -> None:
        """Warn that a process of the rank's own has failed."""
        self._warn(
            "a loader process has ended (for lack of memory, or by an error in worker_init_fn); "
            "the others, or else the training process, read its part"
        )

    def changed(self) -> None:
        """Have the rank look again whether a process can read."""
        with self._change:
            self._change.notify_all()

    def pause(self, thread: _ReadingThread, seconds: float) -> None:
        """Wait before a process is connected to again, unless it is not needed further."""
        with self._change:
            self._change.wait_for(lambda: thread.is_stopped, seconds)


class _ReadingThread:
    """Asks one process for batches.

    Attributes:
        host: name of its host; empty: it is one of the rank's own.
        is_connected: whether it answers.
        is_stopped: whether it is not needed further.
        is_late: whether it was late and has not answered since.
    """

    def __init__(self, reader: InputReader, peer: _Peer) -> None:
        self._reader = reader
        self._peer = peer
        self._link: Link | None = None
        self.host = peer.host
        self.is_connected = not peer.host
        self.is_stopped = self.is_late = False

    @property
    def reads(self) -> bool:
        """Whether it answers in time."""
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
            open_requests: deque[_Request] = deque()
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

    def _converse(self, link: Link, open_requests: deque[_Request]) -> None:
        reader = self._reader
        offer, _ = link.receive()
        unfit = _unfit(offer, reader.examples)
        if unfit:
            reader.no_use(self.host, unfit)
            return
        self.is_connected = True
        reader.changed()
        while not self.is_stopped:
            while len(open_requests) < _DEPTH:
                if open_requests and len(open_requests[0].want.indices) > _LONG_REQUEST:
                    break
                request = reader.take(self, wait=not open_requests)
                if request is None:
                    break
                open_requests.append(request)
                link.send(request.want)
            if not open_requests:
                return
            answer, buffers = link.receive()
            request = open_requests[0]
            if getattr(answer, "number", None) != request.want.number:
                raise LinkError(f"{self.host or 'a loader process'} answered out of turn")
            match answer:
                case Batch():
                    size = sum(buffer.nbytes for buffer in buffers)
                    reader.answered(request, reader.unpack(buffers), answer, size)
                case Failed(error=error):
                    reader.failed(request, error)
            open_requests.popleft()


def _unfit(offer: Any, examples: int) -> str:
    """Return why a process that makes this offer is not to be used; empty: it is."""
    if not isinstance(offer, Offer):
        return "it does not speak this protocol"
    if offer.version != __version__:
        return f"it has hvd_elastic {offer.version}, and this host {__version__}"
    if offer.examples != examples:
        return (
            f"its data set has {offer.examples} examples, and that of this host {examples}: copy "
            "the same data there (copyclust)"
        )
    return ""


class _Remote:
    """A process of an input host."""

    def __init__(self, server: InputServer) -> None:
        self._server = server
        self.host = server.host

    def open(self) -> Link:
        """Connect to it."""
        server = self._server
        return connect(server.address, server.port, server.certificate, f"input host {server.host}")

    def has_failed(self) -> bool:
        """See :class:`_Peer`; the leader watches the processes of input hosts."""
        return False


class _Local:
    """A process of the rank's own."""

    host = ""

    def __init__(self, local: LocalReader) -> None:
        self._local = local

    def open(self) -> Link:
        """Return the link to it."""
        return self._local.link

    def has_failed(self) -> bool:
        """See :class:`_Peer`."""
        process = self._local.process
        process.join(1.0)
        # multiprocessing ends its processes by SIGTERM when this one exits.
        return process.exitcode not in (None, 0, -signal.SIGTERM)
