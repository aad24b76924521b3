"""The virtual hosts of the elasticity benchmark, and jobs of its workload on them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import Self

from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import OURS, Job, Launcher, Order
from benchmarks.testbed.marks import Lane, measure_change

STEP_TIME_S = 0.015
SETTLE_STEPS = 40
_HOSTS = 4
_RATE = "1gbit"
_START_LIMIT_S = 180.0


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
    def training(
        self, bed: Testbed, launcher: Launcher, order: Order, *, step_time_s: float = STEP_TIME_S
    ) -> Iterator[Job]:
        """Train the launcher's workload; yields the job once every worker has made some steps.

        Args:
            bed: the hosts.
            launcher: who leads.
            order: the job; its ``training`` are further options of the workload.
            step_time_s: padding of a step [s].
        """
        training = [
            *(str(launcher.workload), "--data", str(bed.data), "--step-time", str(step_time_s)),
            *("--min-np", str(order.min_np), *order.training),
        ]
        options = order.options if launcher is OURS else ()
        with bed.job(launcher, replace(order, training=training, options=options)) as job:
            job.wait(lambda: _all_train(job, order.workers), _START_LIMIT_S, "did not begin")
            yield job

    def pause_s(
        self,
        job: Job,
        asked: float,
        size: int,
        victims: Collection[Lane] = (),
        settle_steps: int = SETTLE_STEPS,
    ) -> float:
        """What a change cost, once the survivors have settled [s]."""
        return job.wait(
            lambda: measure_change(job.marks.processes, asked, size, settle_steps, victims),
            self.limit_s,
        ).pause_s


def _all_train(job: Job, workers: int) -> bool:
    going = [
        process
        for process in job.marks.processes
        if len(process.steps) >= SETTLE_STEPS and process.steps[-1].size == workers
    ]
    return len(going) >= workers
