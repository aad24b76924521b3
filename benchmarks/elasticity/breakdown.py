"""Measures the parts of our own stall: rows 1, 3 and 4 again, with a traced worker.

Tracing (:mod:`benchmarks.testbed.tracing`) and Horovod's debug log take some time themselves, so
the stalls here differ from those of the table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table

from benchmarks.elasticity.rows import Act, kill, use
from benchmarks.elasticity.stage import Stage
from benchmarks.testbed.figures import Figure, figure, table
from benchmarks.testbed.launchers import OURS, FailedPlayError, Order
from benchmarks.testbed.marks import Process, Span
from benchmarks.testbed.tracing import SPANS

_CONTEXTS = {
    "Global Gloo context initialized.": "Gloo context 1: global",
    "Local Gloo context initialized.": "Gloo context 2: local",
    "Cross-node Gloo context initialized.": "Gloo context 3: cross",
    "Global Gloo context initialized for": "Gloo context 4: process set, global",
    "Local Gloo context initialized for": "Gloo context 5: process set, local",
    "Cross-node Gloo context for": "Gloo context 6: process set, cross",
}
"""Horovod's log message for each Gloo context that it has created, in order, and its name here."""
_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.([ \d]{6}): .*?\] (.*)")

NOTICE = "until the worker acts: rest of its step, notice, agreement"
ANNOUNCED = "not standing still: announced, until the last step before the pause ended"
BETWEEN = "between these"
FIRST = "next batch and first step"


@dataclass(frozen=True)
class Breakdown:
    """The stall of one event, divided into phases.

    Attributes:
        event: description of the event.
        phases: name → duration, in order; they add up to the stall, except for the first phase,
            during which training continues.
        stall: duration of the whole stall.
    """

    event: str
    phases: Mapping[str, Figure]
    stall: Figure

    def table(self) -> Table:
        """Return the breakdown as a table for the terminal."""
        rows = {**self.phases, "the whole stall": self.stall}
        shown = [(name, str(taken)) for name, taken in rows.items()]
        return table(f"Inside our stall: {self.event}", ("part", "median (range)"), shown)


def gloo_contexts(lines: Iterable[str], clock_offset_s: float) -> list[tuple[str, float]]:
    """Return when each Gloo context was created, from Horovod's debug log.

    Args:
        lines: lines of a worker's log.
        clock_offset_s: monotonic clock minus time of day [s].

    >>> line = "[1970-01-02 00:00:01.  5000: D x.cc:1] Local Gloo context initialized."
    >>> gloo_contexts([line], 0.0)[0][0]
    'Gloo context 2: local'
    """
    found = []
    for line in lines:
        match = _LINE.match(line)
        if match:
            day, micros, text = match.groups()
            for beginning, name in _CONTEXTS.items():
                if text.startswith(beginning):
                    seconds = time.mktime(time.strptime(day, "%Y-%m-%d %H:%M:%S"))
                    found.append((name, seconds + int(micros) / 1e6 + clock_offset_s))
    return found


def dissect(
    process: Process, asked: float, contexts: Sequence[tuple[str, float]]
) -> tuple[dict[str, float], float]:
    """Divide a survivor's longest gap between two steps after ``asked`` into phases.

    Args:
        process: traced survivor.
        asked: when the event was requested [s, monotonic].
        contexts: result of :func:`gloo_contexts`, for any time.

    Returns:
        Name → seconds, which add up to the gap, and the time when the gap began.
    """
    times = [step.mono for step in process.steps]
    steps = [(a, b) for a, b in pairwise(times) if b > asked]
    begin, end = max(steps, key=lambda gap: gap[1] - gap[0])
    inside = sorted(
        (span for span in process.spans if begin <= span.begin and span.end <= end),
        key=lambda span: span.begin,
    )
    phases = {NOTICE: 0.0}
    cursor = begin
    for number, span in enumerate(inside):
        _add(phases, BETWEEN if number else NOTICE, span.begin - cursor)
        for name, seconds in _inner(span, contexts):
            _add(phases, name, seconds)
        cursor = span.end
    _add(phases, FIRST, end - cursor)
    return phases, begin


def _inner(span: Span, contexts: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    parts, cursor = [], span.begin
    if span.name == "start":
        for name, made in contexts:
            if span.begin <= made <= span.end:
                parts.append((name, made - cursor))
                cursor = made
    rest = "rest of hvd.init()" if parts else SPANS[span.name]
    return [*parts, (rest, span.end - cursor)]


def _add(phases: dict[str, float], name: str, seconds: float) -> None:
    phases[name] = phases.get(name, 0.0) + seconds


def measure_breakdown(
    stage: Stage, repetitions: int, say: Callable[[str], None]
) -> list[Breakdown]:
    """Measure the breakdown of adding, removing and killing a worker."""
    events: dict[str, tuple[tuple[int, ...], Act, int, tuple[int, int] | None]] = {
        "a host is added (2 → 3)": ((1, 1), use(1, 1, 1), 3, None),
        "a host is removed on request (3 → 2)": ((1, 1, 1), use(1, 1), 2, (2, 0)),
        "kill -9 of a worker beside another (2 → 1)": ((2,), kill(0, 1), 1, (0, 1)),
    }
    told = []
    for event, played in events.items():
        taken: list[dict[str, float]] = []
        for number in range(1, repetitions + 1):
            say(f"inside our stall: {event}, round {number} of {repetitions}")
            try:
                taken.append(_trace_once(stage, *played))
            except FailedPlayError as error:
                say(f"inside our stall: {event}: {error.short}")
        if taken:
            names = dict.fromkeys(name for phases in taken for name in phases)
            figures = {name: figure([each.get(name, 0.0) for each in taken]) for name in names}
            stalls = [sum(s for name, s in each.items() if name != ANNOUNCED) for each in taken]
            told.append(Breakdown(event, figures, figure(stalls)))
    return told


def _trace_once(
    stage: Stage, before: Sequence[int], act: Act, size: int, victim: tuple[int, int] | None
) -> dict[str, float]:
    bed = stage.bed()
    environment = {"HVD_ELASTIC_BENCH_TRACE": "1", "HOROVOD_LOG_LEVEL": "debug"}
    order = Order(bed.slots(*before), environment=environment)
    victims = [] if victim is None else [(bed.hosts[victim[0]], victim[1])]
    with stage.training(bed, OURS, order) as job:
        asked = act(job)
        stage.pause_s(job, asked, size, victims)
        host = bed.hosts[0]
        log = job.events_path.parent / "logs" / f"{host}.0.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        contexts = gloo_contexts(lines, time.monotonic() - time.time())
        phases, began = dissect(job.newest((host, 0)), asked, contexts)
        announced = job.events("rescale_started")[-1]["mono"]
        return {ANNOUNCED: max(0.0, began - announced), **phases}
