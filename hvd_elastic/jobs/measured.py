"""What was measured of a job's training, by the events of its run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_elastic.model.goodput import goodput_curve
from hvd_elastic.model.step_time import StepTimeModel
from hvd_elastic.policy.replay import Replay
from hvd_elastic.run_events import Metrics, ReadEvent, RescaleFinished, RunFinished, TakenOver

_WARMING_S = 1.0
"""Training time that a change of slots costs beside its pause [slot seconds]: the new processes
warm up in their slots meanwhile."""


class Measured:
    """Measurements of a run, for the scheduler; :meth:`note` takes its events.

    Attributes:
        rescales: number of changes of its slots while it trained.
    """

    def __init__(self) -> None:
        self.rescales = 0
        self._replay = Replay()
        self._attained_slot_s = 0.0
        """Slots times seconds of training, before the present size."""
        self._size, self._size_since = 0, 0.0
        self._part = 0.0
        """Part of the training that is done, as the script reports it."""
        self._epochs: tuple[float, float] = (0.0, 0.0)
        """Number of whole epochs, and useful examples at the end of the last."""
        self._curve: tuple[StepTimeModel, float, tuple[int, ...], np.ndarray] | None = None

    def note(self, event: ReadEvent) -> None:
        """Take an event of the run."""
        self._replay.add(event)
        match event:
            case RescaleFinished(size=size) | TakenOver(size=size):
                self._resized(size, event.t)
            case RunFinished():
                self._resized(0, event.t)
            case Metrics(epoch=epoch, done=part):
                if epoch > self._epochs[0]:
                    self._epochs = (float(epoch), self.done)
                if part is not None and 0 < part <= 1:
                    self._part = part

    @property
    def timed(self) -> set[int]:
        """Numbers of slots with which steps were timed."""
        return {slots for _, slots in self._replay.evidence.timings.worlds}

    @property
    def slots(self) -> int:
        """Largest number of slots with which steps were timed."""
        return max(self.timed, default=0)

    @property
    def rescale_s(self) -> float:
        """Training time that a change of its slots costs [s]."""
        return self._replay.evidence.pause_s + _WARMING_S

    @property
    def done(self) -> float:
        """Useful examples so far."""
        return self._replay.evidence.done

    @property
    def noise(self) -> float:
        """Relative standard error of the goodput that was measured."""
        return self._replay.evidence.timings.error

    def service(self, now: float) -> float:
        """Return slots times seconds that the run has trained, until ``now`` [Unix s]."""
        going = self._size * max(0.0, now - self._size_since) if self._size else 0.0
        return self._attained_slot_s + going

    def remaining(self, target_examples: float | None, epochs: float | None) -> float | None:
        """Return the useful examples that are left; None: not known.

        What the script itself reports is better than what its user says.
        """
        if target_examples is not None:
            return max(target_examples - self.done, 1.0)
        if self._part > 0 and self.done > 0:
            return max(self.done * (1 / self._part - 1), 1.0)
        passed, useful = self._epochs
        if epochs is None or passed <= 0 or useful <= 0:
            return None
        return max(epochs * useful / passed - self.done, 1.0)

    def goodput(self, per_host: Sequence[int]) -> np.ndarray | None:
        """Return useful examples/s by number of slots on as few hosts as possible; None: unknown.

        Args:
            per_host: slots of the cluster's hosts, most first.
        """
        evidence = self._replay.evidence
        model, limits, noise = evidence.model(), evidence.limits, evidence.noise
        if model is None or limits is None or math.isnan(noise):
            return None
        cached = self._curve
        shape = tuple(per_host)
        if cached and cached[0] is model and cached[2] == shape and _near(cached[1], noise):
            return cached[3]
        most = sum(per_host)
        edges = np.cumsum(per_host)
        slots = np.unique(np.concatenate([_sizes(most), edges]))
        hosts = np.searchsorted(edges, slots) + 1
        found = goodput_curve(model, noise, limits, hosts, slots).goodput
        every = np.interp(np.arange(most + 1), np.append(0, slots), np.append(0.0, found))
        self._curve = (model, noise, shape, every)
        return every

    def _resized(self, size: int, at: float) -> None:
        if self._size:
            self._attained_slot_s += self._size * max(0.0, at - self._size_since)
            self.rescales += bool(size) and size != self._size
        self._size, self._size_since = size, at


def _sizes(most: int) -> np.ndarray:
    """Return numbers of slots at which the curve is computed; others are interpolated."""
    return np.unique(np.rint(np.geomspace(1, most, 24)).astype(np.int64))


def _near(one: float, other: float) -> bool:
    return one == other or abs(math.log1p(one) - math.log1p(other)) < 0.1
