"""What the plays of the elasticity benchmark have in common: starting, watching, waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import PEERS, DriverJob, Job, Launcher, Order
from benchmarks.testbed.marks import Change, Lane, Process, measure_change
from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import Record, read_events

__all__ = ["SETTLE_STEPS", "STEP_TIME_S", "FailedPlayError", "Plan", "Seen", "Stage"]

Result = TypeVar("Result")

STEP_TIME_S = 0.015
SETTLE_STEPS = 40
_HOSTS = 4
_RATE = "1gbit"
_START_LIMIT_S = 180.0


class FailedPlayError(RunError):
    """A play came to no figure.

    Attributes:
        short: for the table.
    """

    def __init__(self, short: str, detail: str = "") -> None:
        super().__init__(f"{short}:\n{detail}" if detail else short)
        self.short = short
        self.detail = detail


@dataclass(frozen=True)
class Seen:
    """One figure of one play.

    Attributes:
        case: which of the row's cases.
        value: in the case's unit.
    """

    case: str
    value: float


@dataclass(frozen=True)
class Plan:
    """What a play trains; see :class:`benchmarks.testbed.launchers.Order`.

    Attributes:
        slots: host → workers at the start.
        max_np: most workers of the job's life; None for those of the start.
        min_np: fewest.
        np: workers wanted, when fewer than slots.
        options: more options of ours; no other launcher gets them.
        script: more options of the training script.
        step_time_s: padding of a step [s].
        environment: more variables.
    """

    slots: Mapping[str, int]
    max_np: int | None = None
    min_np: int = 1
    np: int | None = None
    options: Sequence[str] = ()
    script: Sequence[str] = ()
    step_time_s: float = STEP_TIME_S
    environment: Mapping[str, str] | None = None


class Stage:
    """The virtual hosts, and jobs on them.

    Args:
        limit_s: how long a job may take to go on after an event [s].
        shares: folders that the hosts must see.
        hosts: how many there are.

    As a context manager it takes the hosts down at its end.
    """

    def __init__(self, limit_s: float, shares: Sequence[Path] = (), hosts: int = _HOSTS) -> None:
        self.limit_s = limit_s
        self._shares = shares
        self._hosts = hosts
        self._beds: dict[str | None, Testbed] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def bed(self, rate: str | None = None) -> Testbed:
        """The hosts whose links have that rate; made when first asked for."""
        if rate not in self._beds:
            bed = make_testbed(self._hosts, rate=rate, shares=self._shares)
            self._beds[rate] = self._stack.enter_context(bed)
        return self._beds[rate]

    @property
    def slow_bed(self) -> Testbed:
        """The hosts with links of 1 Gbit/s."""
        return self.bed(_RATE)

    @property
    def description(self) -> str:
        """What the hosts are, in words."""
        parts = [
            bed.description + (f" with links of {rate}" if rate else "")
            for rate, bed in self._beds.items()
        ]
        return " and ".join(parts) or "no hosts"

    @contextlib.contextmanager
    def training(self, bed: Testbed, launcher: Launcher, plan: Plan) -> Iterator[Job]:
        """A job in which every worker has made some steps."""
        workers = plan.np or sum(plan.slots.values())
        training = [
            *(str(launcher.workload), "--data", str(bed.data)),
            *("--step-time", str(plan.step_time_s), "--min-np", str(plan.min_np), *plan.script),
        ]
        order = Order(
            training=training,
            slots=plan.slots,
            min_np=plan.min_np,
            max_np=plan.max_np or workers,
            np=plan.np,
            options=plan.options if launcher is PEERS["ours"] else (),
            environment=plan.environment or {},
        )
        with bed.job(launcher, order) as job:
            self.wait(job, lambda: _all_train(job, workers), _START_LIMIT_S, "did not begin")
            yield job

    def wait(
        self,
        job: Job,
        look: Callable[[], Result | None],
        limit_s: float | None = None,
        never: str = "never",
    ) -> Result:
        """Look at a job until there is something to see.

        Args:
            job: its marks are read before each look.
            look: gives None (or nothing true) as long as there is nothing.
            limit_s: patience [s]; None for the stage's.
            never: what did not happen, for the table.

        Raises:
            FailedPlayError: the job ended, or the patience did.
        """
        limit_s = limit_s or self.limit_s
        deadline = time.monotonic() + limit_s
        while True:
            job.marks.poll()
            found = look()
            if found:
                return found
            if job.ended() is not None:
                raise FailedPlayError("the job died", job.output_tail())
            if time.monotonic() > deadline:
                raise FailedPlayError(f"{never} within {limit_s:.0f} s", job.output_tail())
            job.sleep()

    def change(
        self,
        job: Job,
        asked: float,
        size: int,
        victims: Collection[Lane] = (),
        settle_steps: int = SETTLE_STEPS,
    ) -> Change:
        """What a change cost, once the survivors have settled."""
        return self.wait(
            job,
            lambda: measure_change(job.marks.processes, asked, size, settle_steps, victims),
        )


def _all_train(job: Job, workers: int) -> bool:
    going = [
        process
        for process in job.marks.processes
        if len(process.steps) >= SETTLE_STEPS and process.steps[-1].size == workers
    ]
    return len(going) >= workers


def newest(job: Job, lane: Lane) -> Process:
    """The process that was born last in a place."""
    return next(p for p in reversed(job.marks.processes) if p.lane == lane)


def our_events(job: Job) -> list[Record]:
    """Events of a run of ours."""
    return read_events(job.events)


def driver(job: Job) -> DriverJob:
    """The job as one with a leader on this machine."""
    assert isinstance(job, DriverJob)
    return job
