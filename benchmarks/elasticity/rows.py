"""Rows of the table: event, figures, targets, and launchers that cannot be measured.

A play trains on virtual hosts, causes one event, and yields figures by case. It is the same for all
launchers; if one needs a different set-up, a comment there gives the reason.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.elasticity.stage import SETTLE_STEPS, Stage
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.launchers import (
    ELASTIC,
    TORCHFT,
    TORCHRUN,
    DriverJob,
    FailedPlayError,
    Job,
    Launcher,
    Order,
)
from benchmarks.testbed.marks import Lane, lanes, longest_gap, newcomer_step, step_times
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.agent.template.process import TITLE
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.programs.processes import read
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import iter_records

Figures = Iterator[tuple[str, float]]
"""Pairs of case and value."""
Play = Callable[[Stage, Launcher], Figures]
Act = Callable[[Job], float]
"""Function that causes an event in a job and returns when [s, monotonic]."""

SIZES = (2, 4, 8, 16)
"""World sizes at which the growth of the stall is measured."""
_LARGE_MB = 400.0
_SMALL_MB = 1.0
_EMULATED_STEP_S = 0.05
_LINK_BYTES_PER_S = 1e9 / 8
_LEADERLESS_S = 2.0
_QUIET_S = 2.0
_AFTER_RESUME_S = 5.0
_COMMIT_BLOCKS = 8
_COMMIT_LIMIT_S = 240.0


@dataclass(frozen=True)
class Case:
    """One figure of a row.

    Attributes:
        name: name that the play yields.
        unit: ``s``, ``x`` (a ratio) or ``""`` (a count).
        target: upper bound for our figure; None: no bound.
    """

    name: str
    unit: str = "s"
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        number: number for ``--rows``.
        title: description of the event.
        play: causes the event and measures.
        cases: figures that the play yields, in order.
        without: launcher's key → why it is not measured in this row.
    """

    number: int
    title: str
    play: Play
    cases: Sequence[Case]
    without: Mapping[str, str] = field(default_factory=dict)


# -- events ------------------------------------------------------------------------------------


def use(*counts: int) -> Act:
    """Return an act that sets the number of workers on each of the first hosts."""
    return lambda job: job.use(job.bed.slots(*counts))


def kill(number: int, slot: int = 0, signal_number: int = signal.SIGKILL) -> Act:
    """Return an act that sends a signal to the worker in a slot of a host, counted from 0."""

    def act(job: Job) -> float:
        host = job.bed.hosts[number]
        return job.bed.kill(host, job.newest((host, slot)).pid, signal_number)

    return act


def crash(job: Job) -> float:
    """Kill everything on the third host at once; the kernel closes its connections."""
    asked = time.monotonic()
    job.bed.cluster.crash(job.bed.hosts[2])
    return asked


def cut(job: Job) -> float:
    """Cut the third host's link: connections stay open, but no data arrives."""
    asked = time.monotonic()
    job.bed.cluster.cut(job.bed.hosts[2])
    return asked


# -- plays -------------------------------------------------------------------------------------


def stall(
    before: Sequence[int], act: Act, size: int, victim: tuple[int, int] | None = None
) -> Play:
    """Return a play that measures the survivors' stall at one event.

    Args:
        before: number of workers on each host.
        act: causes the event.
        size: number of workers afterwards.
        victim: host and slot, counted from 0, of the worker that does not survive.
    """

    def play(stage: Stage, launcher: Launcher) -> Figures:
        bed = stage.bed()
        order = Order(bed.slots(*before), max_np=max(size, sum(before)))
        victims = [] if victim is None else [(bed.hosts[victim[0]], victim[1])]
        with stage.training(bed, launcher, order) as job:
            yield "stall", stage.pause_s(job, act(job), size, victims)

    return play


def join(slow_start_s: float) -> Play:
    """Return a play in which a third host joins, whose worker first sleeps ``slow_start_s``."""

    def play(stage: Stage, launcher: Launcher) -> Figures:
        bed = stage.bed()
        flag = bed.scratch / f"slow-{time.monotonic_ns()}"
        script = ("--slow-start", str(slow_start_s), "--newcomers-only", str(flag))
        with stage.training(bed, launcher, Order(bed.slots(1, 1), script, max_np=3)) as job:
            flag.touch()
            yield "stall", stage.pause_s(job, use(1, 1, 1)(job), 3)

    return play


def kill_with_spare(stage: Stage, launcher: Launcher) -> Figures:
    """Kill a worker while a spare is ready, for launchers that have spares."""
    bed = stage.bed()
    # torchrun and torchft have no spare workers; they restart the dead one.
    slots = bed.slots(1, 1) if launcher in (TORCHRUN, TORCHFT) else bed.slots(1, 1, 1)
    order = Order(slots, np=2, max_np=2, options=("--spares", "1"))
    with stage.training(bed, launcher, order) as job:
        if launcher.is_ours:
            warm = partial(job.events, "worker_standby")
            job.wait(lambda: len(warm()) >= 3, stage.limit_s, "no spare was warm")
        asked = kill(1)(job)
        full = job.wait(lambda: newcomer_step(job.marks.processes, asked, 2), stage.limit_s)
    yield "full size again", full - asked


def kill_without_spare(stage: Stage, launcher: Launcher) -> Figures:
    """Kill a worker that has to be started again, once the hosts have their templates."""
    bed = stage.bed()
    with stage.training(bed, launcher, Order(bed.slots(1, 1), max_np=2)) as job:
        if launcher.is_ours:
            job.wait(lambda: _templates(bed) == 2, stage.limit_s, "no template was ready")
        asked = kill(1)(job)
        full = job.wait(lambda: newcomer_step(job.marks.processes, asked, 2), stage.limit_s)
        yield "full size again", full - asked
        newcomer = max(job.marks.processes, key=lambda process: process.born)
        if newcomer.ready is not None:
            yield "of that the script before run", newcomer.ready - newcomer.born


def new_host(stage: Stage, launcher: Launcher) -> Figures:
    """Add a host; time its worker until it calls ``run``, and plain Python there before that."""
    bed = stage.bed()
    host = bed.hosts[2]
    with stage.training(bed, launcher, Order(bed.slots(1, 1), max_np=3)) as job:
        plain_s = job.time_plain(launcher, host, stage.limit_s)
        asked = use(1, 1, 1)(job)
        job.wait(lambda: newcomer_step(job.marks.processes, asked, 3), stage.limit_s)
        ready = job.newest((host, 0)).ready
    assert ready is not None  # since it has finished a step
    yield "until its worker calls run", ready - asked
    yield "plain Python until there", plain_s
    yield "beyond plain Python", ready - asked - plain_s


def _templates(bed: Testbed) -> int:
    """Return the number of templates on all hosts that can be forked."""
    pids = [pid for host in bed.hosts for pid in bed.cluster.pids(host)]
    return sum(read(pid, "comm").strip().decode() == TITLE for pid in pids)


def below_minimum(stage: Stage, launcher: Launcher) -> Figures:
    """Remove one of two hosts, which is below the minimum, then add another host."""
    bed = stage.bed()
    with stage.training(bed, launcher, Order(bed.slots(1, 1), min_np=2, max_np=2)) as job:
        use(1)(job)
        job.wait(lambda: _quiet(job), stage.limit_s, "went on below the minimum")
        asked = use(1, 0, 1)(job)
        after = job.wait(lambda: newcomer_step(job.marks.processes, asked, 2), stage.limit_s)
        job.marks.poll()
        # The first step of any worker after the newcomer was ready: below the minimum none trains.
        ready = _ready(job, launcher, bed.hosts[2])
        steps = [s.mono for p in job.marks.processes for s in p.steps if s.mono > ready]
    yield "ready to next step", min([after, *steps]) - ready


def _quiet(job: Job) -> bool:
    newest_step = max(p.steps[-1].mono for p in job.marks.processes if p.steps)
    return time.monotonic() - newest_step > _QUIET_S


def _ready(job: Job, launcher: Launcher, host: str) -> float:
    if launcher.is_ours:
        return max(e["mono"] for e in job.events("worker_standby") if e["host"] == host)
    process = job.newest((host, 0))
    assert process.ready is not None  # since it has finished a step
    return process.ready


def large_state(stage: Stage, launcher: Launcher) -> Figures:
    """Add a host that needs 400 MB of state over a link of 1 Gbit/s."""
    bed = stage.slow_bed
    first, _, third, _ = bed.hosts
    try:
        floor = time_raw_tcp(bed.cluster, [first, third], round(_LARGE_MB * 1e6))
    except RunError as error:
        raise FailedPlayError("the raw transfer failed", str(error)) from error
    order = Order(bed.slots(1, 1), ("--frozen-mb", str(_LARGE_MB)), max_np=3)
    with stage.training(bed, launcher, order) as job:
        pause_s = stage.pause_s(job, use(1, 1, 1)(job), 3)
    yield "stall", pause_s
    yield "raw TCP, same bytes", floor
    yield "stall / raw TCP", pause_s / floor
    yield "stall / wire time", pause_s / (_LARGE_MB * 1e6 / _LINK_BYTES_PER_S)


def lose_leader(stage: Stage, launcher: Launcher) -> Figures:
    """Kill the leader, and have another one take the run over 2 s later."""
    bed = stage.bed()
    with stage.training(bed, launcher, Order(bed.slots(1, 1), options=("--audit",))) as job:
        assert isinstance(job, DriverJob)
        asked = job.kill_leader()
        time.sleep(_LEADERLESS_S)
        job.resume()
        resumed = job.wait(lambda: _resumed_at(job, asked), stage.limit_s, "no new leader")
        since = resumed + _AFTER_RESUME_S
        job.wait(lambda: _all_stepped_since(job, since), stage.limit_s, "did not go on")
        audit = check_audit(iter_records(job.events_path.with_name("audit.jsonl")))
        if not audit.ok:
            raise FailedPlayError("examples were not used exactly once", audit.sentence())
        places = lanes(job.marks.processes).values()
        gaps = [
            longest_gap([s.mono for p in place for s in p.steps if s.mono > asked - 1.0])
            for place in places
        ]
        restarted = sum(place[-1].born > asked for place in places)
    yield "steps lost", float(audit.voided_steps)
    yield "workers restarted", float(restarted)
    yield "stall", max(gaps)


def _resumed_at(job: Job, asked: float) -> float | None:
    return next((e["mono"] for e in job.events("run_started") if e["mono"] > asked), None)


def _all_stepped_since(job: Job, mono: float) -> bool:
    return all(
        sum(step.mono > mono for process in place for step in process.steps) >= SETTLE_STEPS
        for place in lanes(job.marks.processes).values()
    )


def commit_cost(stage: Stage, launcher: Launcher) -> Figures:
    """Compare steps with and without a commit, which alternate in one job."""
    bed = stage.bed()
    for megabytes in (_SMALL_MB, _LARGE_MB):
        order = Order(bed.slots(1, 1), ("--commit-blocks", "--frozen-mb", str(megabytes)))
        with stage.training(bed, launcher, order, step_time_s=0.0) as job:
            job.wait(lambda: _blocks(job) > _COMMIT_BLOCKS, _COMMIT_LIMIT_S)
            process = job.marks.processes[0]
            with_s, without_s = (
                statistics.median(step_times(process, note)) for note in ("commit", "no commit")
            )
        name = f"{megabytes:.0f} MB model"
        yield f"{name}: step without", without_s
        yield f"{name}: step with", with_s
        yield f"{name}: with / without", with_s / without_s


def _blocks(job: Job) -> int:
    return min((len(process.notes) for process in job.marks.processes), default=0)


def growth(stage: Stage, launcher: Launcher) -> Figures:
    """Measure joins and kills at several world sizes."""
    for size in SIZES:
        yield from grow(size, stage, launcher, kill_too=True)


def grow(size: int, stage: Stage, launcher: Launcher, *, kill_too: bool = False) -> Figures:
    """Have the last of ``size`` workers join the others; with ``kill_too`` kill it again."""
    bed = stage.bed()
    after = spread(size, bed.hosts)
    last = list(after)[-1]
    before = {host: count - (host == last) for host, count in after.items()}
    order = Order(
        {host: count for host, count in before.items() if count},
        ("--model", "tiny"),
        max_np=size,
    )
    with stage.training(bed, launcher, order, step_time_s=_EMULATED_STEP_S) as job:
        yield f"join {size}", stage.pause_s(job, job.use(after), size)
        if kill_too:
            lane = (last, after[last] - 1)
            victims: list[Lane] = [lane]
            if launcher is ELASTIC:  # Horovod gives up the whole host
                victims = [(last, slot) for slot in range(after[last])]
            asked = bed.kill(last, job.newest(lane).pid)
            # Steps are long here: with more of them the killed worker would be back before the end.
            few = SETTLE_STEPS // 4
            yield f"kill {size}", stage.pause_s(job, asked, size - len(victims), victims, few)


def spread(workers: int, hosts: Sequence[str]) -> dict[str, int]:
    """Distribute workers over hosts as evenly as possible; the first hosts get more.

    >>> spread(6, ["a", "b", "c", "d"])
    {'a': 2, 'b': 2, 'c': 1, 'd': 1}
    """
    each, more = divmod(workers, len(hosts))
    slots = {host: each + (number < more) for number, host in enumerate(hosts)}
    return {host: count for host, count in slots.items() if count}


# -- the table ---------------------------------------------------------------------------------


def _stall(target: float) -> list[Case]:
    return [Case("stall", target=target)]


_STATE_CASES = [
    *(Case("stall"), Case("raw TCP, same bytes")),
    *(Case("stall / raw TCP", "x", 1.3), Case("stall / wire time", "x", 1.3)),
]
_COMMIT_CASES = [
    Case(f"{size} MB model: {name}", unit, target)
    for size in (1, 400)
    for name, unit, target in (
        *(("step without", "s", None), ("step with", "s", None)),
        ("with / without", "x", 1.02),
    )
]
_GROWTH_CASES = [Case(f"{what} {size}") for size in SIZES for what in ("join", "kill")]
_WITH_PYTORCH = {"keras": "is measured with PyTorch"}
_NO_STATE = {**_WITH_PYTORCH, "torchrun": "has no live state: workers start again from a file"}
_NO_LEADER = {
    "horovod": "has no way to take a run over",
    "torchrun": "has no leader",
    "torchft": "has no leader; its lighthouse keeps no state",
}
_NO_COMMIT = {**_WITH_PYTORCH, **dict.fromkeys(("torchrun", "torchft"), "has no commit")}
_ROW_13 = {
    "torchrun": "starts all workers again: row 13 tells",
    "torchft": "meets through its lighthouse at every step: row 13 tells",
}
_LEADER_CASES = [*(Case(name, "", 0.0) for name in ("steps lost", "workers restarted"))]
_LEADER_CASES += _stall(0.25)
_KILL = "kill -9 of a worker beside another on its host (2 → 1)"
_SPARE = "kill -9 with a warm spare (ours: --spares 1)"
_NO_SPARE = "kill -9 without a spare (ours: with a template on each host)"
_REFILL_CASES = [Case("full size again", target=1.0), Case("of that the script before run")]
_NEW_HOST = "a host is added: its start beside that of plain Python on it"
_NEW_HOST_CASES = [Case("until its worker calls run"), Case("plain Python until there")]
_NEW_HOST_CASES += [Case("beyond plain Python", target=0.7)]
_OWN_PLAIN = dict.fromkeys(("horovod", "torchrun", "torchft"), "is not compared with plain Python")
_BELOW = "fewer than the minimum are left, then a host joins"
_SIXTEEN = "16 ranks on 4 hosts, the last one joins (15 → 16), 50 ms steps"
_GROWTH = "world sizes 2 to 16, join (to n) and kill -9 (of n), 50 ms steps"
_THREE = (1, 1, 1)
_FROZEN = kill(2, signal_number=signal.SIGSTOP)

ROWS = (
    Row(1, "a host is added (2 → 3), its worker needs 1 s to start", join(1.0), _stall(0.2)),
    Row(2, "the same, its worker needs 20 s to start", join(20.0), _stall(0.2)),
    Row(
        3, "a host is removed on request (3 → 2)", stall(_THREE, use(1, 1), 2, (2, 0)), _stall(0.1)
    ),
    Row(4, _KILL, stall((2,), kill(0, 1), 1, (0, 1)), _stall(0.25)),
    Row(5, _SPARE, kill_with_spare, [Case("full size again", target=0.4)]),
    Row(
        6, "a host crashes, connections close (3 → 2)", stall(_THREE, crash, 2, (2, 0)), _stall(0.4)
    ),
    Row(7, "a cable is pulled (3 → 2)", stall(_THREE, cut, 2, (2, 0)), _stall(6.0)),
    Row(
        8,
        "a worker is stopped with SIGSTOP (3 → 2)",
        stall(_THREE, _FROZEN, 2, (2, 0)),
        _stall(6.0),
    ),
    Row(9, _BELOW, below_minimum, [Case("ready to next step", target=1.0)]),
    Row(10, "a host is added, 400 MB of state over 1 Gbit/s", large_state, _STATE_CASES, _NO_STATE),
    Row(
        11, "the leader is killed, run --resume takes over", lose_leader, _LEADER_CASES, _NO_LEADER
    ),
    Row(12, "a commit at every step, against none", commit_cost, _COMMIT_CASES, _NO_COMMIT),
    Row(13, _SIXTEEN, partial(grow, 16), [Case("join 16", target=1.0)]),
    Row(14, _GROWTH, growth, _GROWTH_CASES, _ROW_13),
    Row(15, _NO_SPARE, kill_without_spare, _REFILL_CASES),
    Row(16, _NEW_HOST, new_host, _NEW_HOST_CASES, _OWN_PLAIN),
)


def parse_rows(text: str) -> list[Row]:
    """Return the rows that ``--rows`` names, by number.

    >>> [row.number for row in parse_rows("4,1-2")]
    [1, 2, 4]

    Raises:
        UsageError: a number is not that of a row.
    """
    wanted: set[int] = set()
    known = {row.number for row in ROWS}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            numbers = set(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            numbers = set()
        if not numbers or not numbers <= known:
            raise UsageError(
                f"--rows {text}: {part.strip()!r} is no row. Valid: numbers from 1 to {len(ROWS)} "
                "and ranges, as in 1,3,6-8"
            )
        wanted |= numbers
    return [row for row in ROWS if row.number in wanted]
