"""The virtual hosts of the elasticity benchmark, and jobs of its workload on them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import Self

from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import Job, Launcher, Order
from benchmarks.testbed.marks import Lane, measure_change

STEP_TIME_S = 0.015
SETTLE_STEPS = 40
_HOSTS = 4
_RATE = "1gbit"
_START_LIMIT_S = 180.0


class Stage:
    """The virtual hosts, and jobs on them; a context manager that takes the hosts down.

    Args:
        limit_s: longest time until a job trains on after an event [s].
        shares: folders that the hosts must see.
        hosts: number of hosts.
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
        """Return the hosts whose links have a rate; created at the first call."""
        if rate not in self._beds:
            bed = make_testbed(self._hosts, rate=rate, shares=self._shares)
            self._beds[rate] = self._stack.enter_context(bed)
        return self._beds[rate]

    @property
    def slow_bed(self) -> Testbed:
        """Hosts with links of 1 Gbit/s."""
        return self.bed(_RATE)

    @property
    def description(self) -> str:
        """Description of the hosts, for the conditions."""
        parts = [
            bed.description + (f" with links of {rate}" if rate else "")
            for rate, bed in self._beds.items()
        ]
        return " and ".join(parts) or "no hosts"

    @contextlib.contextmanager
    def training(
        self, bed: Testbed, launcher: Launcher, order: Order, *, step_time_s: float = STEP_TIME_S
    ) -> Iterator[Job]:
        """Train the launcher's workload; yield the job once every worker has taken some steps.

        Args:
            bed: virtual hosts.
            launcher: launcher of the job.
            order: description of the job; its ``training`` are further options of the workload.
            step_time_s: sleep added to each step [s].
        """
        training = [
            *(str(launcher.workload), "--data", str(bed.data), "--step-time", str(step_time_s)),
            *("--min-np", str(order.min_np), *order.training),
        ]
        options = order.options if launcher.is_ours else ()
        with launcher.job(bed, replace(order, training=training, options=options)) as job:
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
        """Wait until the survivors of a change have settled, and return their pause [s]."""
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
