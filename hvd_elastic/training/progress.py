"""Progress of training: a position in an epoch, and counts.

An epoch's order is fixed by (seed, epoch), so the examples already consumed are exactly the first
``position`` of it, at any world sizes. So a few numbers are enough, and nothing has to be gathered
when the world changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from hvd_elastic.model.sharding import LATEST_ORDER


class Phase(IntEnum):
    """Part of an epoch that the script is in; each part changes the state exactly once."""

    HEAD = 0
    """Before the loader's loop: since the last turn of ``epochs()``, or since the start."""
    LOOP = 1
    """In the loader's loop."""
    TAIL = 2
    """After the loader's loop and before the next turn of ``epochs()``."""
    DONE = 3
    """The training function has returned."""
    PAUSE = 4
    """After a loop that ended within the epoch: that of ``steps()``, or one ended by ``stop()``."""


AFTER_LOOP = (Phase.TAIL, Phase.PAUSE)
"""Phases after a loop over the loader."""


@dataclass
class Progress:
    """Progress of training, which advances only when a step was taken on every rank.

    Attributes:
        step: optimizer steps taken since training began.
        epoch: number of the current epoch, from 0.
        position: examples of the current epoch consumed, by all ranks together.
        examples: examples consumed since training began, by all ranks together.
        phase: the part of the epoch that the script is in.
        data_order: version of the order in which the run reads its epochs, fixed when the run
            began; see :func:`hvd_elastic.model.sharding.epoch_order`.
        stopped: whether the ranks have agreed to end training; see ``stop()``.
        order_hash: of all that determines the order of the current epoch, besides its number; 0:
            unknown.
        skipped: steps that were left out because their gradients were not finite.
        skipped_at: the last of them; -1: there is none.
        skipped_running: number of them running, up to that one.
        looked_at: last step that was called off to be repeated with local checks; -1: none.
        data: what is compared of the data set of each loader of the script, as a JSON list of
            :meth:`DataDigest.described`; "": unknown.

    >>> progress = Progress()
    >>> progress.advance(64)
    >>> progress.as_dict()
    {'step': 1, 'epoch': 0, 'position': 64, 'examples': 64}
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
    stopped: bool = False
    order_hash: int = field(default=0, compare=False)
    skipped: int = 0
    skipped_at: int = -1
    skipped_running: int = 0
    looked_at: int = -1
    data: str = field(default="", compare=False)

    def advance(self, step_examples: int) -> None:
        """Count a step on ``step_examples`` examples of all ranks together (>= 0)."""
        self.read(step_examples)
        self.step += 1

    def read(self, examples: int) -> None:
        """Move past ``examples`` examples of all ranks together (>= 0), within a step."""
        if examples < 0:
            raise ValueError(f"step_examples is {examples}, it must be 0 or more")
        self.position += examples
        self.examples += examples

    def moved_to(self, place: Progress) -> Progress:
        """Return this progress at another place of the data."""
        examples = place.examples
        return replace(self, epoch=place.epoch, position=place.position, examples=examples)

    def next_epoch(self) -> None:
        """Move to the first position of the next epoch."""
        self.epoch += 1
        self.position = 0
        self.phase = Phase.HEAD

    def place_hash(self, *, turn: bool = False) -> int:
        """Return a hash of epoch, position and order, from -32 to 31; ``turn``: of its end."""
        place = self.epoch, self.position, self.order_hash, b" turn" * turn
        return zlib.crc32(b"%d %d %d%s" % place) % 64 - 32

    def as_dict(self) -> dict[str, int]:
        """Return the counts, for events."""
        return {name: getattr(self, name) for name in _COUNTS}

    def as_state(self) -> dict[str, Any]:
        """Return all fields as plain values, for a checkpoint or a broadcast."""
        return {**asdict(self), "phase": int(self.phase), "stopped": int(self.stopped)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the values of :meth:`as_state`.

        Unknown keys are ignored, so that a newer file still loads. Files of older releases have no
        phase, since they were written in the loop, and no order, since version 1 was the only one.

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
        stopped = bool(values.get("stopped", False))
        order_hash = values.get("order_hash", 0)
        if not isinstance(order_hash, int):
            raise ValueError(f"progress field 'order_hash' is {order_hash!r}, it must be a number")
        counts = {name: values[name] for name in _OF_SKIPPED if name in values}
        for name, value in counts.items():
            if not isinstance(value, int):
                raise ValueError(f"progress field {name!r} is {value!r}, it must be a number")
        return cls(
            **numbers,
            phase=phase,
            data_order=data_order,
            stopped=stopped,
            order_hash=order_hash,
            **counts,
            data=str(values.get("data", "")),
        )


_COUNTS = ("step", "epoch", "position", "examples")
_OF_SKIPPED = ("skipped", "skipped_at", "skipped_running", "looked_at")
