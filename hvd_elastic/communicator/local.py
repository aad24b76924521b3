"""Implement the communicator of a single process, without Horovod or a framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import (
    FIRST,
    FLAGS_NAME,
    Array,
    GenerationBrokenError,
    RingRank,
)


class LocalCommunicator:
    """A :class:`~hvd_elastic.communicator.interface.Communicator` of one process.

    Every collective returns what it is given; nothing has to begin, to wait or to end.
    """

    rank = FIRST
    size = 1
    waiting_since: float | None = None
    waiting_for = ""
    longest_wait_s = 0.0
    waited_s = 0.0
    broken = False

    def _do_nothing(self, *args: Any, **options: Any) -> None:
        pass

    check_device = warm = start = stop = refresh = abort = barrier = _do_nothing
    graph_waits = graph_ends = broadcast = hand_over = _do_nothing

    def begun(self) -> dict[str, int]:
        return {}

    def translated(self, message: str) -> Exception:
        return GenerationBrokenError(message)

    def reduce_async(self, array: Array, name: str, *, sent_as: str = "") -> Any:
        return array

    def sum_async(self, array: Array, name: str) -> Any:
        # For subclasses that play several ranks: a sum is the average of `size` times as much.
        array *= self.size
        return self.reduce_async(array, name)

    def sum_with_flags_async(
        self, array: Array, flags: np.ndarray, name: str
    ) -> tuple[Any, Callable[[], np.ndarray]]:
        average = self.reduce_async(flags, FLAGS_NAME)
        return self.sum_async(array, name), lambda: self.wait(average)

    def exchange_async(self, array: Array, name: str) -> Any:
        return array

    def gather_async(self, array: Array, name: str) -> Any:
        return self.gather(array, name)

    def wait(self, handle: Any) -> Array:
        return handle

    def gather(self, array: Array, name: str) -> Array:
        return array

    def broadcast_bytes(self, data: bytes, root_rank: RingRank) -> bytes:
        return data
