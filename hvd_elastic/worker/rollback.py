"""Undoes what the script changed in its state when a step, or the code between two epochs, fails.

With one optimizer its parameters and state are never copied: they change only in its step, so they
always belong to a completed step. With several, each is copied before its first step in a loop
body, so that a body that fails between two of them is undone as a whole. Everything else in the
state is copied when a loop body, or the loader's loop, has ended, and is restored if what follows
fails before its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from hvd_elastic.errors import ScriptError
from hvd_elastic.formatting import count
from hvd_elastic.worker.debugging.uncaught import script_line
from hvd_elastic.worker.frontend import State
from hvd_elastic.worker.progress import AFTER_LOOP, Phase, Progress
from hvd_elastic.worker.worker import Worker


class StepVoidedError(RuntimeError):
    """Raised when all ranks call a step off because a pass did not fit into the memory of one.

    The optimizer's step raises it and ``hvd.run`` catches it, so all ranks leave the loop body at
    the same place and enter the function again.
    """


@runtime_checkable
class SnapshotSource(Protocol):
    """Object that can go back to an earlier state at less cost than by ``state_dict()``."""

    def snapshot(self) -> Any:
        """Return what :meth:`roll_back` needs to undo what follows; called after each step."""

    def roll_back(self, values: Any) -> None:
        """Go back to an earlier :meth:`snapshot`, not necessarily the last one."""


_CONTAINERS = (list, dict, set, deque)
_OTHER_WEIGHTS = (
    "a rank was lost in a validation, or at the end of an epoch, while {!r} had other values than "
    "after the last batch, such as an average of the weights (EMA), and training would continue "
    "with them. Keep an average in a second model, and evaluate that. To change weights for good, "
    "do it after a batch: in on_train_batch_end (Lightning) or on_step_end (transformers)"
)
_PARTIAL = 0
_NEWNESS = {Phase.DONE: 1, Phase.LOOP: 2, Phase.HEAD: 3, Phase.TAIL: 4, Phase.PAUSE: 4}
"""Preference among survivors that have taken the same number of steps: the highest gives its state.

A rank that failed between its optimizer's step and the end of the loop body comes last, since the
rest of that body is never run. Of ranks that went back to different parts of an epoch, the one
that is least advanced comes first, so that no part is skipped that another rank has not finished.
"""


class Rollback:
    """Keeps the point to which one process goes back after a failure.

    The script is divided into loop bodies and the parts before and after the loader's loop. Each of
    them changes the state exactly once: a part that fails is undone and run again. One exception:
    if one of the script's own collectives fails between the optimizer's step and the end of the
    loop body, the step cannot be undone; what the body did before stays, and the rest of it is not
    run.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._at = Progress()
        self._steps = 0
        self._stop_reason = ""
        self._random: dict[str, Any] = {}
        """States of the generators of random numbers."""
        self._leftovers = _Leftovers()
        self._entered = False
        self._loop = 0
        self._loops_in_turn = 0
        self._left: Any = None
        self._epoch_end: tuple[Progress, str, Any, dict[str, Any]] | None = None
        """Progress, reason to stop, snapshot and generators at the end of the last loop. Kept until
        a step of the next epoch shows that every rank has passed it: until then a failure repeats
        the tail on all ranks, so that what only rank 0 does there is done even if it is lost."""
        self._collective: tuple[str, Any, int] | None = None
        self._weights: list[tuple[str, int]] = []
        """Of the trained parameters where a library's code after a loop began."""
        self._warned = False
        self.partial = False
        """Whether this rank failed in a loop body after its step, so the body's rest is missing."""
        self.commits = False
        """Whether the script, which reads its data itself, says where its steps end."""

    def save(self, snapshot: Any = None) -> None:
        """Make the present state, or an earlier snapshot, the point to go back to."""
        state = self._worker.state
        if state is not None:
            tensors = self.keeps_aside or (self._worker.elastic and self._worker.averagers.local)
            state.save_values(snapshot, tensors=tensors)
            self._worker.averagers.drop_copies()
            self._at = replace(self._worker.progress)
            self._steps = self._worker.averagers.steps
            self._stop_reason = self._worker.stop_reason
            if self._worker.elastic:
                self._random = self._worker.generators.copy()
                self._leftovers.note_lengths()

    @property
    def keeps_aside(self) -> bool:
        """Return whether a loop body that fails after one optimizer's step is undone."""
        worker = self._worker
        return worker.averagers.several and worker.elastic and worker.communicator.size > 1

    def synchronized(self) -> None:
        """Note that all ranks have received the root's state, and save it."""
        self.partial = False
        self._entered = True
        self._epoch_end = None
        self._save_part()

    def step_begins(self) -> None:
        """Check that the loop body can be undone; called before an optimizer's step."""
        if self._worker.elastic and self._worker.state is not None:
            self._worker.state.step_begins()

    def optimizer_stepped(self) -> None:
        """Warn once of a step that cannot be undone or repeated as others are."""
        worker = self._worker
        if not worker.elastic:
            return
        call = worker.frontend.takes_step
        if worker.progress.phase in AFTER_LOOP:
            warning = (
                f"{call} is called after the loop over the loader has ended. If the loop "
                "asks for a batch before it has trained on the one before (a prefetcher), the next "
                "worker that joins ends the run: train on each batch before the next one is asked "
                "for, and let num_workers of the loader read ahead"
            )
        elif worker.averagers.steps > self._steps + 1:
            warning = (
                f"{call} is called several times in one loop body, or between two calls "
                "of state.commit(). If a rank fails between these steps, the first of them stay, "
                "so the result differs from an undisturbed training. Give "
                "DistributedOptimizer(..., several_steps=True), which undoes and repeats the whole "
                "body"
            )
        else:
            return
        worker.warn_once(warning)

    @property
    def newness(self) -> int:
        """Preference of this rank's state among survivors with as many steps: the highest wins."""
        return _PARTIAL if self.partial else _NEWNESS[self._at.phase]

    def fail(self) -> None:
        """Go back to the end of the last loop body, or of the last loop if no step has followed.

        Raises:
            ScriptError: code of a library after the last loop has changed weights.
        """
        worker = self._worker
        weights, self._weights = self._weights, []  # a state that is received has others
        self._left = self._collective = None
        if leftovers := self._leftovers.left():
            worker.warn(leftovers)
        if (worker.progress.step, worker.averagers.steps) != (self._at.step, self._steps):
            self.partial = True
            self._epoch_end = None
            self.save()
        elif worker.state is not None:
            if weights and worker.progress.phase in AFTER_LOOP:
                for before, now in zip(weights, worker.averagers.weight_sums(), strict=False):
                    if before != now:
                        raise ScriptError(_OTHER_WEIGHTS.format(before[0]))
            if self._epoch_end is not None:
                self._at, self._stop_reason, snapshot, self._random = self._epoch_end
                worker.state.save_values(snapshot)
            self._restore(failed=True)
            worker.progress, worker.stop_reason = replace(self._at), self._stop_reason

    def _restore(self, *, failed: bool = False) -> None:
        """Restore the state; ``failed``: a loop body has failed.

        Else the function has run its beginning again, where it may seed random numbers by rank.
        """
        state = self._worker.state
        self._worker.generators.restore(self._random, unless_seeded=not failed)
        if state is not None:
            self._worker.averagers.restore()
            state.roll_back()

    # -- the script's parts ----------------------------------------------------------------

    def function_entered(self) -> None:
        """Note that the training function is called, for the first time or again."""
        self._entered = True
        self._left = None
        self._loops_in_turn = 0
        state = self._worker.state
        if state is not None and self._worker.elastic:
            self._leftovers.find(state)
        if state is not None and self._worker.progress.phase is Phase.LOOP:
            # The head of the epoch runs again and may change buffers, which is undone later.
            self._restore()
            state.save_values(state.take_snapshot(tensors=True))

    def epochs_begin(self) -> None:
        """Undo what the function did before ``epochs()`` if an earlier call has done it already."""
        progress = self._worker.progress
        begins = progress.step == 0 and progress.epoch == 0 and progress.phase is Phase.HEAD
        if self._entered and self._worker.elastic and not begins:
            self._restore()

    def training_stopped(self) -> None:
        """Note that no later loop has been entered, so that what follows this one is not undone."""
        self._entered = False

    def function_returned(self) -> Phase:
        """Note that the training function has returned; return the phase that it was in."""
        progress = self._worker.progress
        phase, progress.phase = progress.phase, Phase.DONE
        self._left = None
        self.save()
        return phase

    def steps_begin(self) -> None:
        """Let a loop of ``steps()`` follow an earlier one of the same function."""
        progress = self._worker.progress
        if progress.phase in AFTER_LOOP:
            progress.phase = Phase.HEAD

    def loop_begins(self, *, in_step: bool = False) -> int:
        """Begin a loop over the loader; return its number, or 0 if nothing is left to read.

        If the function was entered in the middle of an epoch, what it did before the loop has had
        its effect already, so the state is restored to what it was in the loop, or after it.

        Args:
            in_step: a step of several batches continues, which began in an earlier loop: a failure
                goes back to its beginning, so nothing is saved.
        """
        worker = self._worker
        again, self._entered = self._entered, False
        self._left = None
        self._loop += 1
        self._loops_in_turn += 1
        if in_step:
            self._loops_in_turn = 1
            return self._loop
        if not again or worker.progress.phase is Phase.HEAD:
            worker.progress.phase = Phase.LOOP
            self.save()
            if worker.elastic and worker.state is not None:
                self._leftovers.find(worker.state)
            return self._loop
        self._restore()
        return self._loop if worker.progress.phase is Phase.LOOP else 0

    def body_ended(self, *, voided: bool) -> None:
        """Save the state at the end of a loop body; ``voided``: undo the body instead."""
        if voided:
            self._restore(failed=True)
        else:
            self._warn_of_late_changes()
            self._epoch_end = None
            self.save()
        self._collective = None
        self._entered = False

    def loop_ended(self, *, within_epoch: bool = False) -> None:
        """Save the state at the end of the last loop body; the epoch may not be over."""
        self._worker.progress.phase = Phase.PAUSE if within_epoch else Phase.TAIL
        self._save_part()

    def tail_begins(self) -> None:
        """Save the state again after a loop of another library, which runs code after our loop.

        If the state is that of another rank, which has come here already, restore it.
        """
        if self._left is not None or self._worker.progress.phase not in AFTER_LOOP:
            return
        again, self._entered = self._entered, False
        if again:
            self._restore()
        else:
            self._save_part()

    def library_follows(self) -> None:
        """Note the weights before a library's code after a loop, which may exchange them.

        Unlike in a script's own code, no `with` block can put them back there.
        """
        if self._worker.elastic:
            self._weights = self._worker.averagers.weight_sums()

    def next_pass(self) -> None:
        """Move progress to the next epoch inside a loop that goes over several."""
        progress = self._worker.progress
        progress.next_epoch()
        progress.phase = Phase.LOOP
        self._at = replace(progress)

    def is_current(self, loop: int) -> bool:
        """Return whether ``loop`` is the number of the loop that was begun last."""
        return loop == self._loop

    def loop_left(self, loop: int, *, within_epoch: bool = False) -> None:
        """Note that the loop was left early: by ``break``, ``return`` or an exception.

        A generator may be closed long after its loop was left, so the number of the loop is
        compared. A script that runs several loops in one turn of ``epochs()`` has not ended the
        epoch by leaving one of them; nor has one that leaves a loop of ``steps()``
        (``within_epoch``).
        """
        if not self.is_current(loop) or self._loops_in_turn > 1:
            return
        self._entered = False
        worker, progress = self._worker, self._worker.progress
        at = f"epoch {progress.epoch} at example {progress.position}"
        worker.left_epoch = f"it left {at}, {script_line()}"
        state = worker.state
        # After a failed collective the device may never finish the work that a copy waits for.
        if state is not None and worker.in_train and not worker.communicator.broken:
            phase = Phase.PAUSE if within_epoch else Phase.TAIL
            self._left = (phase, state.take_snapshot(tensors=True))

    def collective_begins(self, name: str, *, changes_state: bool = False) -> None:
        """Prepare for one of the script's own collectives.

        Args:
            name: name of the collective, for messages.
            changes_state: whether changing the state is its purpose.
        """
        worker, state = self._worker, self._worker.state
        if state is None or not worker.in_train:
            return
        if self._left is not None:
            worker.progress.phase, snapshot = self._left
            self._save_part(snapshot)
            self._left = None
        elif not (self._warned or changes_state or worker.communicator.size == 1) and (
            worker.progress.phase is Phase.LOOP and worker.progress.step != self._at.step
        ):
            self._collective = (name, state.take_snapshot(), state.module_versions())

    def epoch_turns(self, epoch: int) -> None:
        """Move progress to the epoch after ``epoch``, and save the state."""
        worker = self._worker
        self._left = None
        self._loops_in_turn = 0
        if worker.progress.epoch == epoch:  # else the state received meanwhile is in another epoch
            worker.progress.next_epoch()
        self.save()

    def _save_part(self, snapshot: Any = None) -> None:
        worker = self._worker
        if worker.progress.phase in AFTER_LOOP and worker.state is not None:
            snapshot = snapshot or worker.state.take_snapshot(tensors=True)
            random = worker.generators.copy()
            self._epoch_end = (replace(worker.progress), worker.stop_reason, snapshot, random)
        self.save(snapshot)

    def _warn_of_late_changes(self) -> None:
        state = self._worker.state
        if self._collective is None or state is None:
            return
        name, before, versions = self._collective
        now = state.take_snapshot()
        # A state_dict() that creates new tensors differs in each snapshot: two show which.
        changes = before.differences(now) - now.differences(state.take_snapshot())
        if versions != state.module_versions():
            changes.add("a module")
        if changes:
            self._warned = True
            changed, call = min(changes), self._worker.frontend.takes_step
            self._worker.warn_once(
                f"{changed} of the State changes in the loop body after the collective {name!r}, "
                f"which comes after {call}. If a rank fails in that collective, the rest "
                "of the body is not run for this step, and the change is missing. Call the "
                f"collective before {call}, or at the end of the loop body"
            )


class _Leftovers:
    """Finds what an interrupted loop body has left in lists and dicts of the script's modules.

    They are not part of the State, so they are not restored: the body runs again on top of them.
    """

    def __init__(self) -> None:
        self._found: list[tuple[str, dict[str, Any], str]] = []
        self._lengths: list[int] = []

    def find(self, state: State) -> None:
        """Find the containers; called once a loop, since it visits all modules."""
        self._found = [
            (f"{name}.{key}", attributes, key)
            for name, attributes in state.module_attributes()
            for key, value in attributes.items()
            if isinstance(value, _CONTAINERS) and not key.startswith("_")
        ]
        self.note_lengths()

    def note_lengths(self) -> None:
        """Note the lengths; called at the end of each loop body."""
        if self._found:
            self._lengths = self._now()

    def _now(self) -> list[int]:
        return [
            len(value) if isinstance(value := attributes.get(key), _CONTAINERS) else 0
            for _, attributes, key in self._found
        ]

    def left(self) -> str:
        """Return a warning of what has another length now than was noted last, or ""."""
        changed = [
            f"{name} has {count(now, 'entry')} and had {before}"
            for (name, *_), before, now in zip(self._found, self._lengths, self._now(), strict=True)
            if before != now
        ]
        if not changed:
            return ""
        return (
            f"a loop body was interrupted, and has left behind what is not in the State: "
            f"{', '.join(changed[:3])} at the end of the body before. The body runs again on top "
            "of it: empty such objects first in the body, or put what they hold into the State"
        )
