"""A rank reads its batches in order, whoever reads them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.input import asking, server
from hvd_elastic.input import reader as reader_module
from hvd_elastic.input.asking import DEPTH, InputProcess
from hvd_elastic.input.link import Batch, Link, Offer, Want
from hvd_elastic.input.reader import InputReader
from hvd_elastic.input.requests import Requests
from hvd_elastic.input.server import (
    ReadingProcesses,
    seed_example,
    serve,
    serve_port,
    undisturbed,
)
from tests.paths import LIMIT_S
from tests.waiting import Clock, until

CERTIFICATE = make_certificate()
RANDOM = threading.RLock()
"""Held by who draws random numbers: hosts, which are processes, are threads of one here."""


class Source:
    """A batch is the epoch, the indices, and random numbers for each of them."""

    def __init__(self, examples: int = 1000, host: str = "") -> None:
        self.examples = examples
        self.fields: Mapping[str, int] = {}
        self.host = host
        self.read: list[list[int]] = []
        self.before: Callable[[], None] = lambda: None

    def start(self, number: int, count: int) -> None:
        global RANDOM
        RANDOM = threading.RLock()  # a thread may have held it when this process was forked

    def make(self, epoch: int, indices: Sequence[int]) -> Any:
        self.read.append(list(indices))
        self.before()
        rows = []
        with RANDOM:
            for index in indices:
                seed_example(7, epoch, index)
                rows.append((index, random.random(), float(np.random.rand())))
        return epoch, rows

    def make_here(self, epoch: int, indices: Sequence[int]) -> Any:
        with RANDOM, undisturbed():
            return self.make(epoch, indices)

    def pack(self, batch: Any) -> list[Any]:
        return [repr(batch).encode()]

    def unpack(self, buffers: list[Any]) -> Any:
        return eval(bytes(buffers[0]))


class FakeClock:
    """Stands for the module ``time``; a batch takes 0.04 s."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self._now_s = 0.0

    def pass_time(self) -> None:
        self._now_s = 0.04 * next(self._ticks)

    def monotonic(self) -> float:
        return self._now_s

    perf_counter = monotonic


class Host:
    """A thread that reads for ranks on a port."""

    def __init__(self, source: Source, name: str = "h") -> None:
        self.source = source
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.server = InputProcess(name, "127.0.0.1", port, CERTIFICATE)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            serve_port(self._listener, CERTIFICATE, self.source)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def start(warnings: list[str]) -> Iterator[Callable[..., InputReader]]:
    made: list[InputReader] = []

    def begin(source: Source, processes: int = 0) -> InputReader:
        made.append(InputReader(source, processes, warnings.append))
        return made[-1]

    yield begin
    for reader in made:
        reader.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is late: where one is, the rank may read itself."""
    monkeypatch.setattr("hvd_elastic.input.answer_times.LATE_AT_LEAST_S", LIMIT_S)


def passes(count: int, size: int = 4) -> Iterator[list[int]]:
    return iter([list(range(size * n, size * (n + 1))) for n in range(count)])


def expected(epoch: int, count: int, size: int = 4) -> list[Any]:
    alone = Source()
    return [alone.make_here(epoch, indices) for indices in passes(count, size)]


def take(reader: InputReader, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        batch, indices = reader.next()
        assert [row[0] for row in batch[1]] == indices
        found.append(batch)
    return found


def test_the_rank_reads_itself_without_anybody_else(start: Any) -> None:
    reader = start(Source())
    reader.begin_epoch(3, passes(5))
    assert take(reader, 5) == expected(3, 5)
    with pytest.raises(StopIteration):
        reader.next()


def test_a_pass_ends_while_hosts_wait_for_more_to_read(start: Any) -> None:
    host, reader = Host(Source()), start(Source())
    reader.begin_epoch(2, passes(3))
    reader.use([host.server])
    assert [reader.next()[0] for _ in range(3)] == expected(2, 3)
    for _ in range(2):
        with pytest.raises(StopIteration):
            reader.next()
    reader.begin_epoch(3, passes(1))
    assert reader.next()[0] == expected(3, 1)[0]
    host.close()


def test_its_own_random_numbers_go_on_undisturbed(start: Any) -> None:
    reader = start(Source())
    reader.begin_epoch(0, passes(2))
    random.seed(5)
    np.random.seed(5)
    without = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    take(reader, 2)
    assert (random.random(), np.random.rand()) == without


@pytest.mark.usefixtures("patient")
def test_batches_are_the_same_in_the_same_order_whoever_reads_them(start: Any) -> None:
    """An input host and two processes of the rank's own."""
    host = Host(Source())
    own = Source()
    reader = start(own, 2)
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    reader.begin_epoch(1, passes(60))
    until(lambda: bool(host.source.read))
    assert take(reader, 60) == expected(1, 60)
    assert own.read == []  # in the rank itself
    host.close()


def test_no_more_is_read_ahead_than_a_few_batches_for_each_process(start: Any) -> None:
    host = Host(Source())
    reader = start(Source())
    reader.use([host.server])
    reader.begin_epoch(0, passes(100))
    until(lambda: len(host.source.read) >= 4)
    assert take(reader, 1) == expected(0, 1)
    until(lambda: len(host.source.read) >= 5)
    assert len(host.source.read) <= 1 + 2 * 2
    host.close()


def test_another_place_drops_what_was_read_ahead(start: Any) -> None:
    host = Host(Source())
    reader = start(Source())
    reader.use([host.server])
    reader.begin_epoch(0, passes(50))
    take(reader, 3)
    reader.begin_epoch(4, passes(20, size=3))
    assert take(reader, 20) == expected(4, 20, size=3)
    host.close()


def test_what_a_lost_host_was_to_read_is_read_elsewhere(start: Any) -> None:
    """It is killed while it reads; nothing is missing and nothing comes twice."""
    reads_third = multiprocessing.get_context("fork").Event()
    dies, stays = Source(), Host(Source(), "stays")

    def stop_at_the_third() -> None:
        if len(dies.read) == 3:
            reads_third.set()
            threading.Event().wait()

    dies.before = stop_at_the_third
    processes = ReadingProcesses(dies, 1, "127.0.0.1", CERTIFICATE)
    reader = start(Source())
    reader.use([InputProcess("dies", "127.0.0.1", processes.ports[0], CERTIFICATE)])
    reader.begin_epoch(0, passes(80))
    found = take(reader, 2)
    assert reads_third.wait(LIMIT_S)
    reader.use(
        [
            InputProcess("dies", "127.0.0.1", processes.ports[0], CERTIFICATE),
            stays.server,
        ]
    )
    processes.close()
    found += take(reader, 78)
    assert found == expected(0, 80)
    stays.close()


def test_the_rank_reads_itself_when_all_hosts_are_gone(start: Any) -> None:
    host = Host(Source())
    own = Source()
    reader = start(own)
    reader.use([host.server])
    reader.begin_epoch(0, passes(30))
    until(lambda: bool(host.source.read))
    found = take(reader, 5)
    reader.use([])
    host.close()
    assert found + take(reader, 25) == expected(0, 30)
    assert own.read


def test_a_host_with_another_data_set_is_not_used(start: Any, warnings: list[str]) -> None:
    host = Host(Source(examples=999), "cpu1")
    reader = start(Source())
    reader.use([host.server])
    reader.begin_epoch(0, passes(5))
    assert take(reader, 5) == expected(0, 5)
    until(lambda: bool(warnings))
    assert len(warnings) == 1
    assert "input host cpu1 is not used: its data set has 999 examples" in warnings[0]
    assert host.source.read == []
    mended = Host(Source(), "cpu1")
    reader.use([])
    reader.use([mended.server])
    until(lambda: reader.helpers().number == 1)
    mended.close()
    host.close()


def test_a_host_whose_data_set_has_another_order_is_not_used(
    start: Any, warnings: list[str]
) -> None:
    source = Source()
    source.fields = {"samples": 1}
    host, mine = Host(source, "cpu1"), Source()
    mine.fields = {"samples": 2}
    start(mine).use([host.server])
    until(lambda: bool(warnings))
    assert (
        "cpu1 is not used: its data set differs from that of this host in 'samples'" in warnings[0]
    )
    host.close()


def test_a_host_with_another_version_is_not_used(start: Any, warnings: list[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_once() -> None:
        from hvd_elastic.input.link import accept

        with contextlib.suppress(OSError):
            plain, _ = listener.accept()
            link = accept(plain, CERTIFICATE)
            link.send(Offer(1000, "0.0.1"))
            link.close()

    threading.Thread(target=serve_once, daemon=True).start()
    reader = start(Source())
    port = listener.getsockname()[1]
    reader.use([InputProcess("cpu1", "127.0.0.1", port, CERTIFICATE)])
    until(lambda: bool(warnings))
    assert "input host cpu1 is not used: it has hvd_elastic 0.0.1" in warnings[0]
    listener.close()


def test_a_transform_that_fails_only_there_costs_the_host(start: Any, warnings: list[str]) -> None:
    source = Source()

    def fail() -> None:
        raise RuntimeError("no GPU here")

    source.before = fail
    host = Host(source, "cpu1")
    reader = start(Source())
    reader.use([host.server])
    reader.begin_epoch(0, passes(20))
    until(lambda: bool(source.read))
    assert take(reader, 20) == expected(0, 20)
    assert len(warnings) == 1
    assert "cpu1 is not used: it cannot read what this host can" in warnings[0]
    assert "no GPU here" in warnings[0]
    host.close()


def test_a_link_slower_than_reading_here_is_told_and_not_used(
    start: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch costs its host nothing, and comes late; the rank takes 1 ms to read or use one."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: 0.001 * next(ticks))
    monkeypatch.setattr(reader_module, "time", clock)
    far, own = Source(), Source()
    far.before = lambda: time.sleep(0.02)
    host = Host(far, "cpu1")
    reader = start(own)
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    reader.begin_epoch(0, passes(240))
    assert take(reader, 240) == expected(0, 240)
    assert len(warnings) == 1
    assert "input host cpu1 is not used: batches come every" in warnings[0]
    assert warnings[0].endswith("takes 2 ms")
    assert len(far.read) < 200
    host.close()


def test_a_host_as_slow_as_the_rank_alone_is_used(
    start: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still but for reading."""
    clock, far, own = FakeClock(), Source(), Source()
    for module in (reader_module, asking):
        monkeypatch.setattr(module, "time", clock)
    far.before = own.before = clock.pass_time
    host = Host(far)
    reader = start(own)
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    reader.begin_epoch(0, passes(240))
    assert take(reader, 240) == expected(0, 240)
    assert warnings == []
    assert 1 <= len(own.read) <= 6  # to see how long it takes
    host.close()


def test_what_only_the_rank_itself_can_read_is_told_once(start: Any, warnings: list[str]) -> None:
    """A batch that cannot be pickled, say."""

    class Locked(Source):
        def pack(self, batch: Any) -> list[Any]:
            raise TypeError("cannot pickle '_thread.lock' object")

    reader = start(Locked(), processes=1)
    reader.begin_epoch(0, passes(10))
    assert take(reader, 10) == expected(0, 10)
    assert len(warnings) == 1
    assert "reads batches itself that a loader process cannot read" in warnings[0]
    assert "cannot pickle '_thread.lock' object" in warnings[0]


@pytest.mark.usefixtures("patient")
def test_compressed_batches_are_the_same(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Always:
        compresses = True

        def sent(self, size: int, made_s: float, sent_s: float) -> None:
            pass

    monkeypatch.setattr("hvd_elastic.input.server.LinkLimit", Always)
    host, own = Host(Source()), Source()
    reader = start(own)
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    reader.begin_epoch(1, passes(30))
    assert take(reader, 30) == expected(1, 30)
    assert own.read == []
    host.close()


def test_threads_with_nothing_to_ask_for_do_not_wake_each_other(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes of the epoch were asked for, and the rank, which evaluates, takes none."""
    hosts = [Host(Source(), f"h{n}") for n in range(2)]
    reader = start(Source())
    reader.use([host.server for host in hosts])
    until(lambda: reader.helpers().number == 2)
    looks: list[None] = []
    take_one = Requests.take_request

    def counted(self: Requests, *args: Any) -> Any:
        looks.append(None)
        return take_one(self, *args)

    monkeypatch.setattr(Requests, "take_request", counted)
    reader.begin_epoch(0, passes(2))
    until(lambda: sum(len(host.source.read) for host in hosts) == 2)
    time.sleep(0.3)
    assert len(looks) < 50
    for host in hosts:
        host.close()


def test_an_error_of_the_script_reaches_the_rank(start: Any) -> None:
    def fail() -> None:
        raise ValueError("broken picture")

    theirs, own = Source(), Source()
    theirs.before = own.before = fail
    host = Host(theirs)
    reader = start(own)
    reader.use([host.server])
    reader.begin_epoch(0, passes(3))
    with pytest.raises(ValueError, match="broken picture"):
        reader.next()
    host.close()


def test_a_host_that_answers_too_late_is_not_waited_for(start: Any, warnings: list[str]) -> None:
    """Its link, say, is far slower than reading here."""
    stuck, go_on = Source(), threading.Event()
    stuck.before = go_on.wait  # type: ignore[assignment]
    slow = Host(stuck, "slow")
    fast = Host(Source(), "fast")
    reader = start(Source())
    reader.use([fast.server])
    reader.begin_epoch(0, passes(60))
    found = take(reader, 8)
    reader.use([fast.server, slow.server])
    found += take(reader, 52)
    assert found == expected(0, 60)
    go_on.set()
    for host in (slow, fast):
        host.close()


def test_a_frozen_host_is_not_waited_for_without_others(start: Any, warnings: list[str]) -> None:
    """The rank reads itself, and waits for none of the batches that the host was asked for."""
    stuck, go_on = Source(), threading.Event()
    host = Host(stuck)
    own = Source()
    reader = start(own)
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    reader.begin_epoch(0, passes(200))
    found = take(reader, 8)
    stuck.before = go_on.wait  # type: ignore[assignment]
    found += take(reader, 192)
    assert found == expected(0, 200)
    assert len(own.read) > 150
    assert not warnings, "one late answer is no reason to give it up"
    go_on.set()
    host.close()


def test_all_processes_of_a_frozen_host_are_given_up_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.input.answer_times._FIRST_ANSWER_S", 1.0)
    stuck, go_on = Source(), threading.Event()
    stuck.before = go_on.wait  # type: ignore[assignment]
    hosts = [Host(stuck, "h") for _ in range(3)]
    reader = start(Source())
    reader.use([host.server for host in hosts])
    until(lambda: reader.helpers().number == 3)
    taken: list[Any] = []
    reader.begin_epoch(0, passes(12))
    asked = reader._requests._open
    until(lambda: len(asked) == 3 * DEPTH)
    with reader._change:  # however far apart the three asked
        now = time.monotonic()
        for request in asked.values():
            request.sent_at = now
    reading = threading.Thread(target=lambda: taken.extend(take(reader, 12)), daemon=True)
    reading.start()
    reading.join(LIMIT_S)
    go_on.set()
    assert taken == expected(0, 12)
    assert reader._times._late["h"] == 1, "one wait for all three"
    for host in hosts:
        host.close()


def test_hosts_that_freeze_one_after_the_other_are_both_given_up(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.input.answer_times._FIRST_ANSWER_S", 0.5)
    stuck, go_on = [Source(), Source()], threading.Event()
    for source in stuck:
        source.before = go_on.wait  # type: ignore[assignment]
    first, second = Host(stuck[0], "first"), Host(stuck[1], "second")
    reader = start(Source())
    reader.use([first.server])
    until(lambda: reader.helpers().number == 1)
    taken: list[Any] = []
    reader.begin_epoch(0, passes(12))
    reading = threading.Thread(target=lambda: taken.extend(take(reader, 12)), daemon=True)
    reading.start()
    until(lambda: bool(stuck[0].read))
    time.sleep(1.0)  # of the 2 s after which an answer is late
    reader.use([first.server, second.server])
    reading.join(LIMIT_S)
    go_on.set()
    assert taken == expected(0, 12)
    for host in (first, second):
        host.close()


@pytest.mark.parametrize("first_is_lost", [False, True])
def test_a_process_that_is_late_after_another_is_noticed(first_is_lost: bool) -> None:
    requests = Requests()
    requests.begin_passes(0, passes(8))
    one, other = (SimpleNamespace(host=name, is_late=False) for name in ("one", "other"))
    of_one = [requests.take_request(one, 0.0, 8) for _ in range(2)]
    of_other = [requests.take_request(other, 3.0, 8) for _ in range(2)]
    assert requests.late(3.9, 4.0) == []
    if first_is_lost:
        requests.lost([each for each in of_one if each is not None])
    else:
        assert requests.late(4.0, 4.0) == of_one
        one.is_late = True
    assert requests.late(6.9, 4.0) == []
    assert requests.late(7.0, 4.0) == of_other
    other.is_late = True
    assert requests.late(99.0, 4.0) == []
    request = requests.to_read_here(has_readers=False)
    assert request is not None
    assert request.want.number == 0


def test_little_is_read_ahead_of_large_batches(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_elastic.input.reader._AHEAD_BYTES", 1)
    sources = [Source() for _ in range(8)]
    hosts = [Host(source, f"h{n}") for n, source in enumerate(sources)]
    reader = start(Source())
    reader.use([host.server for host in hosts])
    until(lambda: reader.helpers().number == 8)
    reader.begin_epoch(0, passes(100))
    found = take(reader, 20)  # by then the size of a batch is known
    before = sum(len(source.read) for source in sources)
    found += take(reader, 4)
    time.sleep(0.5)
    assert sum(len(source.read) for source in sources) <= before + 8
    assert found == expected(0, 24)
    for host in hosts:
        host.close()


def test_a_process_of_its_own_that_is_killed_is_told_and_replaced_by_the_rank(
    start: Any, warnings: list[str]
) -> None:
    reader = start(Source(), processes=1)
    reader.begin_epoch(0, passes(20))
    found = take(reader, 4)
    os.kill(reader.pids()[0], signal.SIGKILL)
    found += take(reader, 16)
    assert found == expected(0, 20)
    until(lambda: len(warnings) == 1)
    assert warnings[0].startswith("a loader process has ended")


def test_processes_of_an_input_host_listen_each_on_its_own_port(start: Any) -> None:
    source = Source()
    with pytest.raises(AttributeError):
        pickle.dumps(source)  # its transform is a lambda; the processes are forked
    processes = ReadingProcesses(source, 2, "127.0.0.1", CERTIFICATE)
    try:
        assert len({*processes.ports}) == 2
        reader = start(Source())
        reader.use([InputProcess("h", "127.0.0.1", port, CERTIFICATE) for port in processes.ports])
        reader.begin_epoch(2, passes(30))
        assert take(reader, 30) == expected(2, 30)
        assert not processes.any_ended(0)
    finally:
        processes.close()
    assert processes.any_ended(0)


def test_a_process_that_speaks_nonsense_is_given_up() -> None:
    own, other = socket.socketpair()
    with own, other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        other.shutdown(socket.SHUT_WR)
        serve(Link(own, "a rank"), Source())  # returns, and raises nothing


class Told(Link):
    """Tells when a process waits for a request, and from when on it has not been busy."""

    def __init__(self, plain: socket.socket, who: str) -> None:
        super().__init__(plain, who)
        self.waits = threading.Event()

    def receive(self) -> Any:
        self.waits.set()
        return super().receive()


class Turn:
    """A lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self.lock, self.is_wanted = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        self.is_wanted.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_what_a_process_does_between_two_batches_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for a request that was on its way, then for one that the rank held back, and then
    for its turn while another rank's batch is made."""
    now, used, waited_for_core = Clock(), Clock(), Clock()
    monkeypatch.setattr(server, "time", SimpleNamespace(perf_counter=now, thread_time=used))
    monkeypatch.setattr(server, "own_delay_s", waited_for_core)

    def make() -> None:
        now.now += 0.1
        used.now += 0.02
        waited_for_core.now += 0.03

    own, other = socket.socketpair()
    source, process = Source(), Told(own, "a rank")
    turn: Any = Turn()
    source.before = make
    thread = threading.Thread(target=server.serve, args=(process, source, turn))
    thread.start()
    link = Link(other, "a process")
    link.receive()

    def ask(number: int, *, held_back: bool = False) -> Batch:
        assert process.waits.wait(LIMIT_S)
        process.waits.clear()
        now.now += 0.2
        link.send(Want(number, 0, [number], held_back))
        answer: Batch = link.receive()[0]
        return answer

    first, on_its_way, held_back = ask(0), ask(1), ask(2, held_back=True)
    assert first.link_s == 0.0
    assert on_its_way.link_s == pytest.approx(0.2)
    assert held_back.link_s == 0.0
    turn.is_wanted.clear()
    with turn.lock:
        link.send(Want(3, 0, [3], False))
        assert turn.is_wanted.wait(LIMIT_S)
        now.now += 0.3
    waited: Batch = link.receive()[0]
    assert waited.busy_s == pytest.approx(0.3 + 0.1)
    assert waited.cpu_s == pytest.approx(0.02)
    assert waited.delay_s == pytest.approx(0.03 + 0.3 * 0.5), "as its own, which sleeps half of it"
    link.cut()
    thread.join()
    own.close()
    other.close()


def test_a_rank_with_enough_batches_ahead_holds_requests_back(start: Any) -> None:
    host = Host(Source())
    reader = start(Source())
    reader.use([host.server])
    until(lambda: reader.helpers().number == 1)
    shares, found = list[float](), reader.helpers()
    while not shares or min(shares) >= 0.5:
        assert len(shares) < 20, f"the link counts as busy for {shares} of the time"
        began, before = time.monotonic(), found
        reader.begin_epoch(len(shares), passes(60))
        for _ in range(20):  # as a step that takes longer than to read a batch
            take(reader, 1)
            time.sleep(0.02)
        found = reader.helpers()
        # On a busy machine the process may be late to see that its answer has been sent.
        shares.append((found.link_s - before.link_s) / (time.monotonic() - began))
    assert 0.0 < found.cpu_s <= found.busy_s + 0.01
    host.close()


def test_seeds_differ_by_seed_epoch_and_index() -> None:
    with undisturbed():
        seeds = {seed_example(s, e, i) for s in range(4) for e in range(4) for i in range(64)}
    assert len(seeds) == 4 * 4 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
