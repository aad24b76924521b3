"""Describes the trials of a study, the rules of the study, and what is decided about its trials."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TrialStatus(str, enum.Enum):
    """State of a trial.

    WAITING: its job waits for slots. RUNNING: its job holds slots. HELD: it was held back at a
    rung, with a checkpoint and without slots. DONE: it reached the last rung, or its script ended.
    PRUNED: the study ended while it was held. FAILED: its job failed. STOPPED: somebody, or the
    end of the study, ended it before.
    """

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"
    PRUNED = "pruned"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def active(self) -> bool:
        """Return whether the trial may still train."""
        return self in (TrialStatus.WAITING, TrialStatus.RUNNING, TrialStatus.HELD)


class Point(NamedTuple):
    """A report of the metric.

    Attributes:
        examples: useful examples that the trial had trained.
        value: the metric as the script reported it; NaN or infinite: worse than any number.
        at: when [Unix s].
    """

    examples: float
    value: float
    at: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A trial of a study, as its job and the events of its run tell.

    Attributes:
        number: its number in the study, from 0.
        params: its parameters by name.
        points: reports of the metric, oldest first.
        examples: useful examples that it has trained.
        speed: useful examples/s while it trained last; NaN: not known.
        slots: slots that it holds now.
        slot_s: slots times seconds that it has trained.
        job, run_id: its job and its run; 0 and empty: not submitted.
        reason: why it waits or is held, or how it ended, in words.
    """

    number: int
    params: Mapping[str, Any] = field(default_factory=dict)
    status: TrialStatus = TrialStatus.WAITING
    points: tuple[Point, ...] = ()
    examples: float = 0.0
    speed: float = math.nan
    slots: int = 0
    slot_s: float = 0.0
    job: int = 0
    run_id: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Rules:
    """How a study treats its trials.

    Attributes:
        goal: ``max`` or ``min``, of the metric.
        trials: how many trials the study has at most.
        rungs: number of rungs, the last of which is at ``max_examples``; 1: no trial is held.
        reduction: one of so many trials continues from a rung to the next.
        max_examples: useful examples after which a trial is done; None: its script ends it.
        deadline: when the study has to be finished [Unix s]; None: no deadline.
    """

    goal: str
    trials: int
    rungs: int = 1
    reduction: int = 3
    max_examples: float | None = None
    deadline: float | None = None

    @property
    def rung_examples(self) -> tuple[float, ...]:
        """Useful examples at each rung, the last at ``max_examples``; empty: there is no rung.

        >>> Rules("max", 9, rungs=3, max_examples=900).rung_examples
        (100.0, 300.0, 900.0)
        """
        if self.max_examples is None:
            return ()
        return tuple(
            self.max_examples / self.reduction ** (self.rungs - 1 - rung)
            for rung in range(self.rungs)
        )

    def score(self, value: float) -> float:
        """Return a value of the metric so that more is better; what is no number is the worst.

        >>> Rules("min", 1).score(2.0), Rules("max", 1).score(math.nan)
        (-2.0, -inf)
        """
        number = self.number_of(value)
        return number if self.goal == "max" else -number

    def number_of(self, value: float) -> float:
        """Return a value of the metric; the worst that there is if it is no number."""
        if math.isfinite(value):
            return value
        return -math.inf if self.goal == "max" else math.inf


@dataclass(frozen=True)
class Decision:
    """What is to be done about the trials of a study, by their numbers.

    Attributes:
        hold: trials to hold back at a rung.
        release: held trials that continue.
        end: trials that are done, whose jobs are ended after a checkpoint.
        priorities: priorities of the trials that train, relative to that of the study.
        add: how many trials to add.
        reasons: why a trial is held, continues or is done, in words.
        finished: why the study has nothing more to do; empty: it has.
    """

    hold: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    priorities: Mapping[int, float] = field(default_factory=dict)
    add: int = 0
    reasons: Mapping[int, str] = field(default_factory=dict)
    finished: str = ""
