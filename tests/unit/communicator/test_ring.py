"""The rules of a communicator, with a framework in memory whose ranks are threads.

Unlike PyTorch's, its tensors cannot be changed and its collectives block, as TensorFlow's do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvd_elastic.communicator import buckets
from hvd_elastic.communicator.interface import (
    BARRIER,
    FIRST,
    GRADIENTS,
    GenerationBrokenError,
    RingRank,
)
from hvd_elastic.communicator.local import LocalCommunicator
from hvd_elastic.communicator.ring import (
    _COUNTED,
    _LENGTH_BYTES,
    _SHORT_BYTES,
    HorovodCommunicator,
    load_horovod,
)
from hvd_elastic.errors import ScriptError

exceptions = pytest.importorskip("horovod.common.exceptions", reason="Horovod is not built")
TIMEOUT_S = 90


class Tensor(NamedTuple):
    array: np.ndarray


class Variable:
    """What a model is made of: a tensor that can be replaced."""

    def __init__(self, value: Any) -> None:
        self.value = Tensor(np.array(value))


class Ranks:
    """Ranks that hand each other values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(TIMEOUT_S)
        values = list(self._values)
        self._barrier.wait(TIMEOUT_S)
        return values


class InMemory:
    """Collectives of one rank, which a thread makes in the order in which they were begun."""

    framework = "Memory"

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._pool = ThreadPoolExecutor(1)
        self.calls: list[str] = []
        self.sent: list[int] = []
        library = SimpleNamespace(horovod_abort=lambda: self.calls.append("abort"))
        self.horovod: Any = SimpleNamespace(
            init=lambda: self.calls.append("init"),
            shutdown=lambda: self.calls.append("shutdown"),
            rank=lambda: rank,
            size=lambda: ranks.size,
            nccl_built=lambda: 0,
            Average=np.mean,
            Sum=np.sum,
            mpi_ops=SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=library)),
        )

    def warm(self) -> None:
        self.calls.append("warm")

    def from_numpy(self, array: np.ndarray) -> Tensor:
        return Tensor(array.copy())

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        return tensor.array

    @contextlib.contextmanager
    def as_bytes(
        self, tensors: Sequence[Variable], *, receives: bool
    ) -> Iterator[list[list[np.ndarray]]]:
        hosts = [each.value.array.copy() for each in tensors]
        yield [[host.reshape(-1).view(np.uint8) for host in hosts]]
        for each, host in zip(tensors, hosts, strict=True) if receives else ():
            each.value = Tensor(host)

    def join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(pieces)

    def begin(self, kind: str, tensor: Tensor, name: str, *more: Any, **options: Any) -> Any:
        assert isinstance(tensor, Tensor)
        self.sent.append(tensor.array.nbytes)
        rows = more[0].array.tolist() if more else None

        def combine(values: list[Any]) -> np.ndarray:
            arrays = [array for _, array, _ in values]
            if kind == "broadcast":
                return arrays[options["root_rank"]]
            if kind == "allreduce":
                return options["op"](arrays, axis=0)
            for place, (_, array, theirs) in enumerate(values if kind == "alltoall" else ()):
                end = np.cumsum(theirs)[self._rank]
                arrays[place] = array[end - theirs[self._rank] : end]
            return np.concatenate(arrays)

        def collective() -> Tensor:
            values = self._ranks.exchange(self._rank, (name, tensor.array, rows))
            if len({theirs for theirs, _, _ in values}) > 1:
                raise exceptions.HorovodInternalError("Mismatched names.\nAnd more.")
            return Tensor(combine(values))

        return self._pool.submit(collective)

    def synchronize(self, handle: Future[Tensor]) -> Tensor:
        return handle.result(TIMEOUT_S)

    def barrier(self) -> None:
        self._ranks.exchange(self._rank, None)


def on_each_rank(size: int, body: Callable[[HorovodCommunicator, InMemory], Any]) -> list[Any]:
    """Return what ``body`` returned on each of so many ranks."""
    ranks = Ranks(size)

    def run(rank: int) -> Any:
        collectives = InMemory(ranks, rank)
        communicator = HorovodCommunicator(collectives)
        communicator.start({})
        with collectives._pool:
            return body(communicator, collectives)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def alone() -> tuple[HorovodCommunicator, InMemory]:
    collectives = InMemory(Ranks(1), 0)
    return HorovodCommunicator(collectives), collectives


def test_numbers_are_exchanged_as_numpy_arrays_and_tensors_as_tensors() -> None:
    def body(communicator: HorovodCommunicator, _: InMemory) -> Any:
        rank = communicator.rank
        mean = communicator.wait(communicator.reduce_async(np.array([rank, 1.0]), "m"))
        rows = communicator.gather(np.full((rank + 1, 2), rank), "g")
        tensor = communicator.gather(Tensor(np.array([rank])), "t")
        assert isinstance(tensor, Tensor)
        communicator.barrier()
        return mean.tolist(), rows.tolist(), tensor.array.tolist()

    said = ([0.5, 1.0], [[0, 0], [1, 1], [1, 1]], [0, 1])
    assert on_each_rank(2, body) == [said, said]


@pytest.mark.parametrize("excess", [-_SHORT_BYTES, -1, 0, 1, 40_000])
def test_bytes_of_any_length_reach_every_rank(excess: int) -> None:
    data = bytes(range(256)) * 300
    data = data[: _SHORT_BYTES - _LENGTH_BYTES + excess] if excess > -_SHORT_BYTES else b""

    def body(communicator: HorovodCommunicator, collectives: InMemory) -> Any:
        received = communicator.broadcast_bytes(
            data if communicator.rank == 1 else b"other", RingRank(1)
        )
        assert communicator.waited_s == communicator.longest_wait_s == 0.0, "it may be long"
        return received == data, len(collectives.sent)

    assert on_each_rank(3, body) == [(True, 2 if excess > 0 else 1)] * 3


def test_a_broadcast_overwrites_variables_in_messages_of_a_fixed_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)

    def body(communicator: HorovodCommunicator, collectives: InMemory) -> Any:
        own = communicator.rank + 1
        variables = [Variable(np.arange(50.0) * own), Variable(np.int8(own)), Variable([])]
        communicator.broadcast(variables, RingRank(1))
        assert communicator.begun()["the state"] == 5
        return [each.value.array.tolist() for each in variables], collectives.sent

    values = [(np.arange(50.0) * 2).tolist(), 2, []]
    assert on_each_rank(2, body) == [(values, [100, 100, 100, 100, 1])] * 2


def test_ranks_that_have_a_state_send_equal_shares_to_those_that_lack_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)
    lacking = [False, True, False, True]

    def body(communicator: HorovodCommunicator, collectives: InMemory) -> Any:
        own = -1 if lacking[communicator.rank] else 1
        variables = [Variable(np.arange(20.0) * own), Variable(np.full(7, own, np.int8))]
        communicator.hand_over(variables, lacking)
        return [each.value.array.tolist() for each in variables], collectives.sent

    values = [np.arange(20.0).tolist(), [1] * 7]
    # Half of each bucket (100 and 67 bytes) to each of two ranks.
    sent = [[100, 66], [0, 0], [100, 68], [0, 0]]
    assert on_each_rank(4, body) == [(values, each) for each in sent]


def test_collectives_are_counted_by_name_and_gradients_together() -> None:
    communicator, _ = alone()
    communicator.start({})
    for number in range(2 * _COUNTED):
        communicator.gather(np.zeros(1), f"user.{number}")
    for _ in range(2):
        for name in ("gradient.a", "gradient.b"):
            communicator.wait(communicator.reduce_async(np.zeros(1), name))
    assert communicator.waiting_for == GRADIENTS
    communicator.barrier()
    assert communicator.waiting_for == BARRIER
    begun = communicator.begun()
    assert (begun.pop(GRADIENTS), begun.pop(BARRIER)) == (2, 1)
    latest = range(_COUNTED + 1, 2 * _COUNTED)
    assert begun == {f"allgather '{number}'": 1 for number in latest}
    communicator.start({})
    assert communicator.begun() == {GRADIENTS: 0}


def test_a_wait_can_be_seen_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, collectives = alone()
    seen: list[Any] = []

    def synchronize(_: Any) -> Tensor:
        seen.append((communicator.waiting_for, communicator.waiting_since is None))
        return Tensor(np.zeros(1))

    monkeypatch.setattr(collectives, "synchronize", synchronize)
    communicator.gather(np.zeros(1), "user.mine")
    assert seen == [("allgather 'mine'", False)]
    assert communicator.waiting_since is None
    assert communicator.waited_s >= communicator.longest_wait_s > 0.0


def test_a_failed_wait_of_a_graph_does_not_count_and_its_error_says_whether_all_is_broken() -> None:
    communicator, _ = alone()
    communicator.graph_waits(["gradient.a"])
    communicator.graph_ends(failed=True)
    assert (communicator.waiting_since, communicator.waited_s) == (None, 0.0)
    assert isinstance(communicator.translated("Mismatched shapes."), ScriptError)
    assert not communicator.broken
    assert isinstance(communicator.translated("Connection closed"), GenerationBrokenError)
    assert communicator.broken


def test_a_mismatch_is_the_scripts_error_and_breaks_nothing() -> None:
    def body(communicator: HorovodCommunicator, _: InMemory) -> Any:
        with pytest.raises(ScriptError, match=r"not fit together: Mismatched names\. All have"):
            communicator.gather(np.zeros(1), f"of {communicator.rank}")
        return communicator.broken

    assert on_each_rank(2, body) == [False, False]


def test_a_failure_breaks_the_generation_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, collectives = alone()

    def fail(*_: Any, **__: Any) -> Any:
        raise exceptions.HorovodInternalError("Connection closed by peer\nmore")

    for begins, name in ((True, "begin"), (False, "synchronize")):
        communicator.start({})
        assert not communicator.broken
        with monkeypatch.context() as patch:
            patch.setattr(collectives, name, fail)
            with pytest.raises(GenerationBrokenError, match=r"^Connection closed by peer$"):
                communicator.wait(communicator.reduce_async(np.zeros(1), "x"))
        assert communicator.broken
        assert (communicator.waited_s == 0.0) == begins
    communicator.stop(broken=True)
    assert collectives.calls == ["init", "init", "abort", "shutdown"]
    communicator.abort()
    assert collectives.calls[-1] == "abort"


def test_a_ring_that_cannot_be_made_is_shut_down() -> None:
    communicator, collectives = alone()

    def init() -> None:
        raise ValueError("no such peer")

    collectives.horovod.init = init
    with pytest.raises(GenerationBrokenError, match="could not be made: no such peer"):
        communicator.start({})
    assert collectives.calls == ["shutdown"]


def test_a_gpu_of_its_own_is_wanted_where_nccl_is(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, collectives = alone()
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    collectives.horovod.nccl_built = lambda: 22809
    communicator.check_device(1, 2)
    with pytest.raises(ScriptError, match=r"slot 2 has no GPU .* has 2 GPUs .*slots=2 in the"):
        communicator.check_device(2, 2)
    monkeypatch.setenv("NCCL_HOSTID", "own")
    communicator.check_device(2, 2)
    monkeypatch.delenv("NCCL_HOSTID")
    collectives.horovod.nccl_built = lambda: 0
    communicator.check_device(2, 2)  # by way of the CPU


def test_a_framework_without_horovod_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        ScriptError, match=r"Horovod cannot be used with .*hvd-elastic build-horovod"
    ):
        load_horovod("no_such_framework")


def test_alone_every_collective_is_the_identity() -> None:
    communicator = LocalCommunicator()
    value = np.array([1.0, 2.0])
    communicator.start({})
    assert communicator.wait(communicator.reduce_async(value, "x")) is value
    assert communicator.gather(value, "x") is value
    assert communicator.broadcast_bytes(b"x", FIRST) == b"x"
    communicator.broadcast([value], FIRST)
    communicator.hand_over([value], [False])
    communicator.barrier()
    communicator.stop(broken=True)
    assert (communicator.rank, communicator.size, value.tolist()) == (0, 1, [1.0, 2.0])
