"""Where training stands: one position in one epoch.

Progress is a handful of numbers on purpose. An epoch's order is fixed by (seed, epoch), so the
examples already consumed are exactly the first ``position`` of it, whatever world sizes consumed
them; nothing has to be gathered when the world changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum

from hvd_elastic.model.sharding import LATEST_ORDER

__all__ = ["Phase", "Progress"]


class Phase(IntEnum):
    """Which part of an epoch the script is in; what it did there is done once for the state."""

    HEAD = 0
    """Before the loader's loop: since the last turn of ``epochs()``, or since the start."""
    LOOP = 1
    """In the loader's loop."""
    TAIL = 2
    """After the loader's loop and before the next turn of ``epochs()``."""
    DONE = 3
    """The training function has returned."""


@dataclass
class Progress:
    """How far the optimizer is; it moves only when a step was taken on every rank.

    Attributes:
        step: optimizer steps taken since training began.
        epoch: number of the current epoch, from 0.
        position: examples of the current epoch consumed, by all ranks together.
        examples: examples consumed since training began, by all ranks together.
        phase: the part of the epoch that the script is in.
        data_order: version of the order in which the run reads its epochs, see
            :func:`hvd_elastic.model.sharding.epoch_order`; the one it began with.

    >>> progress = Progress()
    >>> progress.advance(64)
    >>> progress
    Progress(step=1, epoch=0, position=64, examples=64, phase=<Phase.HEAD: 0>, data_order=2)
    >>> progress.next_epoch()
    >>> Progress.from_dict(progress.as_state()) == progress
    True
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    examples: int = 0
    phase: Phase = Phase.HEAD
    data_order: int = LATEST_ORDER

    def advance(self, step_examples: int) -> None:
        """One step was taken on ``step_examples`` examples of all ranks together (>= 0)."""
        if step_examples < 0:
            raise ValueError(f"step_examples is {step_examples}, it must be 0 or more")
        self.step += 1
        self.position += step_examples
        self.examples += step_examples

    def next_epoch(self) -> None:
        """The epoch is over: the next one starts at its first position."""
        self.epoch += 1
        self.position = 0
        self.phase = Phase.HEAD

    def place_hash(self) -> int:
        """Return a number from -32 to 31 that most likely differs at another place in the data."""
        return zlib.crc32(b"%d %d" % (self.epoch, self.position)) % 64 - 32

    def as_dict(self) -> dict[str, int]:
        """The counts, for events."""
        return {name: getattr(self, name) for name in _COUNTS}

    def as_state(self) -> dict[str, int]:
        """Everything as plain numbers, for a checkpoint or a broadcast."""
        return {**asdict(self), "phase": int(self.phase)}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Progress:
        """Return what :meth:`as_state` was called on.

        Unknown keys are ignored, so that a newer file still loads. One of an older release has no
        phase, since it was written in the loop, and no order, since that knew the first alone.

        Raises:
            ValueError: a count is missing, or a field is not a whole number in its range; names it.
        """
        numbers: dict[str, int] = {}
        for name in _COUNTS:
            value = values.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(
                    f"progress field {name!r} is {value!r}, it must be a whole number >= 0"
                )
            numbers[name] = value
        found = values.get("phase", Phase.LOOP if numbers["position"] else Phase.HEAD)
        try:
            phase = Phase(found)
        except ValueError:
            raise ValueError(
                f"progress field 'phase' is {found!r}, it must be a whole number from 0 to "
                f"{max(Phase)}"
            ) from None
        data_order = values.get("data_order", 1)
        if data_order not in range(1, LATEST_ORDER + 1):
            raise ValueError(
                f"progress field 'data_order' is {data_order!r}, it must be a whole number from 1 "
                f"to {LATEST_ORDER}; a later one is of a later release of hvd_elastic"
            )
        return cls(**numbers, phase=phase, data_order=data_order)


_COUNTS = ("step", "epoch", "position", "examples")
