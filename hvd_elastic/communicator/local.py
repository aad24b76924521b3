"""Implement the communicator of a single process, without Horovod or a framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_elastic.communicator.interface import FLAGS_NAME, Array, GenerationBrokenError


class LocalCommunicator:
    """A :class:`~hvd_elastic.communicator.interface.Communicator` of one process.

    Every collective returns what it is given.
    """

    rank = 0
    size = 1
    waiting_since: float | None = None
    waiting_for = ""
    longest_wait_s = 0.0
    waited_s = 0.0
    broken = False

    def check_device(self, local_rank: int, devices: int) -> None:
        pass

    def warm(self) -> None:
        pass

    def start(self, env: Mapping[str, str]) -> None:
        pass

    def stop(self, *, broken: bool = False) -> None:
        pass

    def refresh(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def begun(self) -> dict[str, int]:
        return {}

    def graph_waits(self, names: Sequence[str]) -> None:
        pass

    def graph_ends(self, *, failed: bool = False) -> None:
        pass

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

    def broadcast(self, arrays: Sequence[Array], root_rank: int) -> None:
        pass

    def hand_over(self, arrays: Sequence[Array], lacking: Sequence[bool]) -> None:
        pass

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        return data

    def barrier(self) -> None:
        pass
