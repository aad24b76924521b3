"""Undoes what the script changed in its state when a step, or the code between two epochs, fails.

Parameters and optimizer state are never copied: they change in an optimizer's step alone, so at all
times they are those of a whole step. Everything else in the state is copied when a loop body, or
the loader's loop, has ended, and put back when what follows fails before its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from hvd_elastic.training.progress import Phase, Progress
from hvd_elastic.training.uncaught import script_line
from hvd_elastic.training.worker import Worker

__all__ = ["Rollback", "SnapshotSource", "StepVoidedError"]


class StepVoidedError(RuntimeError):
    """The step was called off on all ranks, since a pass did not fit into the memory of one.

    Raised by the optimizer's step, and caught by ``hvd.run``, so that all ranks leave the loop body
    at the same place and enter the function again.
    """


@runtime_checkable
class SnapshotSource(Protocol):
    """An object of the library that copies itself at less cost than by its ``state_dict()``."""

    def snapshot(self) -> Any: ...

    def roll_back(self, values: Any) -> None: ...


_PARTIAL = 0
_NEWNESS = {Phase.DONE: 1, Phase.LOOP: 2, Phase.HEAD: 3, Phase.TAIL: 4}
"""Which survivor's state is taken by all, among those that made the same steps: the higher one's.

A rank that failed between its optimizer's step and the end of the loop body comes last, since the
rest of that body is never run. Of ranks that went back to different parts of an epoch, those that
are least far come first, so that no rank skips a part of which another has not seen the end.
"""


class Rollback:
    """The point to which one process goes back when it fails.

    The script is told apart into loop bodies and the parts before and after the loader's loop. Each
    of them has an effect on the state once: a part that fails is undone and run again. One
    exception: when a collective of the script's own fails between the optimizer's step and the end
    of the loop body, the step cannot be undone; what the body did before stays, and the rest of it
    is not run.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._at = Progress()
        self._steps = 0
        self._entered = False
        self._loop = 0
        self._loops_in_turn = 0
        self._left: Any = None
        self._epoch_end: tuple[Progress, Any] | None = None
        """The end of the last loop, until a step of the next epoch shows that no rank is before
        it any more: so what rank 0 alone does in the tail is done, whoever dies there."""
        self._collective: tuple[str, Any, int] | None = None
        self._warned = False
        self.partial = False
        """Whether this rank failed after a step that cannot be undone, so others may be further."""

    def save(self, snapshot: Any = None) -> None:
        """Make the state as it is now, or was at an earlier snapshot, the point to go back to."""
        state = self._worker.state
        if state is not None:
            state.save_values(snapshot)
            self._at, self._steps = replace(self._worker.progress), self._steps_made()

    def synchronized(self) -> None:
        """All ranks have taken the state of one of them."""
        self.partial = False
        self._entered = True
        self._epoch_end = None
        self._save_part()

    @property
    def newness(self) -> int:
        """Which survivor is preferred, among those that made the same steps: the highest."""
        return _PARTIAL if self.partial else _NEWNESS[self._at.phase]

    def fail(self) -> None:
        """Go back to the end of the last loop body, or of the last loop if no step followed it."""
        worker = self._worker
        self._left = self._collective = None
        if (worker.progress.step, self._steps_made()) != (self._at.step, self._steps):
            self.partial = True
            self._epoch_end = None
            self.save()
        elif worker.state is not None:
            if self._epoch_end is not None:
                self._at, snapshot = self._epoch_end
                worker.state.save_values(snapshot)
            worker.state.roll_back()
            worker.progress = replace(self._at)

    # -- the script's parts ----------------------------------------------------------------

    def function_entered(self) -> None:
        """The training function is called, for the first time or again."""
        self._entered = True
        self._left = None
        self._loops_in_turn = 0
        state = self._worker.state
        if state is not None and self._worker.progress.phase is Phase.LOOP:
            # What the head of the epoch does to buffers and the like is to be undone as well.
            state.roll_back()
            state.save_values(state.take_snapshot(tensors=True))

    def epochs_begin(self) -> None:
        """``epochs()`` is called: what the function did before was done in an earlier call."""
        progress, state = self._worker.progress, self._worker.state
        begins = progress.step == 0 and progress.epoch == 0 and progress.phase is Phase.HEAD
        if self._entered and self._worker.elastic and not begins and state is not None:
            state.roll_back()

    def function_returned(self) -> Phase:
        """The training function has returned; return the part of the epoch it was in."""
        progress = self._worker.progress
        phase, progress.phase = progress.phase, Phase.DONE
        self._left = None
        self.save()
        return phase

    def loop_begins(self) -> int:
        """The loader is iterated; return the number of this loop, or 0 if nothing is left to read.

        Where the function was entered in the middle of an epoch, what it did before the loop has
        had its effect already, so the state is put back to what it was in the loop, or after it.
        """
        worker = self._worker
        again, self._entered = self._entered, False
        self._left = None
        self._loop += 1
        self._loops_in_turn += 1
        if not again or worker.progress.phase is Phase.HEAD:
            worker.progress.phase = Phase.LOOP
            self.save()
            return self._loop
        if worker.state is not None:
            worker.state.roll_back()
        return self._loop if worker.progress.phase is Phase.LOOP else 0

    def body_ended(self, *, voided: bool) -> None:
        """The loop body has come back for the next step; ``voided``: nothing of it counts."""
        if voided:
            if self._worker.state is not None:
                self._worker.state.roll_back()
        else:
            self._warn_of_late_changes()
            self._epoch_end = None
            self.save()
        self._collective = None
        self._entered = False

    def loop_ended(self) -> None:
        """The loader has handed out the last batch of the epoch, and its body has ended."""
        self._worker.progress.phase = Phase.TAIL
        self._save_part()

    def loop_left(self, loop: int) -> None:
        """The loop was left early: by ``break`` or ``return``, or by an exception.

        One that is left long ago says so late. A script that goes on with further loops in the same
        turn of ``epochs()`` has not ended the epoch by leaving one.
        """
        if loop != self._loop or self._loops_in_turn > 1:
            return
        self._entered = False
        worker, progress = self._worker, self._worker.progress
        at = f"epoch {progress.epoch} at example {progress.position}"
        worker.left_epoch = f"it left {at}, {script_line()}"
        state = worker.state
        # After a failure the device may never finish what a copy would wait for.
        if state is not None and worker.in_train and not worker.communicator.broken:
            self._left = state.take_snapshot(tensors=True)

    def collective_begins(self, name: str, *, changes_state: bool = False) -> None:
        """The script calls a collective of its own; ``changes_state``: that is its purpose."""
        worker, state = self._worker, self._worker.state
        if state is None or not worker.in_train:
            return
        if self._left is not None:
            worker.progress.phase = Phase.TAIL
            self._save_part(self._left)
            self._left = None
        elif not (self._warned or changes_state or worker.communicator.size == 1) and (
            worker.progress.phase is Phase.LOOP and worker.progress.step != self._at.step
        ):
            self._collective = (name, state.take_snapshot(), state.module_versions())

    def epoch_turns(self, epoch: int) -> None:
        """``epochs()`` is asked for the next epoch."""
        worker = self._worker
        self._left = None
        self._loops_in_turn = 0
        if worker.progress.epoch == epoch:  # else a state taken over on the way is in another one
            worker.progress.next_epoch()
        self.save()

    def _save_part(self, snapshot: Any = None) -> None:
        worker = self._worker
        if worker.progress.phase is Phase.TAIL and worker.state is not None:
            snapshot = snapshot or worker.state.take_snapshot(tensors=True)
            self._epoch_end = (replace(worker.progress), snapshot)
        self.save(snapshot)

    def _steps_made(self) -> int:
        averager = self._worker.averager
        return 0 if averager is None else averager.steps

    def _warn_of_late_changes(self) -> None:
        state = self._worker.state
        if self._collective is None or state is None:
            return
        name, before, versions = self._collective
        now = state.take_snapshot()
        # Tensors that a state_dict() makes anew have other bytes each time.
        changes = before.differences(now) - now.differences(state.take_snapshot())
        if versions != state.module_versions():
            changes.add("a module")
        if changes:
            self._warned = True
            changed = min(changes)
            self._worker.warn_once(
                f"{changed} of the State changes in the loop body after the collective {name!r}, "
                "which comes after optimizer.step(). If a rank fails in that collective, the rest "
                "of the body is not run for this step, and the change is missing. Call the "
                "collective before optimizer.step(), or at the end of the loop body"
            )
