"""Progress of training: a position in an epoch, and counts.

An epoch's order is fixed by (seed, epoch), so the examples already consumed are exactly the first
``position`` of it, at any world sizes. So a few numbers are enough, and nothing has to be gathered
when the world changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from typing import Annotated, Any

import msgspec


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


Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass
class Progress:
    """Progress of training, which advances only when a step was taken on every rank.

    Attributes:
        step: optimizer steps taken since training began.
        epoch: number of the current epoch, from 0.
        position: examples of the current epoch consumed, by all ranks together.
        examples: examples consumed since training began, by all ranks together.
        phase: the part of the epoch that the script is in.
        stopped: whether the ranks have agreed to end training; see ``stop()``.
        order_hash: of all that determines the order of the current epoch, besides its number; 0:
            unknown.
        skipped: steps that were left out because their gradients were not finite.
        skipped_at: the last of them; -1: there is none.
        skipped_running: number of them running, up to that one.
        looked_at: last step that was called off to be repeated with local checks; -1: none.
        data: what is compared of the dataset of each loader of the script, as a JSON list of
            :meth:`DataDigest.described`; "": unknown.

    >>> progress = Progress()
    >>> progress.advance(64)
    >>> progress.as_dict()
    {'step': 1, 'epoch': 0, 'position': 64, 'examples': 64}
    >>> progress.next_epoch()
    >>> Progress.from_dict(progress.as_state()) == progress
    True
    """

    step: Count = 0
    epoch: Count = 0
    position: Count = 0
    examples: Count = 0
    phase: Phase = Phase.HEAD
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
        return replace(
            self,
            epoch=place.epoch,
            position=place.position,
            examples=place.examples,
            order_hash=place.order_hash,
        )

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
        return {**asdict(self), "phase": int(self.phase)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from the values of :meth:`as_state`.

        Raises:
            ValueError: a field is missing, or not a value in its range; names it.
        """
        missing = [each.name for each in fields(cls) if each.name not in values]
        if missing:
            raise ValueError(f"progress has no field {missing[0]!r}")
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"progress is not valid: {error}") from error


_COUNTS = ("step", "epoch", "position", "examples")
