"""Checks that every example was used exactly once in each epoch, from what workers really read.

A step can be in ``audit.jsonl`` more than once, for good reasons:

- several workers report the same step of the same generation: one of them counts;
- a step was finished only by workers that died, and the next generation did it again from the
  state of the survivors: the newer generation counts, and whatever the older one did from that
  step on is void;
- all workers died and training went back to a checkpoint (``restored``): every later step
  recorded before that is void.

What is left is the sequence of steps that made the final parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_elastic.formatting import count

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

__all__ = ["AuditResult", "EpochAudit", "check_audit"]

SHOWN = 10
"""How many indices a finding names; the counts are always complete."""


@dataclass(frozen=True)
class EpochAudit:
    """How one epoch used the dataset.

    Attributes:
        epoch: counted from 0.
        steps: steps that count.
        used: different indices used.
        missing: indices that no step used, ``used + missing`` = size of the dataset.
        duplicated: indices used more than once.
        foreign: uses of an index that the dataset does not have.
        padding: reads with weight 0, which do not count as uses.
        open: the epoch was not over, so missing indices are no fault.
        ended: the script ended in the middle of it.
        missing_indices: the first few of them.
        duplicated_indices: the first few of them.
        allowed_missing: examples that ``drop_last`` leaves out; where the script ended, those that
            it had not come to.
    """

    epoch: int
    steps: int
    used: int
    missing: int
    duplicated: int
    foreign: int
    padding: int
    open: bool
    missing_indices: tuple[int, ...] = ()
    duplicated_indices: tuple[int, ...] = ()
    allowed_missing: int = 0
    ended: bool = False

    @property
    def ok(self) -> bool:
        """Each index that was due exactly once; in an open epoch, at most once."""
        complete = self.open or self.missing == self.allowed_missing
        return complete and self.duplicated == 0 and self.foreign == 0

    def problem(self) -> str:
        """What is wrong in words; empty when nothing is."""
        found = []
        if self.missing != self.allowed_missing and self.ended:
            due = self.used + self.missing - self.allowed_missing
            found.append(f"{due - self.used} of {due} missing until the script ended")
        elif self.missing != self.allowed_missing and not self.open:
            found.append(_named(self.missing, "missing", self.missing_indices))
        if self.duplicated:
            found.append(_named(self.duplicated, "used more than once", self.duplicated_indices))
        if self.foreign:
            found.append(f"{self.foreign} not in the dataset")
        return f"epoch {self.epoch}: {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class AuditResult:
    """The audit of a run.

    Attributes:
        examples: size of the dataset, 0 when it was never recorded.
        epochs: one entry for each epoch that was begun.
        steps: steps that count.
        repeated_steps: steps done again by a later generation.
        voided_steps: steps undone by going back to a checkpoint.
        conflicts: steps for which workers of one generation reported different indices.
        unrecorded_steps: steps that were made and are in no record (the disk was full).
    """

    examples: int
    epochs: tuple[EpochAudit, ...]
    steps: int
    repeated_steps: int = 0
    voided_steps: int = 0
    conflicts: tuple[int, ...] = ()
    unrecorded_steps: int = 0

    @property
    def recorded(self) -> bool:
        """Whether there is anything to judge."""
        return self.examples > 0 and bool(self.epochs)

    @property
    def ok(self) -> bool:
        """Recorded, and every epoch used every example exactly once."""
        return self.recorded and not self.conflicts and all(epoch.ok for epoch in self.epochs)

    @property
    def complete_epochs(self) -> int:
        """Epochs that used every example exactly once."""
        return sum(epoch.ok and not (epoch.open or epoch.ended) for epoch in self.epochs)

    def problems(self) -> list[str]:
        """One line for each thing that is wrong."""
        if not self.recorded:
            return ["nothing was recorded; start the run with --audit"]
        found = [text for epoch in self.epochs if (text := epoch.problem())]
        found += [
            f"step {step}: workers of one generation reported different indices"
            for step in self.conflicts[:SHOWN]
        ]
        return found

    @property
    def _only_unproved(self) -> bool:
        """Nothing is wrong but missing examples, and steps that may have used them."""
        wrong = any(epoch.duplicated or epoch.foreign for epoch in self.epochs)
        return self.unrecorded_steps > 0 and not wrong and not self.conflicts

    def sentence(self) -> str:
        """The result in one line."""
        if not self.recorded:
            return "not audited (start the run with --audit)"
        if not self.ok:
            problems = self.problems()
            if self._only_unproved:
                steps = count(self.unrecorded_steps, "step")
                return f"cannot be proved: {steps} left no record, so examples look unused"
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"NOT exactly once: {problems[0]}{more}"
        examples, epochs = count(self.examples, "example"), self.complete_epochs
        last = self.epochs[-1]
        unfinished = f"epoch {last.epoch} open" if last.open else f"ended in epoch {last.epoch}"
        if not epochs:
            return f"{unfinished} with {last.used} of {examples} used, none twice"
        text = f"each of {examples} used exactly once in "
        text += "its one epoch" if epochs == 1 else f"each of {epochs} epochs"
        if last.open or last.ended:
            text += f"; {unfinished} with {last.used} used, none twice"
        return text


@dataclass(frozen=True)
class _Step:
    """One step as a worker reported it.

    Attributes:
        turn: orders reports of a step: how many times training went back to a checkpoint before it,
            and its generation. The newest counts.
        epoch, indices, padding: what was read.
    """

    turn: tuple[int, int]
    epoch: int
    indices: NDArray[int64]
    padding: int


class _Steps:
    """Collects the steps that made the final parameters.

    Attributes:
        examples, epochs, dropped: size of the data set, epochs that are wanted, and examples that
            ``drop_last`` leaves out of each.
        by_number: the newest report of each step.
        conflicts: steps that workers of one generation report differently.
        voided, repeated: how many were undone by going back to a checkpoint, and done again.
    """

    def __init__(self) -> None:
        self.examples = self.epochs = self.dropped = 0
        self.by_number: dict[int, _Step] = {}
        self.conflicts: set[int] = set()
        self.voided = self.repeated = 0
        self._times_restored = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        match record.get("kind"):
            case "dataset":
                self.examples = int(record["n"])
                self.epochs = int(record.get("epochs") or 0)
                self.dropped = int(record.get("dropped") or 0)
            case "restored":
                self._times_restored += 1
                later = [number for number in self.by_number if number > int(record["step"])]
                self.voided += len(later)
                self._drop(later)
            case "used":
                self._add_used(record)

    def _add_used(self, record: Mapping[str, Any]) -> None:
        import numpy as np

        number = int(record["step"])
        new = _Step(
            (self._times_restored, int(record.get("generation") or 0)),
            int(record["epoch"]),
            np.asarray(record["indices"], dtype=np.int64).reshape(-1),
            len(record.get("padding") or ()),
        )
        old = self.by_number.get(number)
        if old is None or old.turn < new.turn:
            self.by_number[number] = new
            self.repeated += old is not None
            self.conflicts.discard(number)
        elif old.turn == new.turn:
            if old.epoch != new.epoch or not np.array_equal(old.indices, new.indices):
                self.conflicts.add(number)

    def drop_undone(self) -> None:
        """Drop what an older generation did beyond the point where a newer one took over."""
        undone, newest = [], (0, 0)
        for number, step in sorted(self.by_number.items()):
            if step.turn < newest:
                undone.append(number)
            newest = max(newest, step.turn)
        self.repeated += len(undone)
        self._drop(undone)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self.by_number[number]
            self.conflicts.discard(number)


def check_audit(
    records: Iterable[Mapping[str, Any]],
    *,
    finished: bool = False,
    ended_in: int | None = None,
    steps_made: int = 0,
    examples_made: int = 0,
) -> AuditResult:
    """Check the records of an ``audit.jsonl``.

    Args:
        records: in the order in which they were written. ``dataset {n, epochs}`` may carry
            ``dropped``, the examples that ``drop_last`` leaves out of each epoch.
        finished: the run ended well, so that the last epoch has to be complete as well, and all
            ``epochs`` have to be there. Otherwise examples missing at the end of the newest epoch
            are its future.
        ended_in: epoch in which a run that ended well stood then. An epoch that was read to its
            end is before it; of this one the script may have left out the rest.
        steps_made, examples_made: steps of the run, and the examples that they consumed, where that
            is known from elsewhere.

    >>> records = [
    ...     {"kind": "dataset", "n": 4, "epochs": 1},
    ...     {"kind": "used", "generation": 1, "step": 1, "epoch": 0, "indices": [2, 0]},
    ...     {"kind": "used", "generation": 2, "step": 2, "epoch": 0, "indices": [1, 3]},
    ... ]
    >>> check_audit(records, finished=True).sentence()
    'each of 4 examples used exactly once in its one epoch'
    """
    steps = _Steps()
    for record in records:
        steps.add(record)
    steps.drop_undone()
    counted = steps.by_number
    by_epoch: dict[int, list[_Step]] = {}
    for _, kept in sorted(counted.items()):
        by_epoch.setdefault(kept.epoch, []).append(kept)
    if finished:
        for epoch in range(steps.epochs if ended_in is None else min(steps.epochs, ended_in)):
            by_epoch.setdefault(epoch, [])
    newest = max(by_epoch, default=0)
    # Of the examples that the run consumed these are in no record.
    unrecorded = max(0, examples_made - sum(len(step.indices) for step in counted.values()))
    audits = []
    for epoch, members in sorted(by_epoch.items()):
        audit = _audit_epoch(epoch, members, steps.examples, steps.dropped)
        if epoch == newest and audit.missing > steps.dropped:
            if not finished:
                audit = replace(audit, open=True)
            elif epoch == ended_in:
                read = sum(len(step.indices) for step in members)
                to_come = max(0, steps.examples - read - unrecorded)
                audit = replace(audit, ended=True, allowed_missing=to_come)
        audits.append(audit)
    return AuditResult(
        examples=steps.examples,
        epochs=tuple(audits),
        steps=len(counted),
        repeated_steps=steps.repeated,
        voided_steps=steps.voided,
        conflicts=tuple(sorted(steps.conflicts)),
        unrecorded_steps=max(steps_made, max(counted, default=0)) - len(counted),
    )


def _audit_epoch(epoch: int, steps: list[_Step], examples: int, dropped: int) -> EpochAudit:
    """Count how the steps of one epoch used the examples."""
    import numpy as np

    indices = np.concatenate([np.empty(0, dtype=np.int64), *(step.indices for step in steps)])
    inside = indices[(indices >= 0) & (indices < examples)]
    used, uses = np.unique(inside, return_counts=True)
    # Among so many first ones are enough that are missing; the data set may be huge.
    first = np.arange(min(examples, len(used) + SHOWN))
    duplicated = used[uses > 1]
    return EpochAudit(
        epoch=epoch,
        steps=len(steps),
        used=len(used),
        missing=examples - len(used),
        duplicated=len(duplicated),
        foreign=len(indices) - len(inside),
        padding=sum(step.padding for step in steps),
        open=False,
        missing_indices=tuple(np.setdiff1d(first, used)[:SHOWN].tolist()),
        duplicated_indices=tuple(duplicated[:SHOWN].tolist()),
        allowed_missing=dropped,
    )


def _named(count: int, what: str, indices: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, indices[:SHOWN]))
    return f"{count} {what} ({shown}{', …' if count > len(indices) else ''})"
