"""Times of work on a device, told by marks in it, without ever waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["DeviceEvent", "KnownTimes", "cuda_event"]


class DeviceEvent(Protocol):
    """A mark in the work of a device, as :class:`torch.cuda.Event`."""

    def record(self) -> None:
        """Put the mark behind all work that was given to the device so far."""

    def query(self) -> bool:
        """Whether the device has come to it; does not wait."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """From this mark to a later one that was reached too [ms]."""


def cuda_event() -> DeviceEvent | None:
    """A mark for the GPU; None where PyTorch has not used one."""
    if not torch.cuda.is_initialized():
        return None
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event


class KnownTimes:
    """The last times of something, some of which the device has not come to yet.

    Args:
        kept: how many at the most.
    """

    def __init__(self, kept: int) -> None:
        self._pending: deque[Sequence[tuple[DeviceEvent, DeviceEvent]]] = deque(maxlen=kept)
        self._known: deque[float] = deque(maxlen=kept)

    def add(self, seconds: float) -> None:
        """A time that is known."""
        self._known.append(seconds)

    def add_marks(self, pairs: Sequence[tuple[DeviceEvent, DeviceEvent]]) -> None:
        """A time that is the sum of those between pairs of marks, in the order of the work."""
        self._pending.append(pairs)

    def read(self) -> list[float]:
        """All that are known by now [s]."""
        # The device does its work in order: where it has not come to a mark, all later ones wait.
        while self._pending and self._pending[0][-1][1].query():
            pairs = self._pending.popleft()
            self._known.append(sum(first.elapsed_time(last) for first, last in pairs) / 1000)
        return list(self._known)

    def clear_known(self) -> None:
        """Those that were read."""
        self._known.clear()

    def clear(self) -> None:
        """All of them."""
        self._pending.clear()
        self._known.clear()
