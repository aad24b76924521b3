"""Finds learning-rate schedules that count calls of ``step()`` while the batch adapts."""

from __future__ import annotations

from hvd_elastic.model.goodput import BatchLimits
from hvd_elastic.worker.worker import Worker

_BATCHES_COUNTED = 2
"""Number of consecutive steps in which a schedule has to move to count as stepped per batch."""
_PASSES_OFF = 0.05
"""Share by which passes over the data may fall short of as many epochs by chance."""


class ScheduleChecks:
    """Warns of schedules in the State that count calls of ``step()`` while the batch adapts.

    What a schedule counts is seen from when it is stepped. One that is stepped with each batch
    falls behind as soon as the batch grows. One that is stepped between passes over the data runs
    ahead only if larger batches need more passes, so the warning comes once they have needed more.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def compare_schedules(self, worker: Worker, limits: BatchLimits, epochs: float) -> None:
        """Compare schedules with the previous call; called between any two steps on all ranks.

        Args:
            epochs: scale-invariant progress in epochs of the initial batch size.
        """
        if worker.state is None or limits.max_batch_size <= limits.initial_batch_size:
            return
        progress = worker.progress
        for name, schedule in worker.state.schedules().items():
            seen = self._seen.setdefault(name, _Seen())
            seen.update(schedule.calls, progress.epoch, progress.step)
            problem = _problem(seen, name, progress.epoch, limits, epochs)
            if problem:
                scheduler = f"scheduler {name!r}"
                worker.warn_once(f"{scheduler} ({schedule.described}) {problem}", of=scheduler)


class _Seen:
    """Records when a scheduler moved, from one check to the next."""

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None
        self.batches = 0
        """Number of latest steps of this pass over the data in each of which it moved."""
        self.still = 0
        """Number of latest steps of this pass in which it did not move."""
        self.passes = False
        """Whether it moved between two passes and not with the batches before."""

    def update(self, count: int, epoch: int, step: int) -> None:
        last, self._last = self._last, (count, epoch, step)
        if last is None or step != last[2] + 1:
            return  # the state came from another rank, or the step is repeated after a failure
        moved = count > last[0]
        if epoch != last[1]:
            self.passes = moved and self.still > 0
            return
        self.batches = self.batches + 1 if moved else 0
        self.still = 0 if moved else self.still + 1


def _problem(seen: _Seen, name: str, passes: int, limits: BatchLimits, epochs: float) -> str:
    """Return what is wrong with a scheduler and how to correct it, or ""."""
    if seen.batches >= _BATCHES_COUNTED:
        return (
            "is stepped once for each batch, and the batch may grow from "
            f"{limits.initial_batch_size} to {limits.max_batch_size} "
            "examples: larger batches make fewer steps, so training would end before the "
            "schedule does. Let it follow the progress of training instead: "
            f"{name} = hvd.follow_progress({name})"
        )
    if seen.passes and epochs < (1 - _PASSES_OFF) * passes:
        return (
            "is stepped once for each pass over the data, and larger batches need more passes "
            f"than hvd.epochs() is given: {passes} so far are worth {epochs:.1f} "
            "epochs, so the schedule would end before training does. Let it follow the progress "
            f'of training instead: {name} = hvd.follow_progress({name}, per="epoch")'
        )
    return ""
