"""Checks, from the records of workers, that every epoch used each example exactly once.

A step can occur in ``audit.jsonl`` more than once without an error:

- several workers report the same step of the same generation: one report counts;
- only workers that died had finished the step, and the next generation repeated it from the state
  of the survivors: the newer generation counts, and all steps of the older one from there on are
  void;
- all workers died and training went back to a checkpoint (``restored``): all later steps of older
  generations are void, also if a host that was cut off tells of them afterwards.

Generations have numbers that rise throughout a run, also when it is resumed. Without a leader they
start again in each process, and then what was recorded before the ``restored`` is older.

The remaining steps are those that led to the final parameters. A step of them may lack its record,
as when the leader and all agents were killed at once. How many examples it used follows from where
the steps before and after it began, so they count as not recorded, and never as missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_elastic.formatting import count

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

SHOWN = 10
"""Number of indices listed in a message, to keep it short; counts are always complete."""


@dataclass(frozen=True)
class EpochAudit:
    """Use of the dataset in one epoch.

    Attributes:
        epoch: index of the epoch, from 0.
        used: number of different indices used.
        missing: number of indices that no recorded step used; ``used + missing`` = size of the
            dataset.
        duplicated: number of indices used more than once.
        foreign: number of uses of an index outside the dataset.
        padding: number of examples with weight 0, which do not count as uses.
        open: whether the epoch is not over, so that missing indices are no error.
        ended: whether the script ended within the epoch.
        unrecorded: number of examples of steps that left no record.
        missing_indices: first few missing indices.
        duplicated_indices: first few duplicated indices.
        allowed_missing: number of examples that ``drop_last`` leaves out; if the script ended
            within the epoch, the number that it had not reached.
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
    unrecorded: int = 0

    @property
    def lost(self) -> int:
        """Number of examples that no step can have used; below 0: that were used twice."""
        return 0 if self.open else self.missing - self.allowed_missing - self.unrecorded

    @property
    def faulty(self) -> bool:
        """Return whether the records show that an example was not used exactly once."""
        return bool(self.lost or self.duplicated or self.foreign)

    @property
    def ok(self) -> bool:
        """Return whether each expected index was used exactly once; in an open epoch, at most."""
        return not self.faulty and (self.open or not self.unrecorded)

    def problem(self) -> str:
        """Return a description of the errors; empty if there are none."""
        found = []
        if self.lost < 0:
            found.append(f"{-self.lost} used more than once, by steps that left no record")
        elif self.lost and self.ended:
            due = self.used + self.missing - self.allowed_missing
            found.append(f"{self.lost} of {due} missing until the script ended")
        elif self.lost and self.unrecorded:
            found.append(f"{self.lost} missing")  # which ones is not known
        elif self.lost:
            found.append(_named(self.lost, "missing", self.missing_indices))
        if self.unrecorded and not self.open:
            found.append(f"{self.unrecorded} not recorded")
        if self.duplicated:
            found.append(_named(self.duplicated, "used more than once", self.duplicated_indices))
        if self.foreign:
            found.append(f"{self.foreign} not in the dataset")
        return f"epoch {self.epoch}: {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class AuditResult:
    """The result of the audit of a run.

    Attributes:
        examples: size of the dataset; 0 if it was not recorded.
        repeated_steps: number of steps that a later generation repeated.
        voided_steps: number of steps undone by going back to a checkpoint.
        conflicts: steps for which workers of one generation reported different indices.
        unrecorded_steps: number of steps without a record, as when the disk was full, or all
            processes that had it were killed.
        skipped: number of uses, in all epochs, of examples that cannot be decoded.
    """

    examples: int
    epochs: tuple[EpochAudit, ...]
    steps: int
    repeated_steps: int = 0
    voided_steps: int = 0
    conflicts: tuple[int, ...] = ()
    unrecorded_steps: int = 0
    skipped: int = 0

    @property
    def recorded(self) -> bool:
        return self.examples > 0 and bool(self.epochs)

    @property
    def ok(self) -> bool:
        """Return whether the records show that every epoch used each example exactly once."""
        return self.recorded and not self.conflicts and all(epoch.ok for epoch in self.epochs)

    @property
    def faulty(self) -> bool:
        """Return whether the records show an error; without one, records may still be missing."""
        return bool(self.conflicts) or any(epoch.faulty for epoch in self.epochs)

    @property
    def unrecorded(self) -> int:
        """Return the number of examples of steps that left no record, in epochs that are over."""
        return sum(epoch.unrecorded for epoch in self.epochs if not epoch.open)

    @property
    def complete_epochs(self) -> int:
        """Return the number of complete epochs that used every example exactly once."""
        return sum(epoch.ok and not (epoch.open or epoch.ended) for epoch in self.epochs)

    def problems(self) -> list[str]:
        """Return a line for each error, and then for each epoch of which records are lost."""
        if not self.recorded:
            return ["nothing was recorded; start the run with --audit"]
        conflicts = [
            f"step {step}: workers of one generation reported different indices"
            for step in self.conflicts[:SHOWN]
        ]
        faulty = [epoch.problem() for epoch in self.epochs if epoch.faulty]
        others = [epoch.problem() for epoch in self.epochs if not epoch.faulty and not epoch.ok]
        return [*faulty, *conflicts, *others]

    def sentence(self) -> str:
        """Return the result in one line."""
        if not self.recorded:
            return "not audited (start the run with --audit)"
        if self.skipped:
            several = count(self.skipped, "use")
            return f"{replace(self, skipped=0).sentence()}; {several} skipped: cannot be decoded"
        if self.faulty:
            problems = self.problems()
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"NOT exactly once: {problems[0]}{more}"
        if not self.ok:
            lacking = count(self.unrecorded, "example")
            steps = count(self.unrecorded_steps, "step")
            return f"{lacking} of {steps} not recorded; every other one was used exactly once"
        examples, epochs = count(self.examples, "example"), self.complete_epochs
        last = self.epochs[-1]
        unfinished = f"epoch {last.epoch} open" if last.open else f"ended in epoch {last.epoch}"
        if not epochs:
            return f"{unfinished} with {last.used} of {examples} used, none twice"
        text = f"each of {examples} (by index) used exactly once in "
        text += "its one epoch" if epochs == 1 else f"each of {epochs} epochs"
        if last.open or last.ended:
            text += f"; {unfinished} with {last.used} used, none twice"
        return text


@dataclass(frozen=True)
class _Step:
    """One worker's report of one step.

    Attributes:
        turn: orders the reports of a step, of which the newest counts: how often the numbers of
            generations had started again before it, and its generation.
        epoch, position: where it began; a record need not tell the position.
        indices, padding: indices of the examples, and number of padding examples.
        later: indices of the examples in the following epochs, if the step reaches into them.
        skipped: number of examples that cannot be decoded.
    """

    turn: tuple[int, int]
    epoch: int
    position: int | None
    indices: NDArray[int64]
    padding: int
    later: tuple[NDArray[int64], ...] = ()
    skipped: int = 0

    @property
    def by_epoch(self) -> list[_Step]:
        """The step, or one for each epoch that it has examples of."""
        parts = enumerate(self.later, self.epoch + 1)
        others = [_Step(self.turn, epoch, 0, indices, 0) for epoch, indices in parts]
        return [replace(self, later=()), *others]

    def same(self, other: _Step) -> bool:
        """Return whether both used the same examples."""
        import numpy as np

        mine, theirs = self.by_epoch, other.by_epoch
        return len(mine) == len(theirs) and all(
            one.epoch == two.epoch and np.array_equal(one.indices, two.indices)
            for one, two in zip(mine, theirs, strict=True)
        )


class _Steps:
    """Collects the steps that led to the final parameters.

    Attributes:
        examples, epochs, dropped: size of the dataset, number of epochs of the run, and number of
            examples that ``drop_last`` leaves out of each.
        by_number: newest report of each step.
        conflicts: steps that workers of one generation reported differently.
        voided, repeated: number of steps undone by going back to a checkpoint, and repeated.
    """

    def __init__(self) -> None:
        self.examples = self.epochs = self.dropped = 0
        self.by_number: dict[int, _Step] = {}
        self.conflicts: set[int] = set()
        self.voided = self.repeated = 0
        self._times_restored = 0  # without a leader
        self._restored: list[tuple[int, int]] = []  # first generation after it, and its step

    def add_record(self, record: Mapping[str, Any]) -> None:
        match record.get("kind"):
            case "dataset":
                self.examples = int(record["n"])
                self.epochs = int(record.get("epochs") or 0)
                self.dropped = int(record.get("dropped") or 0)
            case "restored":
                step, generation = int(record["step"]), record.get("generation")
                if generation is None:
                    self._times_restored += 1
                else:
                    self._restored.append((int(generation), step))
                later = [number for number in self.by_number if number > step]
                self.voided += len(later)
                self._drop(later)
            case "used":
                self._add_used(record)

    def _add_used(self, record: Mapping[str, Any]) -> None:
        import numpy as np

        number, generation = int(record["step"]), int(record.get("generation") or 0)
        if any(generation < first and number > step for first, step in self._restored):
            return  # it is void, and was told late
        new = _Step(
            (self._times_restored, generation),
            int(record["epoch"]),
            record.get("position"),
            np.asarray(record["indices"], dtype=np.int64).reshape(-1),
            len(record.get("padding") or ()),
            tuple(np.asarray(part, dtype=np.int64) for part in record.get("later") or ()),
            len(record.get("skipped") or ()),
        )
        old = self.by_number.get(number)
        if old is None or old.turn < new.turn:
            self.by_number[number] = new
            self.repeated += old is not None
            self.conflicts.discard(number)
        elif old.turn == new.turn:
            if not old.same(new):
                self.conflicts.add(number)

    def drop_undone(self) -> None:
        """Drop the steps of older generations after the step from which a newer one continued."""
        undone, newest = [], (0, 0)
        for number, step in sorted(self.by_number.items()):
            if step.turn < newest:
                undone.append(number)
            newest = max(newest, step.turn)
        self.repeated += len(undone)
        self._drop(undone)

    def unrecorded(self, steps_made: int, examples_made: int) -> Counter[int]:
        """Return how many examples of each epoch were used by steps that left no record."""
        length = self.examples - self.dropped  # of an epoch
        found: Counter[int] = Counter()
        if length <= 0:
            return found
        last = end = 0
        starts = [
            (number, step.epoch * length + step.position)
            for number, step in self.by_number.items()
            if step.position is not None
        ]
        for number, start in [*sorted(starts), (steps_made + 1, examples_made)]:
            if number > last + 1:
                for epoch in range(end // length, -(-start // length)):
                    in_epoch = min(start, (epoch + 1) * length) - max(end, epoch * length)
                    found[epoch] += max(0, in_epoch)
            if step := self.by_number.get(number):
                last, end = number, start + sum(len(part.indices) for part in step.by_epoch)
        return found

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
    """Audit the records of an ``audit.jsonl``.

    Args:
        records: records in the order in which they were written. ``dataset {n, epochs}`` may have
            ``dropped``, the number of examples that ``drop_last`` leaves out of each epoch.
        finished: whether the run succeeded, so that all ``epochs`` have to be there and the last
            one has to be complete. Otherwise, examples missing in the newest epoch are no error.
        ended_in: epoch of training when a successful run ended. Earlier epochs have to be complete;
            the script may have left out the rest of this one.
        steps_made, examples_made: number of steps of the run and of the examples that they
            consumed, if known from its events.

    >>> used = {"kind": "used", "generation": 1, "epoch": 0}
    >>> records = [
    ...     {"kind": "dataset", "n": 4, "epochs": 1},
    ...     {**used, "step": 1, "position": 0, "indices": [2, 0]},
    ...     {**used, "step": 2, "position": 2, "indices": [1, 3]},
    ... ]
    >>> check_audit(records, finished=True).sentence()
    'each of 4 examples (by index) used exactly once in its one epoch'
    """
    steps = _Steps()
    for record in records:
        steps.add_record(record)
    steps.drop_undone()
    counted = steps.by_number
    by_epoch: dict[int, list[_Step]] = {}
    for _, kept in sorted(counted.items()):
        for part in kept.by_epoch:
            by_epoch.setdefault(part.epoch, []).append(part)
    unrecorded = steps.unrecorded(steps_made, examples_made)
    complete = steps.epochs if ended_in is None else min(steps.epochs, ended_in)
    for epoch in (*range(complete if finished else 0), *+unrecorded):
        by_epoch.setdefault(epoch, [])
    newest = max(by_epoch, default=0)
    audits = []
    for epoch, members in sorted(by_epoch.items()):
        audit = _audit_epoch(epoch, members, steps.examples, steps.dropped)
        audit = replace(audit, unrecorded=unrecorded[epoch])
        if epoch == newest and audit.missing > steps.dropped:
            if not finished:
                audit = replace(audit, open=True)
            elif epoch == ended_in:
                read = sum(len(step.indices) for step in members)
                made = examples_made - epoch * (steps.examples - steps.dropped)
                to_come = max(0, steps.examples - max(read, made))
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
        skipped=sum(step.skipped for step in counted.values()),
    )


def _audit_epoch(epoch: int, steps: list[_Step], examples: int, dropped: int) -> EpochAudit:
    """Count how the steps of one epoch used the examples."""
    import numpy as np

    indices = np.concatenate([np.empty(0, dtype=np.int64), *(step.indices for step in steps)])
    inside = indices[(indices >= 0) & (indices < examples)]
    used, uses = np.unique(inside, return_counts=True)
    # This range is sure to hold enough missing indices, without scanning a huge dataset.
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
