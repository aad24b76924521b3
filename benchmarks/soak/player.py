"""Plays a schedule on a job, and checks after every fault that training continues."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from benchmarks.soak.faults import Made, make_fault
from benchmarks.soak.growth import Sample
from benchmarks.soak.job import SoakJob, Target
from benchmarks.soak.schedule import KINDS, MIN_NP, Fault
from hvd_elastic.errors import HvdElasticError

_POLL_S = 0.05
_SAMPLE_EVERY_S = 2.0
_SETTLE_STEPS = 5
_STORY_BEFORE_S = 5.0
_BEGIN_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Bounds:
    """Time limits above which a reaction counts as wrong.

    Attributes:
        stall_s: longest time without a training step, while training can continue [s].
        recovery_s: longest time from the end of a fault to training in every wanted slot [s].
    """

    stall_s: float
    recovery_s: float


@dataclass
class Incident:
    """A fault, and how the run dealt with it.

    Attributes:
        fault: fault of the schedule.
        made: what was actually done.
        began: when causing it began [s, monotonic].
        made_at: when it was caused; finding the target takes time on a busy machine.
        may_stop: whether training may stop while it lasts.
        undone: when it was over; None while it lasts.
        recovered: first step in every wanted slot after it was over; None: not yet.
        stall_s: longest time without a finished step, from ``began`` to ``recovered``.
        problems: descriptions of what was wrong.
        story: the run's own events, if something was wrong.
    """

    fault: Fault
    made: Made
    began: float
    made_at: float
    may_stop: bool
    undone: float | None = None
    recovered: float | None = None
    stall_s: float | None = None
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    @property
    def recovery_s(self) -> float | None:
        """Time from the end of the fault to :attr:`recovered` [s]; None before."""
        if self.recovered is None or self.undone is None:
            return None
        return max(0.0, self.recovered - self.undone)

    def as_json(self, start: float) -> dict[str, Any]:
        """Return plain data for the report; times count from the start of the soak."""
        return {
            **{k: v for k, v in asdict(self.fault).items() if v not in ((), None)},
            "what": self.made.what,
            "at_s": round(self.began - start, 2),
            "stall_s": None if self.stall_s is None else round(self.stall_s, 3),
            "recovery_s": None if self.recovery_s is None else round(self.recovery_s, 3),
            "problems": self.problems,
            "story": self.story,
        }


class Player:
    """Causes the faults of a schedule, one after the other, and watches the run.

    Args:
        job: the run, started or not.
        faults: the schedule.
        bounds: time limits.
        say: called with a line for each fault, and when the run has recovered from it.
        show: called often with a short description of the state.
    """

    def __init__(
        self,
        job: SoakJob,
        faults: Iterator[Fault],
        bounds: Bounds,
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self.job = job
        self.incidents: list[Incident] = []
        self.samples: dict[Target, list[Sample]] = {}
        self.problem = ""
        self._faults = faults
        self._bounds = bounds
        self._say = say
        self._show = show
        self._next: Fault | None = None
        self._settled = time.monotonic()
        self._next_sample = 0.0

    @property
    def open(self) -> list[Incident]:
        """Faults that the run has not recovered from yet."""
        return [incident for incident in self.incidents if incident.recovered is None]

    def play(self, seconds: float) -> None:
        """Cause faults until the schedule or the time is over, and wait for the last recovery.

        Sets :attr:`problem` and returns early if the run cannot continue.

        Args:
            seconds: time after the first checkpoints from which on no fault begins [s].
        """
        try:
            self._wait_for_begin()
            self._next = next(self._faults, None)
            end = time.monotonic() + seconds
            while not self.problem:
                over = self._next is None or time.monotonic() >= end
                if over and not self.open:
                    return
                if not over:
                    self._begin_if_due()
                self._look()
                time.sleep(_POLL_S)
        finally:
            self._take_back_everything()

    def _wait_for_begin(self) -> None:
        deadline = time.monotonic() + _BEGIN_PATIENCE_S
        while not (self.job.trains_as_wanted() and self._checkpoints_before(deadline) >= 2):
            self.job.poll()
            self._show("waiting for the first steps and checkpoints")
            if not self.job.leader_alive():
                self.problem = f"the run ended before it trained:\n{self.job.output_tail()}"
            elif time.monotonic() > deadline:
                self.problem = (
                    f"no training with checkpoints within {_BEGIN_PATIENCE_S:.0f} s of the start"
                )
            if self.problem:
                return
            time.sleep(_POLL_S)
        self._settled = time.monotonic()

    def _checkpoints_before(self, mono: float) -> int:
        """Return the number of checkpoints that the run reported before a time."""
        kept = (event for event in self.job.events if event["kind"] == "checkpoint")
        return sum(event["mono"] < mono for event in kept)

    # -- causing and undoing ---------------------------------------------------------------

    def _begin_if_due(self) -> None:
        fault, now = self._next, time.monotonic()
        assert fault is not None
        if fault.overlaps and self.incidents and self.open:
            due = self.incidents[-1].began + fault.after_s
        elif self.open:
            return
        else:
            due = self._settled + fault.after_s
        if now < due:
            return
        self._next = next(self._faults, None)
        self.job.poll()
        began = time.monotonic()
        made = make_fault(self.job, fault)
        made_at = time.monotonic()
        self._say(f"{fault.text()}: {made.what}" if made.what else fault.text())
        incident = Incident(fault, made, began, made_at, self._may_stop(fault, made))
        incident.problems += made.problems
        self.incidents.append(incident)
        if made.undo is None:
            incident.undone = time.monotonic()

    def _may_stop(self, fault: Fault, made: Made) -> bool:
        """Return whether too few workers can train while this and all present faults last."""
        if KINDS[fault.kind].stops:
            return True
        world = self.job.chronicle.current
        size = min(sum(self.job.hosts.values()), world.size if world is not None else 0)
        lost = made.lost + sum(incident.made.lost for incident in self.open)
        return size - lost < MIN_NP or any(incident.may_stop for incident in self.open)

    def _take_back(self, incident: Incident) -> None:
        if incident.made.undo is not None:
            known = len(incident.made.problems)
            try:
                incident.made.undo()
            except HvdElasticError as error:
                incident.problems.append(f"taking it back failed: {error}")
            incident.problems += incident.made.problems[known:]
        incident.undone = time.monotonic()

    def _take_back_everything(self) -> None:
        for incident in self.open:
            if incident.undone is None:
                with contextlib.suppress(HvdElasticError, OSError):
                    self._take_back(incident)

    # -- watching --------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for incident in self.open:
            lasts_s = incident.fault.duration_s
            if incident.undone is None and now - incident.made_at >= lasts_s:
                self._take_back(incident)
        self.job.poll()
        for incident in self.open:
            self._judge(incident)
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_EVERY_S
            self._sample(now)
        self._check_leader()
        self._show(self._state())

    def _judge(self, incident: Incident) -> None:
        """Check whether training continues, and in every slot."""
        now, chronicle = time.monotonic(), self.job.chronicle
        last = chronicle.ends[-1] if chronicle.ends else incident.began
        still_s = now - max(last, incident.began)
        if still_s > self._bounds.stall_s and not incident.may_stop:
            self._blame(incident, f"training stood still for {self._bounds.stall_s:.0f} s")
        if incident.undone is None:
            return
        if self._is_over(incident, incident.undone):
            # The leader may have learned of it later; what counts is the training step.
            recovered = chronicle.first_end_after(max(incident.undone, self._world_began(incident)))
            incident.recovered = now if recovered is None else recovered
            incident.stall_s = chronicle.longest_gap(incident.began, incident.recovered)
            self._settled = now
            self._check_restored(incident)
            told = f"#{incident.fault.number} is dealt with: no step for {incident.stall_s:.2f} s, "
            self._say(f"{told}all there {incident.recovery_s:.2f} s after its end")
        elif now - incident.undone > self._bounds.recovery_s:
            world = chronicle.current
            size = world.slots() if world is not None else {}
            self.problem = (
                f"{incident.fault.text()} ({incident.made.what}): training in the slots "
                f"{self.job.wanted or self.job.hosts} was not reached within "
                f"{self._bounds.recovery_s:.0f} s of its end; the last steps were made in "
                f"{dict(size)}, {now - last:.0f} s ago"
            )
            self._blame(incident, self.problem)

    def _is_over(self, incident: Incident, undone: float) -> bool:
        world = self.job.chronicle.current
        if world is None or not self.job.trains_as_wanted():
            return False
        if incident.made.changes_world and world.began < incident.began:
            return False
        since = max(undone, world.began if incident.made.changes_world else undone)
        return (
            self.job.chronicle.ends_since(since) >= _SETTLE_STEPS
            and world.ends >= _SETTLE_STEPS
            and self.job.newest_leader_hears_since(undone)
        )

    def _world_began(self, incident: Incident) -> float:
        world = self.job.chronicle.current
        changed = world is not None and world.began > incident.began
        return world.began if world is not None and changed else 0.0

    def _check_restored(self, incident: Incident) -> None:
        """Check that training restored a checkpoint, and not a damaged one."""
        for event in self.job.events:
            if event["mono"] < incident.began:
                continue
            if event["kind"] == "warning" and "training starts from scratch" in event["message"]:
                self._blame(incident, event["message"])
            elif event["kind"] == "restored" and incident.made.damaged:
                if event["path"].endswith(incident.made.damaged):
                    self._blame(incident, f"training went back to {incident.made.damaged}")

    def _check_leader(self) -> None:
        waits = any(i.undone is None and i.made.undo == self.job.resume for i in self.incidents)
        if not self.problem and not waits and not self.job.leader_alive():
            assert self.job.process is not None
            self.problem = (
                f"the leader ended with status {self.job.process.returncode}, unasked:\n"
                f"{self.job.output_tail()}"
            )
            if self.incidents:
                self._blame(self.incidents[-1], self.problem)

    def _blame(self, incident: Incident, problem: str) -> None:
        if problem not in incident.problems:
            incident.problems.append(problem)
            incident.story = self.job.story(incident.began - _STORY_BEFORE_S)
            self._say(f"PROBLEM #{incident.fault.number} {incident.fault.kind}: {problem}")

    def _sample(self, now: float) -> None:
        worlds, world = len(self.job.chronicle.worlds), self.job.chronicle.current
        size = world.size if world is not None else 0
        targets = list(self.job.targets())
        hosts = len({target.host for target in targets if target.role == "agent"})
        for target in targets:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(target.pid)
                if process.create_time() != target.born:
                    continue
                with process.oneshot():
                    sample = Sample(
                        now,
                        worlds,
                        size,
                        hosts,
                        process.memory_info().rss,
                        process.num_fds(),
                        process.num_threads(),
                    )
                self.samples.setdefault(target, []).append(sample)

    def _state(self) -> str:
        world = self.job.chronicle.current
        size = world.size if world is not None else 0
        lasting = ", ".join(f"#{i.fault.number} {i.fault.kind}" for i in self.open) or "calm"
        made = len(self.incidents)
        bad = sum(bool(incident.problems) for incident in self.incidents)
        return (
            f"step {self.job.chronicle.step:,} on {size} ranks · {made} faults, "
            f"{bad} with problems · {lasting}"
        )
