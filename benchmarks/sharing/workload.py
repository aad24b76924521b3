"""Twelve jobs of five kinds that come one after another, as data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HOSTS, SLOTS = 6, 2
"""Virtual hosts, and slots of each."""
_EPOCHS = 8


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        asked: slots that a user asks for who has to choose once.
        pass_s, example_s: a pass over m examples sleeps ``pass_s + example_s m`` [s].
        batch, max_batch: global batch size, and the largest that the job may choose; None: the
            batch is fixed.
        random: part of the labels that are random, which sets the gradient noise.
        fixed: whether its number of slots is fixed under every policy.
        trains: whether it is a training script; else it is a command that sleeps.
    """

    asked: int
    pass_s: float = 0.02
    example_s: float = 0.006
    batch: int = 64
    max_batch: int | None = None
    random: float = 0.5
    fixed: bool = False
    trains: bool = True

    @property
    def rate(self) -> float:
        """Examples per second on one slot."""
        return self.batch / (self.pass_s + self.example_s * self.batch)


KINDS = {
    "compute": Kind(asked=4, max_batch=512, random=0.9),
    "overhead": Kind(asked=2, pass_s=0.15, example_s=0.003),
    "low-noise": Kind(asked=2, pass_s=0.04, example_s=0.004, max_batch=512, random=0.0),
    "fixed": Kind(asked=4, fixed=True),
    "command": Kind(asked=1, trains=False),
}
"""Gains by slots and by a larger batch; gains little by slots; gains by slots, but little by a
larger batch; keeps four slots; one process that does not train."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that is submitted.

    Attributes:
        at: when, as a part of the time over which all come.
        kind: name of its kind.
        length: how long it takes on one slot, in that time.
    """

    at: float
    kind: str
    length: float

    def arguments(self, script: Path, over_s: float, *, asks: bool) -> list[object]:
        """Return the arguments of ``submit``.

        Args:
            script: the training script.
            over_s: time over which all jobs come [s].
            asks: whether it asks for a number of slots and keeps to it.
        """
        kind = KINDS[self.kind]
        name = ("--name", self.kind)
        if not kind.trains:
            return [*name, "--plain", "--", "sleep", f"{self.length * over_s:.1f}"]
        size = ("--fixed", "--np", kind.asked) if kind.fixed or asks else ()
        examples = round(self.length * over_s * kind.rate / _EPOCHS)
        found = [*name, *size, "--audit", "--", sys.executable, script]
        found += ["--epochs", _EPOCHS, "--examples", examples, "--batch", kind.batch]
        found += ["--pass-s", kind.pass_s, "--example-s", kind.example_s, "--random", kind.random]
        return [*found, *(("--max-batch", kind.max_batch) if kind.max_batch else ())]


JOBS = (
    QueuedJob(0.00, "compute", 1.6),
    QueuedJob(0.05, "overhead", 0.5),
    QueuedJob(0.12, "command", 0.2),
    QueuedJob(0.18, "fixed", 1.3),
    QueuedJob(0.26, "low-noise", 1.0),
    QueuedJob(0.34, "compute", 0.6),
    QueuedJob(0.42, "overhead", 0.8),
    QueuedJob(0.50, "fixed", 0.9),
    QueuedJob(0.58, "compute", 2.2),
    QueuedJob(0.66, "command", 0.3),
    QueuedJob(0.75, "low-noise", 0.6),
    QueuedJob(0.83, "overhead", 0.3),
)
"""Short and long jobs in no order; together they would fill the slots for 0.86 of the time."""
