"""Define the interface of a communicator, and what a frontend supplies to make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NewType, Protocol, TypeAlias

import numpy as np

GRADIENTS = "the gradients"
BARRIER = "the end of training (its training function has returned, or model.fit)"
FLAGS = "the flags that the ranks exchange in each step, and where an epoch ends"
FLAGS_NAME = "hvd_elastic.change"
"""Name of the reduction of these flags."""
END_NAME = "hvd_elastic.end"
"""Name of the comparison of parameters at the end of training, which is named as the barrier is."""
GRADIENT_PREFIX = "gradient"
"""Prefix of the names of gradient reductions, which count as one collective together."""
IN_FLIGHT = 3
"""Most buckets of the state that are sent at the same time."""
USER_PREFIX = "user."
"""Prefix of the names of collectives that the script called; messages omit it."""

RingRank = NewType("RingRank", int)
"""Number of a process in the ring of a communicator, which need not hold all workers of a run. The
run's rank is another thing: :attr:`Worker.rank` chooses data and names shards."""
FIRST = RingRank(0)
"""The process of a ring whose decisions and tensors all take, where any will do."""

Array: TypeAlias = Any
"""A numpy array or a tensor of the frontend; a collective returns the type that it is given."""


def gradient_prefix(optimizer: int) -> str:
    """Return the prefix of the names of an optimizer's gradient reductions.

    >>> gradient_prefix(0), gradient_prefix(1)
    ('gradient.', 'gradient:2.')
    """
    return f"{GRADIENT_PREFIX}." if optimizer == 0 else f"{GRADIENT_PREFIX}:{optimizer + 1}."


def gradients_of(name: str) -> str:
    """Return what messages call the gradient reductions of the optimizer of ``name``.

    >>> gradients_of("gradient.weight"), gradients_of("gradient:2.0.weight")
    ('the gradients', 'the gradients of optimizer 2')
    """
    if name.startswith(f"{GRADIENT_PREFIX}."):
        return GRADIENTS
    return f"{GRADIENTS} of optimizer {name.partition('.')[0].partition(':')[2]}"


class GenerationBrokenError(RuntimeError):
    """A collective failed because a member of the generation is lost; the state is consistent."""


class Communicator(Protocol):
    """Interface of a communicator of the ranks of a generation."""

    rank: RingRank
    size: int
    """Number of processes in the ring."""
    waiting_since: float | None
    """Time when the current wait for other ranks began [s, monotonic]; None: not waiting."""
    waiting_for: str
    """Name of the collective of the current or the last wait."""
    longest_wait_s: float
    """Longest wait of a collective that succeeded."""
    waited_s: float
    """Total time spent waiting for other ranks."""
    broken: bool
    """Whether a collective has failed since the ring was built."""

    def check_device(self, local_rank: int, devices: int) -> None:
        """Check that this slot has a GPU that it can exchange tensors of.

        Args:
            local_rank: slot on the host.
            devices: number of GPUs of the host.

        Raises:
            ScriptError: it has none; says what to change.
        """

    def warm(self) -> None:
        """Run slow first-time initialisation that needs no other rank."""

    def start(self, env: Mapping[str, str]) -> None:
        """Build the ring with the other members.

        Args:
            env: Horovod's rank variables of the generation.

        Raises:
            GenerationBrokenError: a member is missing.
        """

    def stop(self, *, broken: bool = False) -> None:
        """Leave the ring; the process can start another one.

        Args:
            broken: whether a member is lost, so that an orderly shutdown is not possible.
        """

    def refresh(self) -> None:
        """Read rank and size again after another library has built a new ring."""

    def abort(self) -> None:
        """Make every pending and later collective of this ring fail. Thread-safe."""

    def begun(self) -> dict[str, int]:
        """Return by name how often this rank has begun its latest collectives in this ring.

        All gradients of an optimizer's step count as one collective, `GRADIENTS` for the first
        optimizer. Thread-safe.
        """

    def graph_waits(self, names: Sequence[str]) -> None:
        """Note that a graph of the framework waits for its own reductions under these names."""

    def graph_ends(self, *, failed: bool = False) -> None:
        """Note that the reductions of :meth:`graph_waits` have ended."""

    def translated(self, message: str) -> Exception:
        """Return what to raise for a reduction of a graph that has failed with a message."""

    def reduce_async(self, array: Array, name: str, *, sent_as: str = "") -> Any:
        """Begin averaging ``array`` over all ranks and return a handle for `wait`.

        The array may be overwritten, as PyTorch's tensors are, and numpy arrays that share their
        memory.

        Args:
            array: what is averaged.
            name: name of the reduction, the same on all ranks.
            sent_as: another name, under which it meets a collective of ranks that do not call this:
                then all ranks get an error, and none waits forever.
        """

    def sum_async(self, array: Array, name: str) -> Any:
        """Begin adding ``array`` up over all ranks, as :meth:`reduce_async` averages it."""

    def sum_with_flags_async(
        self, array: Array, flags: np.ndarray, name: str
    ) -> tuple[Any, Callable[[], np.ndarray]]:
        """Begin adding up ``array`` as :meth:`sum_async` does, with flags in its last elements.

        Returns:
            The handle, and a function that returns the average of all ranks' flags after the wait.
        """

    def exchange_async(self, array: Array, name: str) -> Any:
        """Begin sending one row of ``array`` to each rank; the result has a row from each rank.

        Args:
            array: its first dimension is the number of ranks.
            name: name of the exchange, the same on all ranks.
        """

    def gather_async(self, array: Array, name: str) -> Any:
        """Begin joining the arrays of all ranks, as :meth:`gather` does."""

    def wait(self, handle: Any) -> Array:
        """Wait for a collective and return its result.

        Raises:
            GenerationBrokenError: a member is lost.
            ScriptError: the ranks gave arrays of different types or shapes.
        """

    def gather(self, array: Array, name: str) -> Array:
        """Return the arrays of all ranks, in rank order, joined along the first dimension."""

    def broadcast(self, arrays: Sequence[Array], root_rank: RingRank) -> None:
        """Overwrite ``arrays`` in place with the root's, in few large messages."""

    def hand_over(self, arrays: Sequence[Array], lacking: Sequence[bool]) -> None:
        """Overwrite ``arrays`` on the ranks that lack them with those of the other ranks.

        Every rank that has them sends an equal share to every rank that lacks them, all at the
        same time; ranks that have them receive nothing.

        Args:
            arrays: arrays of the same shapes and types on all ranks.
            lacking: for each rank, whether it lacks them; at least one rank has them.
        """

    def broadcast_bytes(self, data: bytes, root_rank: RingRank) -> bytes:
        """Return the root's ``data`` on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class Collectives(Protocol):
    """Interface that a frontend supplies: Horovod for its framework, collectives on its tensors.

    :meth:`begin` and :meth:`synchronize` raise Horovod's ``HorovodInternalError`` with its text.
    """

    framework: str
    """Name of the framework, for messages."""
    horovod: Any
    """Horovod's module for the framework, from :func:`~hvd_elastic.communicator.ring.load_horovod`.

    The communicator uses its ``init``, ``shutdown``, ``rank``, ``size``, ``nccl_built``,
    ``Average``, ``Sum`` and the extension behind ``mpi_ops``.
    """

    def warm(self) -> None:
        """See :meth:`Communicator.warm`."""

    def from_numpy(self, array: np.ndarray) -> Any:
        """Return a tensor with the content of ``array``; it may share the memory."""

    def to_numpy(self, tensor: Any) -> np.ndarray:
        """Return the content of a tensor in host memory; it may share the memory."""

    def as_bytes(
        self, tensors: Sequence[Any], *, receives: bool
    ) -> AbstractContextManager[list[list[Any]]]:
        """Return a context with the bytes of tensors; ``receives``: all of them are written.

        It has one list for each device, in the same order on all ranks. A list holds flat uint8
        arrays, tensors or numpy arrays, that support ``len``, slices as views, and assignment to
        slices.
        """

    def join(self, pieces: Sequence[Any]) -> Any:
        """Return a copy of flat arrays of :meth:`as_bytes`, joined to one."""

    def begin(self, kind: str, tensor: Any, name: str, *more: Any, **options: Any) -> Any:
        """Begin a collective of Horovod, in place where tensors can be changed; return its handle.

        Args:
            kind: ``allreduce``, ``allgather``, ``broadcast`` or ``alltoall``.
            tensor: of this rank.
            name: name of the collective, the same on all ranks.
            more: of ``alltoall``: a tensor with the number of rows that go to each rank. Its result
                is what this rank received, joined in rank order.
            options: Horovod's, ``op`` or ``root_rank``.
        """

    def synchronize(self, handle: Any) -> Any:
        """Wait for a collective and return its result."""

    def barrier(self) -> None:
        """Return when every rank has called it."""
