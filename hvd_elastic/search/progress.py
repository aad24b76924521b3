"""Reads what a trial has reported from the events of its run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from hvd_elastic import run_events as ev
from hvd_elastic.config import runs_folder
from hvd_elastic.jobs.job import CancelCause, Job, JobStatus
from hvd_elastic.jobs.progress import Measured
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.search.trials import Point, Trial, TrialStatus

_SPEED_S = 30.0
"""Time over which the speed is measured [s]."""
_APART = 1.001
"""Growth of the examples between two of those that are remembered for a restore."""
_STATUSES = {
    JobStatus.QUEUED: TrialStatus.WAITING,
    JobStatus.RUNNING: TrialStatus.RUNNING,
    JobStatus.SUCCEEDED: TrialStatus.DONE,
    JobStatus.FAILED: TrialStatus.FAILED,
    JobStatus.CANCELLED: TrialStatus.STOPPED,
}


class TrialProgress:
    """What a trial has reported; :meth:`poll` reads what is new.

    Args:
        metric: name of the metric of the study.

    Attributes:
        points: reports of the metric, oldest first.
        others: other metrics that the script has reported.
    """

    def __init__(self, metric: str, run_id: str) -> None:
        self.points: list[Point] = []
        self.others: set[str] = set()
        self._names = (metric, f"script.{metric}")
        self._measured = Measured()
        self._follower = RunFolder(runs_folder() / run_id).follow_events()
        self._repeated = 0.0
        """Useful examples after the checkpoint to which the run went back; 0 once it reports again:
        then they no longer count as measured."""
        self._passed: list[tuple[float, float]] = [(0.0, 0.0)]
        """Examples with the useful ones among them."""
        self._recent: deque[tuple[float, float]] = deque()
        """Times [Unix s] with the useful examples then, while the slots are the same."""

    def poll(self) -> None:
        """Read the new events of the run."""
        self.take(self._follower.poll())

    def take(self, events: Iterable[ev.ReadEvent]) -> None:
        """Take events, oldest first."""
        for event in events:
            self._measured.note_event(event)
            match event:
                case ev.Metrics():
                    self._take_metrics(event)
                case ev.Restored(examples=examples):
                    self._go_back(examples)
                case ev.RescaleStarted():
                    self._recent.clear()

    def of(self, trial: Trial, job: Job, now: float) -> Trial:
        """Return a trial as its job and its reports are."""
        status = _STATUSES[job.status]
        cause = job.request.cancelled and job.request.cancelled.cause
        if job.status.active and job.request.hold:
            status = TrialStatus.HELD
        elif job.status is JobStatus.CANCELLED and cause is CancelCause.AT_RUNG:
            status = TrialStatus.PRUNED
        elif job.status is JobStatus.CANCELLED and cause is CancelCause.TRAINED:
            status = TrialStatus.DONE  # its last checkpoint failed
        return replace(
            trial,
            status=status,
            points=tuple(self.points),
            examples=self.examples,
            speed=self._speed,
            slots=job.slots,
            slot_s=self._measured.service(now),
            job=job.number,
            run_id=job.run_id,
            reason=job.message or job.reason,
        )

    @property
    def examples(self) -> float:
        """Useful examples that the trial has trained."""
        return self._measured.done - self._repeated

    @property
    def _speed(self) -> float:
        if len(self._recent) < 2:
            return math.nan
        (began, before), (at, done) = self._recent[0], self._recent[-1]
        return (done - before) / (at - began) if at > began else math.nan

    def _take_metrics(self, event: ev.Metrics) -> None:
        self._repeated = 0.0
        done = self.examples
        if event.examples > _APART * self._passed[-1][0]:
            self._passed.append((float(event.examples), done))
        self._recent.append((event.t, done))
        while self._recent[-1][0] - self._recent[0][0] > _SPEED_S:
            self._recent.popleft()
        reported = {*(event.reported or ())} & event.values.keys()
        name = next((name for name in self._names if name in reported), None)
        self.others |= reported - {*self._names}
        if name is not None:
            value = event.values[name]  # null: no number
            is_number = isinstance(value, (int, float))
            self.points.append(Point(done, float(value) if is_number else math.nan, event.t))

    def _go_back(self, examples: float) -> None:
        """Forget what was trained after a checkpoint from which the run has gone on."""
        while self._passed[-1][0] > examples:
            self._passed.pop()
            self._repeated = self._measured.done - self._passed[-1][1]
        self.points = [each for each in self.points if each.examples <= self.examples]
        self._recent.clear()
