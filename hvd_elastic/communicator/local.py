"""The communicator of a single process, which needs neither Horovod nor a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_elastic.communicator.interface import Array

__all__ = ["LocalCommunicator"]


class LocalCommunicator:
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

    def reduce_async(self, array: Array, name: str) -> Any:
        """The average of one is itself."""
        return array

    def wait(self, handle: Any) -> Array:
        """Always done."""
        return handle

    def gather(self, array: Array, name: str) -> Array:
        """Only one rank's."""
        return array

    def broadcast(self, arrays: Sequence[Array], root_rank: int) -> None:
        """Already the root's."""

    def hand_over(self, arrays: Sequence[Array], lacking: Sequence[bool]) -> None:
        """Nobody to give them to."""

    def broadcast_bytes(self, data: bytes, root_rank: int) -> bytes:
        """Already the root's."""
        return data

    def barrier(self) -> None:
        """Alone."""
