"""Simulate a job of a published workload: its progress, its measurements and its batch."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from benchmarks.published.profiles import SubmittedJob
from hvd_elastic.model.goodput import goodput_curve
from hvd_elastic.model.step_time import Observation, StepTimeModel, fit_step_time
from hvd_elastic.sim.jobs.run import JobInTime

_PASSES_ALONE = 2
"""Fewest passes of a job on one slot with more than its initial batch, as in the artifact."""
_DISTINCT = 1.05
"""Ratio of two sizes of a pass from which both are measured."""


class SimulatedJob(JobInTime):
    """A job of a published workload, as in the simulator of the Pollux artifact.

    What a policy may read is what a live run would report: measured step times, gradient noise,
    progress, and what the job says of itself (its limits and number of epochs).

    Args:
        submitted: the job of the workload.
        adapts: whether it adapts its batch; else it trains with the batch that was asked.
        per_host: slots of a host.
    """

    def __init__(self, submitted: SubmittedJob, adapts: bool, per_host: int) -> None:
        super().__init__(submitted.name, submitted.submitted_s)
        self.submitted, self.application = submitted, submitted.application
        self.per_host = per_host
        asked = None if adapts else submitted.asked_batch
        self._fixed_batch = self.application.fixed_batch or asked
        self._progress, self._epoch = 0.0, 0
        self._atomic, self._extra = 0, 0
        self._profile: dict[tuple[int, int, int], Observation] = {}
        self._model: StepTimeModel | None = None
        self._noise = 0.0
        self._curve: np.ndarray | None = None
        self._rounds, self._competitors = 0, 0

    @property
    def competitors(self) -> float | None:
        """Mean number of unfinished jobs since it was submitted, itself included."""
        return self._competitors / self._rounds if self._rounds else None

    def note_competitors(self, jobs: int) -> None:
        """Take the number of unfinished jobs at a decision."""
        self._rounds += 1
        self._competitors += jobs

    @property
    def max_slots(self) -> int:
        """Most slots of the job for now; see :class:`JobInTime`."""
        return min(max(2 * self.profiled_slots, 1), self.most_slots)

    @property
    def most_slots(self) -> int:
        """Most slots that it takes; see :class:`JobInTime`."""
        return self.application.most_slots

    @property
    def profiled_slots(self) -> int:
        """Largest number of slots that was measured."""
        return max((slots for _, slots, _ in self._profile), default=0)

    @property
    def remaining_examples(self) -> float:
        """Useful examples that are left, of the number that the job has declared."""
        left = self.application.total - self._progress
        return left * self.application.limits.initial_batch_size

    @property
    def most_asked_slots(self) -> int:
        """Most slots on which the batch that was asked can be divided."""
        if self.application.fixed_batch:
            return 1
        return self.submitted.asked_batch // self.application.limits.min_atomic_batch_size

    def asked_time_left(self, slots: int) -> float:
        """Return the true time that is left with the batch that was asked, on full hosts [s]."""
        batch = self._fixed_batch or self.submitted.asked_batch
        atomic, extra = self._passes(batch, slots)
        whole, rest = divmod(slots, self.per_host)
        placement = (self.per_host,) * whole + (rest,) * (rest > 0)
        step, sync = self.application.step_times(placement, atomic)
        steps = self.application.steps_after(batch, self._epoch)
        return steps * (step + (step - sync) * extra)

    def goodput(self) -> np.ndarray | None:
        """Return the predicted useful examples per second by number of slots; None: unknown.

        Sizes that do not fill hosts are interpolated.
        """
        if not self._profile:
            return None
        if self._curve is None:
            most = self.application.most_slots
            slots = np.asarray(sorted({1, 2, most, *range(self.per_host, most, self.per_host)}))
            slots = slots[slots <= most]
            hosts = -(-slots // self.per_host)
            if self._fixed_batch:
                times = self._fitted().step_s(hosts, slots, self._fixed_batch / slots, 0)
                found = self._fixed_batch / times
            else:
                limits = self.application.limits
                curve = goodput_curve(
                    self._fitted(), self._noise, limits, hosts, slots, _PASSES_ALONE
                )
                found = curve.goodput
            every = np.arange(most + 1)
            self._curve = np.interp(every, np.append(0, slots), np.append(0.0, found))
        return self._curve

    def _rescaled(self) -> None:
        self._choose_batch()

    def _train(self, now: float, seconds: float) -> None:
        placement, slots = tuple(self.held.values()), sum(self.held.values())
        while seconds > 0 and self.finished_s is None:
            batch = slots * self._atomic * (self._extra + 1)
            scale = batch / self.application.limits.initial_batch_size
            step, sync = self.application.step_times(placement, self._atomic)
            square, variance = self.application.gradient_statistics(batch, self._epoch)
            gain = (variance + square) / (variance / scale + square)
            rate = gain / (step + (step - sync) * self._extra)
            self._measure(placement, step, sync, variance / square)
            end = self.application.end_of_epoch(self._epoch + 1)
            spent = seconds
            if self._progress + rate * seconds < end:
                self._progress += rate * seconds
            else:
                spent = min(seconds, (end - self._progress) / rate)
                self._progress, self._epoch = end, self._epoch + 1
                if self._epoch >= self.application.epochs:
                    self.finished_s = now + spent
            self.attained_slot_s += spent * slots
            now, seconds = now + spent, seconds - spent
            if self.finished_s is None:
                self._choose_batch()

    def _measure(self, placement: tuple[int, ...], step: float, sync: float, noise: float) -> None:
        self._noise = noise * self.application.limits.initial_batch_size
        self._curve = None
        # Similar sizes of a pass tell the model nothing new, and each observation costs a fit.
        size = round(math.log(self._atomic) / math.log(_DISTINCT))
        key = (len(placement), sum(placement), size)
        if key not in self._profile:
            own = step - sync
            atomic = self._atomic
            self._profile[key] = Observation(key[0], key[1], atomic, 0, step, own_s=own)
            self._model = None

    def _fitted(self) -> StepTimeModel:
        if self._model is None:
            self._model = fit_step_time(list(self._profile.values()))
        return self._model

    def _choose_batch(self) -> None:
        limits, hosts, slots = self.application.limits, len(self.held), sum(self.held.values())
        batch = self._fixed_batch
        if batch is None and not self._profile:
            batch = max(limits.initial_batch_size, limits.min_atomic_batch_size * slots)
        if batch is None:
            curve = goodput_curve(self._fitted(), self._noise, limits, hosts, slots, _PASSES_ALONE)
            self._atomic = int(curve.atomic_batch_size[0])
            self._extra = int(curve.accumulation_steps[0])
            most = limits.max_batch_size // (slots * (self._extra + 1))
            self._atomic = min(self._atomic, most)
        else:
            self._atomic, self._extra = self._passes(batch, slots)

    def _passes(self, batch: int, slots: int) -> tuple[int, int]:
        """Return examples of a pass and number of extra passes with which a batch is computed."""
        limits = self.application.limits
        local = math.ceil(batch / slots - 1e-8)
        passes = math.ceil(local / (limits.max_atomic_batch_size or limits.max_batch_size) - 1e-8)
        if slots == 1 and batch > limits.initial_batch_size:
            passes = max(_PASSES_ALONE, passes)
        atomic = math.ceil(local / passes - 1e-8)
        return min(atomic, limits.max_batch_size // (slots * passes)), passes - 1


class KnownJob(SimulatedJob):
    """A job whose speed is known, from the profile of its application, as soon as it has trained.

    So it is simulated in a quarter of the time: nothing is fitted to its own measurements.
    """

    _models: ClassVar[dict[str, StepTimeModel]] = {}
    _curves: ClassVar[dict[tuple[object, ...], np.ndarray | None]] = {}
    _batches: ClassVar[dict[tuple[object, ...], tuple[int, int]]] = {}

    def goodput(self) -> np.ndarray | None:
        """Return the predicted useful examples per second by number of slots; None: unknown."""
        if not self._profile:
            return None
        key = self._configuration()
        if key not in self._curves:
            self._curve = None
            self._curves[key] = super().goodput()
        return self._curves[key]

    def _measure(self, placement: tuple[int, ...], step: float, sync: float, noise: float) -> None:
        # Noise within 6 % is as good.
        noise *= self.application.limits.initial_batch_size
        self._noise = math.exp(round(8 * math.log(max(noise, 1e-9))) / 8)
        slots = sum(placement)
        self._profile[len(placement), slots, 0] = Observation(
            len(placement), slots, self._atomic, 0, step, own_s=step - sync
        )

    def _fitted(self) -> StepTimeModel:
        application, limits = self.application, self.application.limits
        if application.name not in self._models:
            most = min(limits.max_atomic_batch_size or math.inf, limits.max_batch_size)
            sizes = np.unique(np.rint(np.geomspace(limits.min_atomic_batch_size, most, 6)))
            seen = []
            for slots in (2**power for power in range(application.most_slots.bit_length())):
                whole, rest = divmod(slots, self.per_host)
                placement = (self.per_host,) * whole + (rest,) * (rest > 0)
                for size in map(int, sizes):
                    step, sync = application.step_times(placement, size)
                    own_s = step - sync
                    seen.append(Observation(len(placement), slots, size, 0, step, own_s=own_s))
            self._models[application.name] = fit_step_time(seen)
        return self._models[application.name]

    def _choose_batch(self) -> None:
        held = (len(self.held), sum(self.held.values()), bool(self._profile))
        key = (*self._configuration(), *held)
        if key not in self._batches:
            super()._choose_batch()
            self._batches[key] = self._atomic, self._extra
        self._atomic, self._extra = self._batches[key]

    def _configuration(self) -> tuple[object, ...]:
        return self.application.name, self._fixed_batch, self._noise
