"""What training needs of a communicator, and what a frontend supplies to make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

__all__ = [
    "BARRIER",
    "GRADIENTS",
    "GRADIENT_PREFIX",
    "USER_PREFIX",
    "Array",
    "Collectives",
    "Communicator",
    "GenerationBrokenError",
]

GRADIENTS = "the gradients"
BARRIER = "the end of training (its training function has returned)"
GRADIENT_PREFIX = "gradient."
"""Names of reductions that begin so are gradients; together they count as one collective."""
USER_PREFIX = "user."
"""Begins the names of collectives that the script asked for; messages leave it out."""

Array: TypeAlias = Any
"""A numpy array or a tensor of the frontend; a collective returns the kind that it was given."""


class GenerationBrokenError(RuntimeError):
    """A collective failed because a member of the generation is gone; the state is whole."""


class Communicator(Protocol):
    """What training needs of a communicator."""

    rank: int
    size: int
    waiting_since: float | None
    """When the current wait for other ranks began [s, monotonic]; None: not waiting."""
    waiting_for: str
    """The collective of the current wait, or of the last one."""
    longest_wait_s: float
    """The longest wait that succeeded."""
    waited_s: float
    """Total time spent waiting for other ranks."""
    broken: bool
    """Whether a collective has failed since the ring was made."""

    def check_device(self, local_rank: int, devices: int) -> None:
        """Check that slot ``local_rank`` of a host with so many GPUs can exchange GPU tensors.

        Raises:
            ScriptError: it cannot; says what to change.
        """

    def warm(self) -> None:
        """Do in advance what is slow the first time and needs no other rank."""

    def start(self, env: Mapping[str, str]) -> None:
        """Meet the other members; ``env`` holds the rank variables of the generation.

        Raises:
            GenerationBrokenError: a member did not come.
        """

    def stop(self, *, broken: bool = False) -> None:
        """Leave the ring; the process can start another one.

        Args:
            broken: a member is gone, so do not wait for an orderly shutdown of all.
        """

    def refresh(self) -> None:
        """Read rank and size again, after another library has made a new ring."""

    def abort(self) -> None:
        """Make every blocked or later collective of this ring fail; from any thread."""

    def begun(self) -> dict[str, int]:
        """Return how often this rank has begun its latest collectives in this ring.

        All gradients count as one collective, `GRADIENTS`, once a step; from any thread.
        """

    def reduce_async(self, array: Array, name: str) -> Any:
        """Begin averaging ``array`` over all ranks and return a handle for `wait`.

        The array may be overwritten; PyTorch's tensors and numpy arrays on them are.
        """

    def wait(self, handle: Any) -> Array:
        """Return the result of a collective that was begun.

        Raises:
            GenerationBrokenError: a member is gone.
            ScriptError: the ranks gave arrays of different types or shapes.
        """

    def gather(self, array: Array, name: str) -> Array:
        """Return the arrays of all ranks, in rank order, joined along the first dimension."""

    def broadcast(self, arrays: Sequence[Array], root_rank: int) -> None:
        """Overwrite ``arrays`` in place with the root's, in few large messages."""

    def hand_over(self, arrays: Sequence[Array], lacking: Sequence[bool]) -> None:
        """Overwrite ``arrays`` on the ranks that lack them with those of the others.

        Every rank that has them sends an equal share to every rank that lacks them, all at the
        same time; nothing is sent to ranks that have them.

        Args:
            arrays: of the same shapes and types on all ranks.
            lacking: for each rank, whether it lacks them; at least one does not.
        """

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        """Return the root's ``data`` on every rank."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class Collectives(Protocol):
    """What a frontend supplies: Horovod for its framework, with collectives on its tensors.

    A collective is begun without waiting: it returns a handle, and :meth:`synchronize` returns its
    result. Both raise Horovod's ``HorovodInternalError`` with Horovod's text.
    """

    framework: str
    """Name of the framework, for messages."""
    horovod: Any
    """Horovod's module for the framework, from :func:`~hvd_elastic.communicator.ring.load_horovod`.

    The life cycle uses its ``init``, ``shutdown``, ``rank``, ``size``, ``nccl_built`` and the
    extension behind ``mpi_ops``.
    """

    def warm(self) -> None:
        """See :meth:`Communicator.warm`."""

    def from_numpy(self, array: np.ndarray) -> Any:
        """Return a tensor with the content of ``array``; it may share the memory."""

    def to_numpy(self, tensor: Any) -> np.ndarray:
        """Return the content of a tensor on the host; it may share the memory."""

    def as_bytes(self, tensors: Sequence[Any]) -> AbstractContextManager[list[list[Any]]]:
        """Give the bytes of tensors, to read and to overwrite until the context ends.

        One list for each device, in the same order on all ranks, of flat uint8 arrays: tensors or
        numpy arrays. They support ``len``, slices as views, and assignment to slices.
        """

    def join(self, pieces: Sequence[Any]) -> Any:
        """Return flat arrays of :meth:`as_bytes` as one, a copy."""

    def average_async(self, tensor: Any, name: str) -> Any:
        """Begin averaging ``tensor`` over all ranks, in place where tensors can be changed."""

    def allgather_async(self, tensor: Any, name: str) -> Any:
        """Begin joining the tensors of all ranks along the first dimension."""

    def broadcast_async(self, tensor: Any, name: str, root_rank: int) -> Any:
        """Begin sending the root's tensor to all, in place where tensors can be changed."""

    def alltoall_async(self, tensor: Any, name: str, splits: Sequence[int]) -> Any:
        """Begin sending ``splits[rank]`` rows of ``tensor`` to each rank.

        The result is what this rank received, joined in rank order.
        """

    def synchronize(self, handle: Any) -> Any:
        """Wait for a collective and return its result."""

    def barrier(self) -> None:
        """Return when every rank has called it."""
