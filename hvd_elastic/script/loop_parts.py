"""The loop of a library that owns counters, callbacks and metrics, such as a Trainer.

Training is a sequence of parts: batches up to the next boundary, and then what follows them, such
as validation, saving, and the end of an epoch. Hosts join and leave between batches; what follows
is repeated as a whole if a rank is lost in it.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol

from hvd_elastic.script.run import Loader
from hvd_elastic.worker import context
from hvd_elastic.worker.progress import AFTER_LOOP, Phase


class Place:
    """A training's place in its parts; belongs to an object of the State, as counters do.

    Attributes:
        begun: whether the current epoch has begun.
        due: whether a part's batches are over, and what follows them has not been done.
    """

    def __init__(self) -> None:
        self.begun = self.due = False


class Library(Protocol):
    """Interface of the library that the loop calls. All that it changes is in the State."""

    @property
    def place(self) -> Place:
        """Return the place of training."""

    def is_done(self) -> bool:
        """Return whether training is over, the same on all ranks."""

    def begin_epoch(self) -> None:
        """Do what comes before the batches of an epoch."""

    def train(self, batch: Any) -> bool:
        """Train on a batch; return whether something follows it before the next one."""

    def follow(self) -> None:
        """Do what follows a part, on all ranks; sets ``place.begun`` False after an epoch."""


def train_by_parts(library: Library, loader: Loader[Any]) -> None:
    """Train until the library is done; the training function calls it, again after a failure."""
    ctx, place = context.current(), library.place
    rollback, worker = ctx.rollback, ctx.worker
    while place.due or not library.is_done():
        if place.due and worker.progress.phase in AFTER_LOOP:
            rollback.tail_begins()
        else:
            rollback.steps_begin()
            if not (place.begun or place.due):
                worker.progress.phase = Phase.HEAD  # also in a run that was stopped between epochs
                library.begin_epoch()
                place.begun = True
            for batch in loader.batches(lambda: place.due):
                place.due = library.train(batch)
            if not place.due:  # training was stopped, or is over on the other ranks
                rollback.training_stopped()
                return
        rollback.library_follows()
        library.follow()
        place.due = False
    rollback.epochs_begin()


def slot_of(slots: dict[str, int], name: str) -> int:
    """Return the number under which the run keeps a file of a library, with the lowest one if new.

    Args:
        slots: numbers of the files that there are, by name. A removed file leaves its number to a
            later one, so that the run does not keep them all.
    """
    if name not in slots:
        slots[name] = next(number for number in count(1) if number not in slots.values())
    return slots[name]


def batch_words(owner: str, unit: str, batch_size: int, as_on: int) -> str:
    """Return in words whose batch size that of our loader is.

    Args:
        owner: call that makes it the batch of eight devices.
        unit: what has that many examples: a batch or a step.
        batch_size: examples of all ranks together.
        as_on: number of devices of a job that has this batch.
    """
    said = (
        f"a job on {as_on} devices (as_on={as_on})"
        if as_on > 1
        else f"one device; {owner} makes it that of 8"
    )
    return (
        f"{owner.partition('(')[0]}: a {unit} has {batch_size} examples over all ranks together, "
        f"however many there are, as on {said}"
    )
