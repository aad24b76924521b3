"""The progress of training as far as the leader knows it."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_elastic.control.progress import Position

_START = Position(0, 0, 0, 0)  # before the first step


@dataclass
class TrainingProgress:
    """The progress of training as far as the leader knows it.

    Attributes:
        reached: newest position that a worker reported.
        written: position of the newest checkpoint of which a worker has written its shard.
        is_known: False after a takeover of workers, until they report their position.
        stopped: why the script has ended training early; empty: it has not.
    """

    reached: Position = _START
    written: Position = _START
    is_known: bool = True
    stopped: str = ""

    def note_if_further(self, progress: Position | None) -> None:
        """Update ``reached`` if ``progress`` is at a later step: metrics come less often."""
        if progress is not None and progress.step > self.reached.step:
            self.reached = progress
