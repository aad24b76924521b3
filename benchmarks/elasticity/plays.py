"""What happens to a job, row by row, and what is measured of it.

A play trains on virtual hosts, does one thing, and gives figures by case. It is the same for all
launchers; where one needs another set-up, the reason stands beside it.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.elasticity.stage import (
    SETTLE_STEPS,
    FailedPlayError,
    Plan,
    Seen,
    Stage,
    driver,
    newest,
    our_events,
)
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.launchers import ELASTIC, OURS, TORCHFT, TORCHRUN, Job, Launcher
from benchmarks.testbed.marks import (
    Lane,
    lanes,
    longest_gap,
    newcomer_step,
    step_times,
)
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.errors import RunError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import iter_events

__all__ = ["LARGE_MB", "SIZES", "Play"]

Play = Callable[[Stage, Launcher], Iterator[Seen]]

SIZES = (2, 4, 8, 16)
"""World sizes at which the growth of the stall is measured."""
LARGE_MB = 400.0
SMALL_MB = 1.0
_EMULATED_STEP_S = 0.05
_LINK_BYTES_PER_S = 1e9 / 8
_LEADERLESS_S = 2.0
_QUIET_S = 2.0
_AFTER_RESUME_S = 5.0
_COMMIT_BLOCKS = 8
_COMMIT_LIMIT_S = 240.0
_TINY = ("--model", "tiny")


def join(slow_start_s: float) -> Play:
    """A third host joins two; its worker sleeps that long before it trains."""
    return partial(_join, slow_start_s)


def _join(slow_start_s: float, stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    bed = stage.bed()
    first, second, third, _ = bed.hosts
    flag = bed.scratch / f"slow-{time.monotonic_ns()}"
    script = ("--slow-start", str(slow_start_s), "--newcomers-only", str(flag))
    plan = Plan({first: 1, second: 1}, max_np=3, script=script)
    with stage.training(bed, launcher, plan) as job:
        flag.touch()
        asked = job.use({first: 1, second: 1, third: 1})
        change = stage.change(job, asked, 3)
    yield Seen("stall", change.pause_s)


def remove(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """One of three hosts is taken away on request."""
    bed = stage.bed()
    first, second, third, _ = bed.hosts
    plan = Plan({first: 1, second: 1, third: 1})
    with stage.training(bed, launcher, plan) as job:
        asked = job.use({first: 1, second: 1})
        change = stage.change(job, asked, 2, [(third, 0)])
    yield Seen("stall", change.pause_s)


def kill_beside(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """``kill -9`` of one of two workers of the only host."""
    bed = stage.bed()
    host = bed.hosts[0]
    with stage.training(bed, launcher, Plan({host: 2})) as job:
        lane = (host, 1)
        asked = bed.kill(host, newest(job, lane).pid)
        change = stage.change(job, asked, 1, [lane])
    yield Seen("stall", change.pause_s)


def kill_with_spare(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """``kill -9`` of a worker while another one is warm, where the launcher can have one."""
    bed = stage.bed()
    first, second, third, _ = bed.hosts
    slots = {first: 1, second: 1, third: 1}
    if launcher in (TORCHRUN, TORCHFT):
        del slots[third]  # they know no workers beyond those that train, and restart the dead
    plan = Plan(slots, np=2, max_np=2, options=("--spares", "1"))
    with stage.training(bed, launcher, plan) as job:
        if launcher is OURS:
            stage.wait(job, lambda: _count(job, "worker_standby") >= 3, never="no spare was warm")
        lane = (second, 0)
        asked = bed.kill(second, newest(job, lane).pid)
        full = stage.wait(job, lambda: newcomer_step(job.marks.processes, asked, 2))
    yield Seen("full size again", full - asked)


def crash(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """Everything on a host dies at once; the kernel closes its connections."""
    yield from _lose_host(stage, launcher, lambda bed, host, _: bed.cluster.crash(host))


def cut(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """A cable is pulled: connections stay open and nothing comes through them."""
    yield from _lose_host(stage, launcher, lambda bed, host, _: bed.cluster.cut(host))


def freeze(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """A worker is stopped with SIGSTOP; its host and its agent go on."""

    def stop(bed: Testbed, host: str, pid: int) -> None:
        bed.kill(host, pid, signal.SIGSTOP)

    yield from _lose_host(stage, launcher, stop)


def _lose_host(
    stage: Stage, launcher: Launcher, do: Callable[[Testbed, str, int], None]
) -> Iterator[Seen]:
    bed = stage.bed()
    first, second, third, _ = bed.hosts
    plan = Plan({first: 1, second: 1, third: 1})
    with stage.training(bed, launcher, plan) as job:
        pid = newest(job, (third, 0)).pid
        asked = time.monotonic()
        do(bed, third, pid)
        change = stage.change(job, asked, 2, [(third, 0)])
    yield Seen("stall", change.pause_s)


def below_minimum(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """One of two hosts leaves, fewer are left than the minimum, and another host comes."""
    bed = stage.bed()
    first, second, third, _ = bed.hosts
    plan = Plan({first: 1, second: 1}, min_np=2, max_np=2)
    with stage.training(bed, launcher, plan) as job:
        job.use({first: 1})
        stage.wait(job, lambda: _quiet(job), never="went on below the minimum")
        asked = job.use({first: 1, third: 1})
        after = stage.wait(job, lambda: newcomer_step(job.marks.processes, asked, 2))
        job.marks.poll()
        # The first step of all after the newcomer was ready, which no worker can make alone.
        ready = _ready(job, launcher, third)
        steps = [s.mono for p in job.marks.processes for s in p.steps if s.mono > ready]
    yield Seen("ready to next step", min([after, *steps]) - ready)


def _quiet(job: Job) -> bool:
    newest_step = max(p.steps[-1].mono for p in job.marks.processes if p.steps)
    return time.monotonic() - newest_step > _QUIET_S


def _ready(job: Job, launcher: Launcher, host: str) -> float:
    if launcher is OURS:
        return max(
            event["mono"]
            for event in our_events(job)
            if event["kind"] == "worker_standby" and event["host"] == host
        )
    process = newest(job, (host, 0))
    assert process.ready is not None  # it has made a step
    return process.ready


def large_state(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """A host joins over a link of 1 Gbit/s and needs 400 MB of state."""
    bed = stage.slow_bed
    first, second, third, _ = bed.hosts
    try:
        floor = time_raw_tcp(bed.cluster, [first, third], round(LARGE_MB * 1e6))
    except RunError as error:
        raise FailedPlayError("the raw transfer failed", str(error)) from error
    plan = Plan({first: 1, second: 1}, max_np=3, script=("--frozen-mb", str(LARGE_MB)))
    with stage.training(bed, launcher, plan) as job:
        asked = job.use({first: 1, second: 1, third: 1})
        change = stage.change(job, asked, 3)
    yield Seen("stall", change.pause_s)
    yield Seen("raw TCP, same bytes", floor)
    yield Seen("stall / raw TCP", change.pause_s / floor)
    yield Seen("stall / wire time", change.pause_s / (LARGE_MB * 1e6 / _LINK_BYTES_PER_S))


def lose_leader(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """The leader is killed, stays away for 2 s, and another one takes the run over."""
    bed = stage.bed()
    first, second, *_ = bed.hosts
    with stage.training(bed, launcher, Plan({first: 1, second: 1}, options=("--audit",))) as job:
        asked = driver(job).kill_leader()
        time.sleep(_LEADERLESS_S)
        driver(job).resume()
        resumed = stage.wait(job, lambda: _resumed_at(job, asked), never="no new leader")
        settled_from = resumed + _AFTER_RESUME_S
        stage.wait(job, lambda: _all_stepped_since(job, settled_from), never="did not go on")
        audit = check_audit(iter_events(job.events.with_name("audit.jsonl")))
        if not audit.ok:
            raise FailedPlayError("examples were not used exactly once", audit.sentence())
        places = lanes(job.marks.processes).values()
        gaps = [
            longest_gap([s.mono for p in place for s in p.steps if s.mono > asked - 1.0])
            for place in places
        ]
        restarted = [place for place in places if place[-1].born > asked]
    yield Seen("steps lost", float(audit.voided_steps))
    yield Seen("workers restarted", float(len(restarted)))
    yield Seen("stall", max(gaps))


def _resumed_at(job: Job, asked: float) -> float | None:
    return next(
        (e["mono"] for e in our_events(job) if e["kind"] == "run_started" and e["mono"] > asked),
        None,
    )


def _all_stepped_since(job: Job, mono: float) -> bool:
    return all(
        sum(step.mono > mono for process in place for step in process.steps) >= SETTLE_STEPS
        for place in lanes(job.marks.processes).values()
    )


def commit_cost(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """Steps with and without a commit take turns in one job."""
    bed = stage.bed()
    first, second, *_ = bed.hosts
    for megabytes in (SMALL_MB, LARGE_MB):
        script = ("--commit-blocks", "--frozen-mb", str(megabytes))
        plan = Plan({first: 1, second: 1}, script=script, step_time_s=0.0)
        with stage.training(bed, launcher, plan) as job:
            stage.wait(job, lambda: _blocks(job) > _COMMIT_BLOCKS, _COMMIT_LIMIT_S)
            process = job.marks.processes[0]
            taken = {
                note: statistics.median(step_times(process, note))
                for note in ("commit", "no commit")
            }
        name = f"{megabytes:.0f} MB model"
        yield Seen(f"{name}: step without", taken["no commit"])
        yield Seen(f"{name}: step with", taken["commit"])
        yield Seen(f"{name}: with / without", taken["commit"] / taken["no commit"])


def _blocks(job: Job) -> int:
    return min((len(process.notes) for process in job.marks.processes), default=0)


def _count(job: Job, kind: str) -> int:
    return sum(event["kind"] == kind for event in our_events(job))


def sixteen(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """The sixteenth worker joins fifteen, on four hosts."""
    yield from _grow(stage, launcher, 16, kill=False)


def growth(stage: Stage, launcher: Launcher) -> Iterator[Seen]:
    """Join and kill at several world sizes."""
    for size in SIZES:
        yield from _grow(stage, launcher, size, kill=True)


def _grow(stage: Stage, launcher: Launcher, size: int, *, kill: bool) -> Iterator[Seen]:
    """The last of ``size`` workers joins the others, and is killed again if asked for."""
    bed = stage.bed()
    after = spread(size, bed.hosts)
    before = {**after, list(after)[-1]: list(after.values())[-1] - 1}
    before = {host: count for host, count in before.items() if count}
    last = list(after)[-1]
    plan = Plan(before, max_np=size, script=_TINY, step_time_s=_EMULATED_STEP_S)
    with stage.training(bed, launcher, plan) as job:
        asked = job.use(after)
        yield Seen(f"join {size}", stage.change(job, asked, size).pause_s)
        if kill:
            lane = (last, after[last] - 1)
            victims: list[Lane] = [lane]
            if launcher is ELASTIC:  # it gives up the whole host
                victims = [(last, slot) for slot in range(after[last])]
            asked = bed.kill(last, newest(job, lane).pid)
            # Who was killed is back before so many long steps are made.
            few = SETTLE_STEPS // 4
            change = stage.change(job, asked, size - len(victims), victims, few)
            yield Seen(f"kill {size}", change.pause_s)


def spread(workers: int, hosts: list[str]) -> dict[str, int]:
    """Workers over hosts, as evenly as it goes, the first hosts first.

    >>> spread(6, ["a", "b", "c", "d"])
    {'a': 2, 'b': 2, 'c': 1, 'd': 1}
    """
    each, more = divmod(workers, len(hosts))
    slots = {host: each + (number < more) for number, host in enumerate(hosts)}
    return {host: count for host, count in slots.items() if count}
