"""Reads the batches of a rank with processes that seed each example, also on input hosts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hvd_elastic.input.asking import InputProcess
from hvd_elastic.input.data_order import Place
from hvd_elastic.input.reader import InputReader
from hvd_elastic.wire import messages as msg
from hvd_elastic.worker.checks.data_digest import DataDigest
from hvd_elastic.worker.context import Context
from hvd_elastic.worker.input_source import Source
from hvd_elastic.worker.launch import Mode
from hvd_elastic.worker.planning.compute_times import NewEvent, no_event
from hvd_elastic.worker.worker import Worker


class SharedReading:
    """The reader of a loader, made when it is first used.

    Args:
        source: what the loader reads.
        processes: number of reading processes of this rank.
        always: whether to use it also without input hosts.
        new_event: creates an event on the training device; see :class:`InputTimes`.
    """

    def __init__(
        self, source: Source, processes: int, *, always: bool, new_event: NewEvent = no_event
    ) -> None:
        self._source = source
        self._processes = processes
        self._always = always
        self._new_event = new_event
        self._may_be_helped = False
        """Whether input hosts read the same: those of the script's first loader."""
        self._reader: InputReader | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._told: msg.UseInput | None = None
        self._next_place: Place | None = None

    def offer(self, context: Context, digest: DataDigest) -> None:
        """Register what is read; an input host serves the loader that its script makes first."""
        context.data.loaders += 1
        self._source.fields = digest.fields
        if context.worker.mode is Mode.AGENT and not context.worker.reads:
            digest.read_examples(self._source)
        if context.data.loaders == 1:
            context.data.input_source = self._source
            self._may_be_helped = True

    def is_used(self, worker: Worker) -> bool:
        """Return whether this rank's batches are read so."""
        heard = worker.link is not None and worker.link.input is not None
        return self._always or (self._may_be_helped and (worker.options.input_hosts or heard))

    def read(
        self,
        worker: Worker,
        place: Place,
        following: Place,
        order: Callable[[], Iterator[list[int]]],
        *,
        is_first: bool,
    ) -> tuple[Any, list[int] | None]:
        """Return the next batch; see :class:`hvd_elastic.input.data_order.Read`.

        Args:
            place, following, is_first: see there.
            order: returns the dataset indices of each pass from ``place`` on.
        """
        if is_first and self._next_place != place:
            self.begin_passes(worker, place, order())
        self.follow_hosts(worker)
        self._next_place = None  # unknown if reading fails
        batch, indices = self.next()
        self._next_place = following
        return batch, indices if worker.audit else None

    def begin_passes(self, worker: Worker, place: Place, passes: Iterator[list[int]]) -> None:
        """Have :meth:`next` return the passes from a place on.

        Args:
            place: of the first of them.
            passes: dataset indices of each.
        """
        if self._reader is None:
            self._reader = InputReader(self._source, self._processes, worker.warn_once)
            # Its threads would keep it alive when the script drops the loader.
            self._end = weakref.finalize(self, self._reader.close)
            self._end.atexit = False
        self._reader.begin_epoch(place.world[0], passes)
        times = worker.input_times
        times.processes, times.pids = self._processes, self._reader.pids
        times.helpers, times.new_event = self._reader.helpers, self._new_event

    def follow_hosts(self, worker: Worker) -> None:
        """Read from the input hosts that the leader has told of last."""
        # After the processes have been forked, since it starts threads.
        link = worker.link
        told = link.input if link is not None and self._may_be_helped else None
        if told is not self._told and self._reader is not None:
            self._told = told
            self._reader.use(_servers(told))

    def next(self) -> tuple[Any, list[int]]:
        """Return the next batch and its indices; see :meth:`InputReader.next`."""
        assert self._reader is not None
        return self._reader.next()

    def close(self) -> None:
        """End the reading processes of this rank, and all connections."""
        reader, self._reader = self._reader, None
        self._told = self._next_place = None
        if self._end is not None:
            self._end.detach()
        if reader is not None:
            reader.close()


def _servers(told: msg.UseInput | None) -> list[InputProcess]:
    """Return the processes of input hosts that the leader has told of."""
    if told is None:
        return []
    return [
        InputProcess(server.host, server.address, port, told.certificate)
        for server in told.servers
        for port in server.ports
    ]
