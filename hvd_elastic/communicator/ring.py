"""Build and tear down Horovod's ring for each generation, and run its collectives."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_elastic.communicator.buckets import cut_into_buckets, scatter, share_of
from hvd_elastic.communicator.interface import (
    BARRIER,
    END_NAME,
    FIRST,
    FLAGS,
    FLAGS_NAME,
    GRADIENT_PREFIX,
    GRADIENTS,
    IN_FLIGHT,
    USER_PREFIX,
    Array,
    Collectives,
    GenerationBrokenError,
    RingRank,
    gradients_of,
)
from hvd_elastic.communicator.sockets import RingSockets
from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count

_COUNTED = 32
"""Number of collectives whose count is kept; ranks that wait for each other differ in the last."""
_SHORT_BYTES, _LENGTH_BYTES = 16 << 10, 8
"""Size of the first message of `broadcast_bytes`, which holds a decision about the batch, and
of the length in it."""


def load_horovod(framework: str) -> Any:
    """Import Horovod's module for a framework (``torch``, ``tensorflow``) and return it.

    The import takes a second or more, so a standby worker does it before it is announced.

    Raises:
        ScriptError: it cannot be imported.
    """
    try:
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise ScriptError(
            f"Horovod cannot be used with {sys.executable}: {error}. Build and install it with "
            "`hvd-elastic build-horovod`; `hvd-elastic doctor` says what is missing."
        ) from error


class _Begun(NamedTuple):
    handle: Any
    name: str
    is_numpy: bool


class HorovodCommunicator:
    """A :class:`~hvd_elastic.communicator.interface.Communicator` of several processes.

    Args:
        collectives: Horovod for the framework of the script.
    """

    def __init__(self, collectives: Collectives) -> None:
        from horovod.common.exceptions import HorovodInternalError

        self._failure = HorovodInternalError
        self._collectives = collectives
        self._horovod = collectives.horovod
        self._sockets = RingSockets()
        # Buckets being sent. After a failure Horovod may use them until it is shut down.
        self._in_flight: deque[tuple[list[Any], _Begun]] = deque()
        self.rank = FIRST
        self.size = 1
        self.waiting_since: float | None = None
        self.waiting_for = ""
        self.longest_wait_s = 0.0
        self.waited_s = 0.0
        self.broken = False
        # Number of times that each collective was begun; the others ordered by their last time.
        self._gradients: dict[str, int] = {}
        self._others: dict[str, int] = {}

    # -- life cycle ------------------------------------------------------------------------

    def check_device(self, local_rank: int, devices: int) -> None:
        # NCCL refuses two ranks of a machine on one GPU.
        if local_rank < devices or "NCCL_HOSTID" in os.environ or not self._horovod.nccl_built():
            return
        raise ScriptError(
            f"slot {local_rank} has no GPU of its own: the host has {count(devices, 'GPU')} that "
            f"{self._collectives.framework} can use, and NCCL does not let two ranks share one. "
            f"Write slots={devices} in the hostfile, or look at CUDA_VISIBLE_DEVICES (empty: train "
            "on the CPUs). To share a GPU all the same, for a trial, give each worker a "
            "NCCL_HOSTID of its own"
        )

    def warm(self) -> None:
        self._collectives.warm()

    def start(self, env: Mapping[str, str]) -> None:
        """Build the ring; an empty ``env`` keeps the variables set by the launcher."""
        os.environ.update(env)
        self._gradients, self._others = {}, {}
        with self._sockets.opening():
            try:
                self._horovod.init()
            except (ValueError, RuntimeError) as error:
                self._horovod.shutdown()
                raise GenerationBrokenError(
                    f"the communicator could not be made: {error}"
                ) from error
        self.refresh()

    def refresh(self) -> None:
        self.rank, self.size = RingRank(self._horovod.rank()), self._horovod.size()
        self.broken = False

    def stop(self, *, broken: bool = False) -> None:
        # Horovod keeps the sockets of a finished generation open until the next one. Peers that do
        # not know of the end yet would wait on them for 30 s.
        if broken:
            self._abort_nccl()
            self._sockets.shut()
        self._horovod.shutdown()
        self._sockets.shut()
        self._in_flight.clear()

    def abort(self) -> None:
        # Gloo's sockets are shut down; NCCL has a function for it.
        self._abort_nccl()
        self._sockets.abort()

    def _abort_nccl(self) -> None:
        # A Horovod without this project's patch lacks the function.
        library = self._horovod.mpi_ops._basics.MPI_LIB_CTYPES
        getattr(library, "horovod_abort", lambda: None)()

    # -- counts and waits ------------------------------------------------------------------

    def begun(self) -> dict[str, int]:
        begun = {GRADIENTS: 0}
        for name, times in self._gradients.copy().items():
            label = gradients_of(name)
            begun[label] = max(begun.get(label, 0), times)
        return {**begun, **self._others.copy()}

    def _count(self, name: str) -> str:
        self._others[name] = self._others.pop(name, 0) + 1
        if len(self._others) > _COUNTED:
            del self._others[next(iter(self._others))]
        return name

    def _begin(
        self, shown: str, kind: str, array: Array, name: str, *more: Any, **options: Any
    ) -> _Begun:
        """Begin a collective; ``shown`` describes it in messages about waits."""
        is_numpy = isinstance(array, np.ndarray)
        tensor = self._collectives.from_numpy(array) if is_numpy else array
        try:
            handle = self._collectives.begin(kind, tensor, name, *more, **options)
        except self._failure as error:
            raise self._translated(error) from error
        return _Begun(handle, shown, is_numpy)

    def wait(self, handle: _Begun, *, is_usual: bool = True) -> Array:
        """Wait for a collective; an unusual wait does not count in the statistics of waits."""
        result = self._waited(
            handle.name, self._collectives.synchronize, handle.handle, is_usual=is_usual
        )
        return self._collectives.to_numpy(result) if handle.is_numpy else result

    def graph_waits(self, names: Sequence[str]) -> None:
        for name in names:
            if name.startswith(GRADIENT_PREFIX):
                self._gradients[name] = self._gradients.get(name, 0) + 1
        self.waiting_for, self.waiting_since = GRADIENTS, time.monotonic()

    def graph_ends(self, *, failed: bool = False) -> None:
        began, self.waiting_since = self.waiting_since, None
        if began is not None and not failed:
            waited_s = time.monotonic() - began
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
            self.waited_s += waited_s

    def translated(self, message: str) -> GenerationBrokenError | ScriptError:
        return self._translated(RuntimeError(message))

    def _waited(
        self, name: str, wait: Callable[..., Any], *args: Any, is_usual: bool = True
    ) -> Any:
        """Call ``wait``, measure its time and translate its errors."""
        self.waiting_for = name
        self.waiting_since = begin = time.monotonic()
        try:
            result = wait(*args)
            if is_usual:
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - begin)
            return result
        except self._failure as error:
            raise self._translated(error) from error
        finally:
            if is_usual:
                self.waited_s += time.monotonic() - begin
            self.waiting_since = None

    def _translated(self, error: BaseException) -> GenerationBrokenError | ScriptError:
        line = str(error).strip().split("\n")[0]
        if line.startswith("Mismatched"):  # all ranks get this error, and none is lost
            return ScriptError(
                f"what the ranks exchange does not fit together: {line} All have to call the same "
                "collectives under the same names, with tensors of one type and shape"
            )
        self.broken = True
        return GenerationBrokenError(line)

    # -- collectives -----------------------------------------------------------------------

    def reduce_async(self, array: Array, name: str, *, sent_as: str = "") -> _Begun:
        return self._begin_named(
            "allreduce", array, name, sent_as=sent_as, op=self._horovod.Average
        )

    def sum_async(self, array: Array, name: str) -> _Begun:
        return self._begin_named("allreduce", array, name, op=self._horovod.Sum)

    def sum_with_flags_async(
        self, array: Array, flags: np.ndarray, name: str
    ) -> tuple[_Begun, Callable[[], np.ndarray]]:
        sums = array[len(array) - len(flags) :]
        sums[:] = self._collectives.from_numpy(flags)
        begun = self.sum_async(array, name)
        return begun, lambda: self._collectives.to_numpy(sums) / self.size

    def exchange_async(self, array: Array, name: str) -> _Begun:
        return self._begin_named("alltoall", array, name, self._splits([1] * self.size))

    def gather_async(self, array: Array, name: str) -> _Begun:
        return self._begin_named("allgather", array, name)

    def _splits(self, rows: Sequence[int]) -> Any:
        """Return a tensor with the number of rows that go to each rank."""
        return self._collectives.from_numpy(np.array(rows, np.int32))

    def gather(self, array: Array, name: str) -> Array:
        return self.wait(self.gather_async(array, name))

    def _begin_named(
        self, kind: str, array: Array, name: str, *more: Any, sent_as: str = "", **options: Any
    ) -> _Begun:
        if name.startswith(GRADIENT_PREFIX):
            begun = self._begin(gradients_of(name), kind, array, name, *more, **options)
            self._gradients[name] = self._gradients.get(name, 0) + 1
            return begun
        words = {FLAGS_NAME: FLAGS, END_NAME: BARRIER}.get(name, f"{kind} {_user_name(name)}")
        return self._begin(self._count(words), kind, array, sent_as or name, *more, **options)

    def broadcast(self, arrays: Sequence[Array], root_rank: RingRank) -> None:

        def begin(bucket: list[Any], number: int) -> _Begun:
            message = self._joined(bucket)
            name = f"hvd_elastic.state.{number}"
            shown = self._count("the state")
            return self._begin(shown, "broadcast", message, name, root_rank=root_rank)

        def end(bucket: list[Any], message: Any) -> None:
            # A message of one slice may have been overwritten in place.
            if self.rank != root_rank and message is not bucket[0]:
                scatter(message, bucket)

        self._stream(arrays, begin, end, receives=self.rank != root_rank)

    def hand_over(self, arrays: Sequence[Array], lacking: Sequence[bool]) -> None:
        holders = [rank for rank, lacks in enumerate(lacking) if not lacks]

        def begin(bucket: list[Any], number: int) -> _Begun:
            share: list[Any] = []
            if not lacking[self.rank]:
                share = share_of(bucket, holders.index(self.rank), len(holders))
            size = sum(map(len, share))
            copies = self._joined(share * sum(lacking)) if size else bucket[0][:0]
            splits = self._splits([size if lacks else 0 for lacks in lacking])
            name = f"hvd_elastic.share.{number}"
            shown = self._count("the state")
            return self._begin(shown, "alltoall", copies, name, splits)

        def end(bucket: list[Any], message: Any) -> None:
            if lacking[self.rank]:
                scatter(message, bucket)

        self._stream(arrays, begin, end, receives=lacking[self.rank])

    def _joined(self, pieces: list[Any]) -> Any:
        return pieces[0] if len(pieces) == 1 else self._collectives.join(pieces)

    def _stream(
        self,
        arrays: Sequence[Array],
        begin: Callable[[list[Any], int], _Begun],
        end: Callable[[list[Any], Any], None],
        *,
        receives: bool,
    ) -> None:
        """Exchange arrays bucket by bucket; several buckets are in flight at the same time.

        Args:
            arrays: arrays in the same order on all ranks.
            begin: function that begins the collective of a bucket, given the bucket and a number,
                which no other bucket in flight has.
            end: function that is called with a bucket and the result of its collective.
            receives: whether this rank's arrays are overwritten.
        """

        def finish_first() -> None:
            bucket, begun = self._in_flight.popleft()
            end(bucket, self.wait(begun))

        with self._collectives.as_bytes(arrays, receives=receives) as devices:
            buckets = itertools.chain.from_iterable(map(cut_into_buckets, devices))
            for number, bucket in enumerate(buckets):
                self._in_flight.append((bucket, begin(bucket, number % IN_FLIGHT)))
                if len(self._in_flight) == IN_FLIGHT:
                    finish_first()
            while self._in_flight:
                finish_first()

    def broadcast_bytes(self, data: bytes, root_rank: RingRank) -> bytes:
        # Short data is one message, which begins with its length.
        shown = self._count("a broadcast")

        def broadcast(message: np.ndarray) -> bytes:
            name = "hvd_elastic.bytes"
            begun = self._begin(shown, "broadcast", message, name, root_rank=root_rank)
            # The root may load a checkpoint first, so the wait can be unusually long.
            result: np.ndarray = self.wait(begun, is_usual=False)
            return result.tobytes()

        framed = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little") + data, np.uint8)
        first = np.zeros(_SHORT_BYTES, np.uint8)
        if self.rank == root_rank:
            first[: len(framed)] = framed[:_SHORT_BYTES]
        received = broadcast(first)
        end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "little")
        if end > _SHORT_BYTES:
            rest = np.zeros(end - _SHORT_BYTES, np.uint8)
            if self.rank == root_rank:
                rest[:] = framed[_SHORT_BYTES:]
            received += broadcast(rest)
        return received[_LENGTH_BYTES:end]

    def barrier(self) -> None:
        self._waited(self._count(BARRIER), self._collectives.barrier)


def _user_name(name: str) -> str:
    return repr(name.removeprefix(USER_PREFIX))
