"""Collectives behind one narrow interface: Horovod's, or none at all for a single process.

Horovod is imported only when an engine that needs it is made, so a script runs as plain
``python train.py`` on a machine that has torch alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hvd_elastic.errors import ScriptError

__all__ = [
    "BARRIER",
    "GRADIENTS",
    "Engine",
    "GenerationBrokenError",
    "HorovodEngine",
    "LocalEngine",
]

GRADIENTS = "the gradients"
BARRIER = "the end of training (its training function has returned)"
_GRADIENT = "gradient."  # how the names of their reductions begin
_COUNTED = 32  # collectives whose number is kept; ranks that wait are apart by one or two
_ABORT_INTERVAL_S = 0.05
# Large enough for the link to be busy, small enough for copies to pass while the next ones travel.
_BUCKET_BYTES = 16 << 20
_IN_FLIGHT = 3
# A review's decision, with two groups of parameters, is no longer.
_SHORT_BYTES, _LENGTH_BYTES = 16 << 10, 8


class GenerationBrokenError(RuntimeError):
    """A collective failed because a member of the generation is gone; the state is whole."""


class Engine(Protocol):
    """What training needs of a communicator."""

    rank: int
    size: int
    waiting_since: float | None
    """When the wait for the other ranks began that is going on now [s, monotonic]; None: none."""
    waiting_for: str
    """The collective of that wait, or of the last one."""
    longest_wait_s: float
    """Of the waits that came to a good end."""
    waited_s: float
    """All waits for other ranks together."""
    broken: bool
    """Whether a collective has failed since the communicator was made."""

    def check_device(self, local_rank: int, devices: int) -> None:
        """Whether slot ``local_rank`` of a host with so many GPUs can exchange what is on its GPU.

        Raises:
            ScriptError: it cannot; says what to change.
        """

    def warm(self) -> None:
        """Do beforehand what is slow the first time, without anybody else."""

    def start(self, env: Mapping[str, str]) -> None:
        """Meet the other members; ``env`` holds the rank variables of the generation.

        Raises:
            GenerationBrokenError: somebody did not come.
        """

    def stop(self, *, broken: bool = False) -> None:
        """Leave the communicator; the process can start another one.

        Args:
            broken: a member is gone, so do not part in good order with the others.
        """

    def refresh(self) -> None:
        """Read the ranks again: somebody else has made a new communicator."""

    def abort(self) -> None:
        """Make every blocked or later collective of this communicator fail; from any thread."""

    def begun(self) -> dict[str, int]:
        """How often this rank has begun its latest collectives, in this communicator.

        All gradients count as one collective, `GRADIENTS`, once a step; from any thread.
        """

    def reduce_async(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin averaging ``tensor`` in place over all ranks; returns a handle for `wait`."""

    def wait(self, handle: Any) -> torch.Tensor:
        """The result of a begun collective.

        Raises:
            GenerationBrokenError: a member is gone.
            ScriptError: the ranks gave it tensors of different types or shapes.
        """

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Concatenation over ranks, in rank order, along the first dimension."""

    def broadcast(self, tensors: list[torch.Tensor], root_rank: int) -> None:
        """Overwrite ``tensors`` in place with the root's, in few large messages."""

    def hand_over(self, tensors: list[torch.Tensor], lacking: Sequence[bool]) -> None:
        """Overwrite ``tensors`` on the ranks that lack them with those of the others.

        Every rank that has them sends an equal share to every rank that lacks them, at the same
        time; nothing is sent to those that have them.

        Args:
            tensors: of the same shapes and types on all ranks.
            lacking: for each rank, whether it lacks them; at least one does not.
        """

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        """The root's ``data`` on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class LocalEngine:
    """One process on its own: every collective is the identity."""

    rank = 0
    size = 1
    waiting_since: float | None = None
    waiting_for = ""
    longest_wait_s = 0.0
    waited_s = 0.0
    broken = False

    def check_device(self, local_rank: int, devices: int) -> None:
        """Nothing is exchanged."""

    def warm(self) -> None:
        """Nothing is slow."""

    def start(self, env: Mapping[str, str]) -> None:
        """Nothing to meet."""

    def stop(self, *, broken: bool = False) -> None:
        """Nothing to leave."""

    def refresh(self) -> None:
        """The ranks cannot change."""

    def abort(self) -> None:
        """Nothing can block."""

    def begun(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def reduce_async(self, tensor: torch.Tensor, name: str) -> Any:
        """The average of one is itself."""
        return tensor

    def wait(self, handle: Any) -> torch.Tensor:
        """Always done."""
        result: torch.Tensor = handle
        return result

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Only one rank's."""
        return tensor

    def broadcast(self, tensors: list[torch.Tensor], root_rank: int) -> None:
        """Already the root's."""

    def hand_over(self, tensors: list[torch.Tensor], lacking: Sequence[bool]) -> None:
        """Nobody to give them to."""

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        """Already the root's."""
        return data

    def barrier(self) -> None:
        """Alone."""


class HorovodEngine:
    """Horovod's communicator, made and torn down as generations come and go."""

    def __init__(self) -> None:
        # Importing it takes a second or more: a standby worker does that before it is announced.
        try:
            import horovod.torch as horovod
            from horovod.common.exceptions import HorovodInternalError
            from horovod.torch.mpi_ops import _basics
        except ImportError as error:
            raise ScriptError(
                f"Horovod cannot be used with {sys.executable}: {error}. Build and install it with "
                "`hvd-elastic build-horovod`; `hvd-elastic doctor` says what is missing."
            ) from error

        self._horovod = horovod
        self._failure = HorovodInternalError
        # A Horovod from elsewhere lacks it.
        self._call_back = getattr(_basics.MPI_LIB_CTYPES, "horovod_abort", lambda: None)
        self._before: set[str] = set()
        self._own: set[str] = set()
        self._rendezvous: tuple[str, int] | None = None
        # Buckets of a state that are on their way, with their handles.
        self._begun: deque[tuple[list[torch.Tensor], Any]] = deque()
        self._settled = threading.Event()
        self._settled.set()
        self.rank = 0
        self.size = 1
        self.waiting_since: float | None = None
        self.waiting_for = ""
        self.longest_wait_s = 0.0
        self.waited_s = 0.0
        self.broken = False
        # How often each was begun; of the others the latest come last, and old ones are dropped.
        self._gradients: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self._names: dict[Any, str] = {}  # by handle; gradients are left out

    @property
    def horovod(self) -> Any:
        """The ``horovod.torch`` module, for what this interface does not cover."""
        return self._horovod

    def check_device(self, local_rank: int, devices: int) -> None:
        """See :class:`Engine`: two ranks of a machine on one GPU are an error to NCCL."""
        if local_rank < devices or "NCCL_HOSTID" in os.environ or not self._horovod.nccl_built():
            return
        gpus = "GPU" if devices == 1 else "GPUs"
        raise ScriptError(
            f"slot {local_rank} has no GPU of its own: the host has {devices} {gpus} that PyTorch "
            f"can use, and NCCL does not let two ranks share one. Write slots={devices} in the "
            "hostfile, or look at CUDA_VISIBLE_DEVICES (empty: train on the CPUs). To share a GPU "
            "all the same, for a trial, give each worker a NCCL_HOSTID of its own"
        )

    def warm(self) -> None:
        """See :class:`Engine`: NCCL looks over the machine and loads its kernels."""
        if torch.cuda.is_available() and self._horovod.nccl_built():
            alone = torch.zeros(1, device="cuda")
            torch.cuda.nccl.all_reduce([alone], [torch.empty_like(alone)])

    def start(self, env: Mapping[str, str]) -> None:
        """See :class:`Engine`; an empty ``env`` takes the variables as a launcher set them."""
        os.environ.update(env)
        if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
            port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
            self._rendezvous = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port)
        self._gradients, self._others, self._names = {}, {}, {}
        self._before = set(_sockets().values())
        self._settled.clear()
        try:
            self._horovod.init()
        except (ValueError, RuntimeError) as error:
            self._horovod.shutdown()
            raise GenerationBrokenError(f"the communicator could not be made: {error}") from error
        finally:
            # Whatever was opened while the communicator was being made is the communicator's.
            self._own = set(_sockets().values()) - self._before
            self._settled.set()
        self.refresh()

    def refresh(self) -> None:
        """See :class:`Engine`."""
        self.rank, self.size = self._horovod.rank(), self._horovod.size()
        self.broken = False

    def stop(self, *, broken: bool = False) -> None:
        """See :class:`Engine`."""
        # Horovod keeps a finished generation's sockets open until the next one; peers that have
        # not heard of the end yet would wait for 30 s on them.
        if broken:
            self._call_back()
            self._shut_sockets()
        self._horovod.shutdown()
        self._shut_sockets()
        # What has not ended by now has no handle any more.
        self._begun.clear()

    def abort(self) -> None:
        """See :class:`Engine`.

        Gloo's sockets are those this process opened while the communicator was being made. Until
        it is made it opens more, so shutting them is repeated. NCCL makes its own with the first
        collective of a device; a patched Horovod gives that up when it is told.
        """

        def repeat() -> None:
            while True:
                self._shut_sockets()
                if self._settled.wait(_ABORT_INTERVAL_S):
                    self._shut_sockets()
                    return

        self._call_back()
        self._shut_sockets()
        if not self._settled.is_set():
            threading.Thread(target=repeat, name="hvd_elastic-abort", daemon=True).start()

    def _shut_sockets(self) -> None:
        made = self._settled.is_set()
        for descriptor, name in _sockets().items():
            if name not in self._own if made else name in self._before:
                continue
            with contextlib.suppress(OSError):
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate:
                    # The descriptor may have been closed and reused since it was listed.
                    if _target(duplicate.fileno()) != name or (
                        duplicate.family not in (socket.AF_INET, socket.AF_INET6)
                    ):
                        continue
                    # The store ends its requests itself; one that breaks is repeated in 0.5 s.
                    if not made and self._rendezvous and _peer(duplicate) == self._rendezvous:
                        continue
                    duplicate.shutdown(socket.SHUT_RDWR)

    def reduce_async(self, tensor: torch.Tensor, name: str) -> Any:
        """See :class:`Engine`."""
        # Some for each parameter and step: without the context managers, which cost as much again.
        try:
            handle = self._horovod.allreduce_async_(tensor, name=name, op=self._horovod.Average)
        except self._failure as error:
            raise self._ours(error) from error
        if name.startswith(_GRADIENT):
            self._gradients[name] = self._gradients.get(name, 0) + 1
        else:
            self._names[handle] = self._count(f"allreduce {_user_name(name)}")
        return handle

    def _count(self, name: str) -> str:
        self._others[name] = self._others.pop(name, 0) + 1
        if len(self._others) > _COUNTED:
            del self._others[next(iter(self._others))]
        return name

    def begun(self) -> dict[str, int]:
        """See :class:`Engine`."""
        return {GRADIENTS: max(self._gradients.copy().values(), default=0), **self._others.copy()}

    def wait(self, handle: Any) -> torch.Tensor:
        """See :class:`Engine`."""
        self.waiting_for = self._names.pop(handle, GRADIENTS)
        self.waiting_since = begin = time.monotonic()
        try:
            result: torch.Tensor = self._horovod.synchronize(handle)
        except self._failure as error:
            raise self._ours(error) from error
        finally:
            waited_s = time.monotonic() - begin
            self.waited_s += waited_s
            self.waiting_since = None
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        return result

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """See :class:`Engine`."""
        with self._translated(), self._waiting(f"allgather {_user_name(name)}"):
            result: torch.Tensor = self._horovod.allgather(tensor, name=name)
            return result

    def broadcast(self, tensors: list[torch.Tensor], root_rank: int) -> None:
        """See :class:`Engine`."""

        def begin(bucket: list[torch.Tensor], number: int) -> Any:
            name = f"hvd_elastic.state.{number}"
            return self._horovod.broadcast_async_(_join(bucket), root_rank, name=name)

        def end(bucket: list[torch.Tensor], flat: torch.Tensor) -> None:
            # One tensor alone has been overwritten where it lies.
            if len(bucket) > 1 and self.rank != root_rank:
                _scatter(flat, bucket)

        with _as_bytes(tensors) as views:
            self._stream(views, begin, end)

    def hand_over(self, tensors: list[torch.Tensor], lacking: Sequence[bool]) -> None:
        """See :class:`Engine`."""
        holders = [rank for rank, lacks in enumerate(lacking) if not lacks]

        def begin(bucket: list[torch.Tensor], number: int) -> Any:
            own = bucket[0].new_empty(0)
            if not lacking[self.rank]:
                share = _share(bucket, holders.index(self.rank), len(holders))
                own = _join(share) if share else own
            parts = [own.numel() if lacks else 0 for lacks in lacking]
            splits = torch.tensor(parts, dtype=torch.int32)
            copies = own.repeat(sum(lacking)) if own.numel() and sum(lacking) > 1 else own
            name = f"hvd_elastic.share.{number}"
            return self._horovod.alltoall_async(copies, splits, name=name)

        def end(bucket: list[torch.Tensor], received: tuple[torch.Tensor, torch.Tensor]) -> None:
            if lacking[self.rank]:
                _scatter(received[0], bucket)

        with _as_bytes(tensors) as views:
            self._stream(views, begin, end)

    def _stream(
        self,
        views: list[torch.Tensor],
        begin: Callable[[list[torch.Tensor], int], Any],
        end: Callable[[list[torch.Tensor], Any], None],
    ) -> None:
        """Send bytes bucket by bucket, the next ones on their way while one is put in its place.

        Args:
            views: the bytes, in the same order on all ranks.
            begin: starts the collective of a bucket, whose number it is told; returns its handle.
            end: told the bucket and the result.
        """

        def finish_first() -> None:
            bucket, handle = self._begun.popleft()
            end(bucket, self.wait(handle))

        for number, bucket in enumerate(_buckets(views)):
            with self._translated():
                handle = begin(bucket, number)
            self._names[handle] = self._count("the state")
            self._begun.append((bucket, handle))
            if len(self._begun) == _IN_FLIGHT:
                finish_first()
        while self._begun:
            finish_first()

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        """See :class:`Engine`: what is short goes in one message, with its length before it."""
        first = bytearray(_SHORT_BYTES)
        if self.rank == root_rank:
            head = (
                len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _SHORT_BYTES - _LENGTH_BYTES]
            )
            first[: len(head)] = head
        # The root may load a checkpoint first, which says nothing about usual waits.
        with self._translated(), self._waiting("a broadcast", is_usual=False):
            self._broadcast_bytearray(first, root_rank)
            total = int.from_bytes(first[:_LENGTH_BYTES], "little")
            received = bytes(first[_LENGTH_BYTES : _LENGTH_BYTES + total])
            if total > len(received):
                rest = bytearray(total - len(received))
                if self.rank == root_rank:
                    rest[:] = data[len(received) :]
                self._broadcast_bytearray(rest, root_rank)
                received += rest
        return received

    def _broadcast_bytearray(self, data: bytearray, root_rank: int) -> None:
        shared = torch.frombuffer(data, dtype=torch.uint8)
        self._horovod.broadcast_(shared, root_rank, name="hvd_elastic.bytes")

    def barrier(self) -> None:
        """See :class:`Engine`."""
        with self._translated(), self._waiting(BARRIER):
            self._horovod.barrier()

    @contextlib.contextmanager
    def _waiting(self, name: str, *, is_usual: bool = True) -> Iterator[None]:
        self.waiting_for = self._count(name)
        self.waiting_since = begin = time.monotonic()
        try:
            yield
            if is_usual:
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - begin)
        finally:
            if is_usual:
                self.waited_s += time.monotonic() - begin
            self.waiting_since = None

    @contextlib.contextmanager
    def _translated(self) -> Any:
        try:
            yield
        except self._failure as error:
            raise self._ours(error) from error

    def _ours(self, error: BaseException) -> GenerationBrokenError | ScriptError:
        """What Horovod's failure means here."""
        line = str(error).strip().split("\n")[0]
        if line.startswith("Mismatched"):  # told to all ranks, none of which is gone
            return ScriptError(
                f"what the ranks exchange does not fit together: {line} All have to call the same "
                "collectives under the same names, with tensors of one type and shape"
            )
        self.broken = True
        return GenerationBrokenError(line)


def _user_name(name: str) -> str:
    return repr(name.removeprefix("user."))


def _sockets() -> dict[int, str]:
    """Descriptor → ``socket:[inode]`` of every socket this process has open now."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = _target(int(entry.name))
            if target.startswith("socket:"):
                found[int(entry.name)] = target
    return found


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    """Address and port of the other end; None while there is none."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return None
    return address, port


def _target(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@contextlib.contextmanager
def _as_bytes(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The bytes of each tensor, to read and to write; Horovod does not know every type."""
    with torch.no_grad():
        in_order = [tensor.detach().contiguous() for tensor in tensors]
        yield [tensor.reshape(-1).view(torch.uint8) for tensor in in_order if tensor.numel()]
        for tensor, ordered in zip(tensors, in_order, strict=True):
            if tensor.data_ptr() != ordered.data_ptr():
                tensor.copy_(ordered)


def _buckets(views: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Bytes of one device together, at most 16 MB each, in a fixed order; large ones are cut."""
    for device in dict.fromkeys(view.device for view in views):
        bucket: list[torch.Tensor] = []
        room = _BUCKET_BYTES
        for view in views:
            at = 0
            while view.device == device and at < view.numel():
                bucket.append(view[at : at + room])
                at += bucket[-1].numel()
                room -= bucket[-1].numel()
                if not room:
                    yield bucket
                    bucket, room = [], _BUCKET_BYTES
        if bucket:
            yield bucket


def _join(bucket: list[torch.Tensor]) -> torch.Tensor:
    """The bytes in one piece; what is in one piece already is not copied."""
    return bucket[0] if len(bucket) == 1 else torch.cat(bucket)


def _share(bucket: list[torch.Tensor], index: int, shares: int) -> list[torch.Tensor]:
    """The bytes of one of so many equal shares of a bucket."""
    size = sum(view.numel() for view in bucket)
    first, last = size * index // shares, size * (index + 1) // shares
    found, offset = [], 0
    for view in bucket:
        part = view[max(0, first - offset) : max(0, last - offset)]
        if part.numel():
            found.append(part)
        offset += view.numel()
    return found


def _scatter(flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    offset = 0
    for view in bucket:
        view.copy_(flat[offset : offset + view.numel()])
        offset += view.numel()


def dump_plain(value: Any) -> bytes:
    """Serialise plain data and tensors, readable by :func:`load_plain`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_plain(data: bytes) -> Any:
    """What :func:`dump_plain` wrote; refuses anything that would run code."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
