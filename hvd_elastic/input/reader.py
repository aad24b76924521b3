"""Gives a rank its batches in order, from processes of its own and of input hosts.

Each process is asked for another batch as soon as it has answered, so all share the work by their
speed. At most a few batches for each process are asked for ahead of the one that the rank takes
next, which bounds the memory and holds fast processes back. What a lost process had to read is
read by another one, or by the rank itself if there is none.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hvd_elastic.input.answer_times import LATE_AT_LEAST_S, LATE_FACTOR, AnswerTimes
from hvd_elastic.input.asking import DEPTH, AskingThread, InputProcess, OwnProcess, Peer
from hvd_elastic.input.compression import expand, size_of
from hvd_elastic.input.link import Batch
from hvd_elastic.input.requests import Request, Requests
from hvd_elastic.input.server import LocalReader
from hvd_elastic.worker.input_source import Source
from hvd_elastic.worker.input_times import Helpers

_AHEAD_BYTES = 1 << 30
"""Size of all batches that a rank may have ahead [bytes], but four of them."""


class InputReader:
    """Reads the batches of one rank.

    Args:
        processes: number of processes of the rank's own.
        warn: called with a problem of an input host, from any thread.
    """

    def __init__(self, source: Source, processes: int, warn: Callable[[str], None]) -> None:
        self.source = source
        self._processes = processes
        self._warn = warn
        self._change = threading.Condition()
        """Held for all that follows; notified when a thread or the rank may continue."""
        self._threads: dict[InputProcess | int, AskingThread] = {}
        self._locals: list[LocalReader] = []
        self._requests = Requests()
        self._times = AnswerTimes()
        self._refused: set[str] = set()
        self._has_warned = False
        """Whether a batch was told of that only the rank itself can read."""
        self._helped = Helpers()
        self._batch_bytes = 0
        """Size of the last batch that was read elsewhere [bytes]."""

    # -- the rank ----------------------------------------------------------------------------

    def use(self, servers: Sequence[InputProcess]) -> None:
        """Read from these processes of input hosts, and no others, beside the rank's own."""
        with self._change:
            self._refused &= {server.host for server in servers}  # one that comes back is tried
            wanted = {server for server in servers if server.host not in self._refused}
            self._stop(
                key for key in self._threads if not isinstance(key, int) and key not in wanted
            )
            for server in wanted - self._threads.keys():
                self._start(server, server)

    def begin_epoch(self, epoch: int, passes: Iterator[list[int]]) -> None:
        """Begin to read an epoch from another place; batches that were asked for are dropped.

        Args:
            passes: dataset indices of the passes of this rank, in order.
        """
        with self._change:
            self._requests.begin_passes(epoch, passes)
            self._change.notify_all()
        if not self._locals:
            # Forked by the main thread, like the processes of a loader.
            count = self._processes
            self._locals = [LocalReader(self.source, n, count) for n in range(count)]
            with self._change:
                for number, local in enumerate(self._locals):
                    self._start(number, OwnProcess(local))

    def next(self) -> tuple[Any, list[int]]:
        """Return the next batch and its indices; waits for it.

        Raises:
            StopIteration: the epoch is over.
            Exception: what the script's dataset raised, also in this process.
        """
        with self._change:
            self._times.rank_asks(time.perf_counter())
            request = self._wait_for_next()
            found = None if request is not None else self._requests.pop()
            self._change.notify_all()
        if request is not None:
            found = self._read_here(request)
        assert found is not None
        self._times.rank_goes_on(time.perf_counter())
        return found

    def pids(self) -> list[int]:
        """Return the process ids of the rank's own processes."""
        return [local.process.pid for local in self._locals if local.process.pid is not None]

    def helpers(self) -> Helpers:
        """Return what the processes of input hosts have done so far."""
        remote = [each for each in self._threads.copy().values() if each.host]
        return self._helped._replace(number=sum(each.is_connected for each in remote))

    def close(self) -> None:
        """End the rank's own processes and all connections."""
        with self._change:
            self._requests.begin_passes(self._requests.epoch, iter(()))
            self._stop(self._threads)
        for local in self._locals:
            local.close()
        self._locals = []

    def _read_here(self, request: Request) -> tuple[Any, list[int]]:
        """Return the next batch, which this process reads itself, and its indices."""
        want, began = request.want, time.perf_counter()
        batch = self.source.make_here(want.epoch, want.indices)
        alone_s = time.perf_counter() - began
        with self._change:
            failed = self._requests.was_read_here()
            if request.is_trial:
                self._compare(alone_s)
            self._change.notify_all()
        if failed is not None:
            self._cannot_read(failed[0].host, failed[1])
        return batch, want.indices

    def _wait_for_next(self) -> Request | None:
        """Wait for the next batch; return the request if this process has to read it itself."""
        while not self._requests.is_ready:
            has_readers = any(thread.reads for thread in self._threads.values())
            request = self._requests.to_read_here(has_readers=has_readers)
            if request is not None:
                return request
            self._repeat_if_late()
            if not self._processes and self._times.calls_for_trial(self._hosts_batch_s):
                request = self._requests.trial()
                if request is not None:
                    return request
            self._change.wait(LATE_AT_LEAST_S / 2)
        return None

    @property
    def _hosts_batch_s(self) -> float:
        """Time between two batches of all input hosts together [s]; infinite: not known."""
        connected = [thread for thread in self._threads.values() if thread.is_connected]
        rate = sum(1 / max(thread.batch_s, 1e-6) for thread in connected)
        return 1 / rate if rate > 0 else math.inf

    def _compare(self, alone_s: float) -> None:
        """Stop using the input hosts if all together are slower than the rank alone."""
        if why := self._times.compare(self._hosts_batch_s, alone_s):
            for host in {thread.host for thread in self._threads.values()}:
                self.no_use(host, why)

    def _cannot_read(self, host: str, error: str) -> None:
        if host:
            self.no_use(host, f"it cannot read what this host can: {error}")
        elif not self._has_warned:
            self._has_warned = True
            self._warn(
                "the training process reads batches itself that a loader process cannot read: "
                f"{error}"
            )

    def _repeat_if_late(self) -> None:
        """Have another process read the next batch if it is late."""
        late_s = self._times.late_s
        late = self._requests.late(time.monotonic(), late_s)
        if not late:
            return
        for request in late:  # processes of one host are late together
            if request.by is not None:
                request.by.is_late = True
        self._change.notify_all()
        host = late[0].host
        if host and self._times.is_too_late(host):
            self.no_use(
                host,
                f"most of its answers take longer than {late_s:.1f} s, which is {LATE_FACTOR:g} "
                "times as long as other answers: its link or its cores are too slow",
            )

    def no_use(self, host: str, why: str) -> None:
        """Stop using an input host, and warn of the reason."""
        with self._change:
            if host in self._refused:
                return
            self._refused.add(host)
            self._stop(key for key, thread in self._threads.items() if thread.host == host)
        self._warn(f"input host {host} is not used: {why}")

    # -- the threads -------------------------------------------------------------------------

    def _start(self, key: InputProcess | int, peer: Peer) -> None:
        thread = AskingThread(self, peer)
        self._threads[key] = thread
        threading.Thread(target=thread.run, name="hvd_elastic-input", daemon=True).start()

    def _stop(self, keys: Iterable[InputProcess | int]) -> None:
        for key in [*keys]:
            self._threads.pop(key).stop()
        self._change.notify_all()

    @property
    def _window(self) -> int:
        fit = _AHEAD_BYTES // max(self._batch_bytes, 1)
        return min(DEPTH * (len(self._threads) + 1), max(2 * DEPTH, fit))

    def take_request(self, thread: AskingThread, *, wait: bool) -> Request | None:
        """Return what a process is to read next; None: nothing now, or it is not needed further."""
        requests = self._requests
        held_back = False
        with self._change:
            while not thread.is_stopped:
                was_over = requests.is_over
                request = requests.take_request(thread, time.monotonic(), self._window)
                if requests.is_over and not was_over:
                    self._change.notify_all()  # the rank may wait for a batch that is not there
                if request is not None:
                    request.want.held_back = held_back
                if request is not None or not wait:
                    return request
                held_back = True
                self._change.wait()
            return None

    def answered(self, request: Request, answer: Batch, buffers: Sequence[memoryview]) -> None:
        """Take the batch in these buffers, which a process has read.

        Raises:
            LinkError: they are compressed, and not as the answer says.
        """
        whole = expand(buffers, answer.sizes) if answer.sizes else [*buffers]
        batch = self.source.unpack(whole)
        with self._change:
            self._batch_bytes = size_of(whole)
            took_s = time.monotonic() - request.sent_at
            self._times.answered(request.host, took_s, answer.cpu_s)
            if request.host:
                self._helped = _with_batch(self._helped, answer)
            if request.by is not None:
                request.by.is_late = False
            self._requests.answered(request, batch, answer.indices)
            self._change.notify_all()

    def failed(self, request: Request, error: str) -> None:
        """Have the rank itself read a batch that a process could not read."""
        with self._change:
            self._requests.failed(request, error)
            self._change.notify_all()

    def lost(self, requests: Sequence[Request]) -> None:
        """Have others read what a lost process was asked for."""
        with self._change:
            self._requests.lost(requests)
            self._change.notify_all()

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

    def pause(self, thread: AskingThread, seconds: float) -> None:
        """Wait before a process is connected to again, unless it is not needed further."""
        with self._change:
            self._change.wait_for(lambda: thread.is_stopped, seconds)


def _with_batch(helpers: Helpers, batch: Batch) -> Helpers:
    return Helpers(
        helpers.number,
        helpers.cpu_s + batch.cpu_s,
        helpers.delay_s + batch.delay_s,
        helpers.busy_s + batch.busy_s,
        helpers.link_s + batch.link_s,
    )
