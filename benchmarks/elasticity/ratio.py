"""Measures the effective training time while workers are killed at short intervals."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.elasticity.stage import Stage
from benchmarks.testbed.launchers import Job, Launcher, Order
from benchmarks.testbed.marks import Process
from hvd_elastic.errors import VirtualClusterError

KILL_EVERY_S = 10.0
_STALL_STEPS = 2.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class TrainingRatio:
    """Result of one long run.

    Attributes:
        launcher: key of the launcher.
        wall_s: time from the first kill on, even if the job did not live to its end [s].
        ratio: fraction of the wall time in which steps ran at their undisturbed pace.
        capacity: the same, with each step weighted by the fraction of workers that took part.
        kills: number of workers killed.
        step_s: duration of an undisturbed step [s].
        died_s: time after which the job ended by itself [s]; None: it did not.
    """

    launcher: str
    wall_s: float
    ratio: float
    capacity: float
    kills: int
    step_s: float
    died_s: float | None

    def sentence(self, names: Mapping[str, str]) -> str:
        """Return the result as a sentence for below the tables."""
        died = "" if self.died_s is None else f"; the job died after {self.died_s:.0f} s"
        return (
            f"Effective training time of {names[self.launcher]}: {self.ratio:.3f} of "
            f"{self.wall_s:.0f} s with {self.kills} kills, one every {KILL_EVERY_S:.0f} s; "
            f"{self.capacity:.3f} counting the workers that were away{died}"
        )


def effective_time(
    steps: Sequence[tuple[float, int]], begin: float, end: float, step_s: float, workers: int
) -> tuple[float, float]:
    """Return the fraction of an interval in which training made progress.

    Of a gap between two steps that is longer than two undisturbed steps, the time of one
    undisturbed step counts as useful.

    Args:
        steps: (time [s], number of ranks) of all finished steps of all workers, in any order.
        begin, end: the interval [s].
        step_s: duration of an undisturbed step [s].
        workers: number of ranks of the whole job.

    Returns:
        The fraction, and the fraction with each step weighted by its part of the workers.

    >>> effective_time([(1.0, 2), (2.0, 2), (5.0, 1)], 0.0, 5.0, 1.0, 2)
    (0.6, 0.5)
    """
    inside = sorted(step for step in steps if begin < step[0] <= end)
    useful = weighted = 0.0
    for (earlier, _), (later, ranks) in pairwise([(begin, 0), *inside]):
        gap = later - earlier
        part = gap if gap <= _STALL_STEPS * step_s else step_s
        useful += part
        weighted += part * min(1.0, ranks / workers)
    wall = end - begin
    return round(useful / wall, 6), round(weighted / wall, 6)


def measure_ratio(
    stage: Stage, launcher: Launcher, wall_s: float, seed: int, say: Callable[[str], None]
) -> TrainingRatio:
    """Train on all hosts, and kill a random worker every 10 s.

    Args:
        stage: virtual hosts.
        launcher: launcher of the job.
        wall_s: duration [s].
        seed: seed of the choice of victims, so that all launchers lose workers on the same hosts.
        say: called with a message for each kill.
    """
    bed = stage.bed()
    rng = random.Random(seed)
    slots = dict.fromkeys(bed.hosts, 1)
    with stage.training(bed, launcher, Order(slots)) as job:
        step_s = _undisturbed(job.marks.processes, len(slots))
        begin = time.monotonic()
        kills = 0
        due = begin
        while (now := time.monotonic()) < begin + wall_s and job.ended() is None:
            if now >= due:
                due += KILL_EVERY_S
                victim = _kill_one(job, rng.sample(bed.hosts, len(bed.hosts)))
                kills += victim is not None
                say(f"{launcher.name}: {now - begin:.0f} s: killed the worker of {victim}")
            time.sleep(_LOOK_S)
            job.marks.poll()
        died = time.monotonic() - begin if job.ended() is not None else None
        steps = [(s.mono, s.size) for p in job.marks.processes for s in p.steps]
    ratio, capacity = effective_time(steps, begin, begin + wall_s, step_s, len(slots))
    return TrainingRatio(launcher.key, wall_s, ratio, capacity, kills, round(step_s, 5), died)


def _undisturbed(processes: Iterable[Process], workers: int) -> float:
    times = [
        later.mono - earlier.mono
        for process in processes
        for earlier, later in pairwise(process.steps)
        if earlier.size == later.size == workers
    ]
    return statistics.median(times)


def _kill_one(job: Job, order: Sequence[str]) -> str | None:
    """Kill the first living worker in this order of hosts; return its host, or None."""
    for host in order:
        # A worker that was killed and has not been replaced yet is skipped.
        with contextlib.suppress(VirtualClusterError, StopIteration):
            job.bed.kill(host, job.newest((host, 0)).pid)
            return host
    return None
