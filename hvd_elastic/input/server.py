"""Processes that read batches for ranks: those of an input host, and a rank's own.

A batch is a pure function of its dataset indices and the epoch: random numbers are seeded for each
example. So it does not matter which process reads it, nor whether two do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np

from hvd_elastic.input.compression import LinkLimit, compress, size_of
from hvd_elastic.input.link import (
    Batch,
    Failed,
    Link,
    LinkError,
    Offer,
    Want,
    accept,
)
from hvd_elastic.programs.accept_peers import accept_peers
from hvd_elastic.programs.processes import own_delay_s
from hvd_elastic.worker.input_source import Buffers, Source

_START_S = 60.0
"""Time for a forked process to open its port [s]; a start function of the script may load files."""
_FORK = multiprocessing.get_context("fork")


def seed_example(seed: int, epoch: int, index: int) -> int:
    """Seed Python's and NumPy's random numbers for one example, and return a 63-bit seed.

    Args:
        seed: seed of the data order.
        index: dataset index of the example.
    """
    # splitmix64: a bijection of 64 bits that changes half of them for each bit that changes
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + index + 1) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    return mixed >> 1


def serve(
    link: Link, source: Source, turn: threading.Lock | None = None, limit: LinkLimit | None = None
) -> None:
    """Answer the requests of one rank until it closes the link.

    Args:
        link: link to the rank.
        source: what is read.
        turn: held while a batch is made: the connections of a process take turns.
        limit: decides whether batches are compressed; None: they are not.
    """
    turn = turn or threading.Lock()
    with contextlib.suppress(OSError, LinkError):
        link.send(Offer(source.examples, fields=dict(source.fields)))
        size, made_s, made_at = 0, 0.0, 0.0
        while True:
            free_at = time.perf_counter()
            want, _ = link.receive()
            if not isinstance(want, Want):
                return
            asked_at = time.perf_counter()
            # The batch before, or this request, was on its way, unless the rank held it back.
            link_s = (free_at if want.held_back else asked_at) - made_at if size else 0.0
            if limit is not None and size:
                limit.sent(size, made_s, link_s)
            with turn:
                began = time.perf_counter()
                answer, buffers = _read(want, source)
                made_at = time.perf_counter()
            size, made_s = size_of(buffers), made_at - began
            if isinstance(answer, Batch):
                answer.busy_s, answer.link_s = made_at - asked_at, link_s
                # In others' turns the processor was used and waited for as in this one.
                answer.delay_s += (began - asked_at) * (answer.cpu_s + answer.delay_s) / made_s
                if limit is not None and limit.compresses:
                    cpu_began = time.thread_time()
                    buffers, answer.sizes = compress(buffers)
                    answer.cpu_s += time.thread_time() - cpu_began
            link.send(answer, buffers)


def _read(want: Want, source: Source) -> tuple[Batch | Failed, Buffers]:
    began, delay_began = time.thread_time(), own_delay_s()
    try:
        buffers = source.pack(source.make(want.epoch, want.indices))
    except Exception:  # noqa: BLE001  (whatever the script's data set raises)
        return Failed(want.number, traceback.format_exc(limit=-8)), []
    cpu_s, delay_s = time.thread_time() - began, own_delay_s() - delay_began
    return Batch(want.number, want.indices, cpu_s, delay_s), buffers


class LocalReader:
    """A process forked from a rank that reads for it alone.

    Args:
        number: its number among the rank's.
    """

    def __init__(self, source: Source, number: int, count: int) -> None:
        own, other = socket.socketpair()
        process = _FORK.Process(
            target=_serve_parent, args=(other, own, source, number, count), daemon=True
        )
        process.start()
        other.close()
        self.process: BaseProcess = process
        self.link = Link(own, "a loader process")

    def close(self) -> None:
        self.link.cut()
        self.process.terminate()
        self.process.join()


def _serve_parent(
    own: socket.socket, parents: socket.socket, source: Source, number: int, count: int
) -> None:
    parents.close()
    source.start(number, count)
    serve(Link(own, "the rank"), source)


class ReadingProcesses:
    """Processes of an input host, each with a port of its own, that read for all ranks.

    Args:
        address: address of this host on which they listen.
        certificate: certificate of the run.

    Raises:
        OSError: a process could not open a port.
    """

    def __init__(self, source: Source, count: int, address: str, certificate: str) -> None:
        self._processes: list[BaseProcess] = []
        self.ports: list[int] = []
        pipes: list[Connection] = []
        for number in range(count):
            receive, send = _FORK.Pipe(duplex=False)
            process = _FORK.Process(
                target=_serve_ranks,
                args=(source, number, count, address, certificate, send),
                daemon=True,
            )
            process.start()
            send.close()
            self._processes.append(process)
            pipes.append(receive)
        for pipe in pipes:
            try:
                port = pipe.recv() if pipe.poll(_START_S) else None
            except EOFError:
                port = None
            if port is None:
                self.close()
                raise OSError(f"a process that reads could not listen on {address}")
            self.ports.append(port)
            pipe.close()

    def any_ended(self, timeout_s: float) -> bool:
        """Return whether a process has ended, after at most ``timeout_s``."""
        return bool(wait([process.sentinel for process in self._processes], timeout_s))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve_ranks(
    source: Source, number: int, count: int, address: str, certificate: str, tell: Connection
) -> None:
    source.start(number, count)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=128)
    tell.send(listener.getsockname()[1])
    tell.close()
    serve_port(listener, certificate, source)


def serve_port(listener: socket.socket, certificate: str, source: Source) -> None:
    """Answer the requests of every rank that connects and shows the certificate."""
    turn = threading.Lock()

    def meet(link: Link) -> None:
        with contextlib.closing(link):
            serve(link, source, turn, LinkLimit())

    accept_peers(listener, lambda plain: accept(plain, certificate), meet)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the state of Python's and NumPy's random numbers afterwards."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
