"""Where the milliseconds of our own stall go: rows 1, 3 and 4 once more, with the worker traced.

Tracing (:mod:`benchmarks.testbed.tracing`) and Horovod's debug log cost a little themselves, so the
stalls here are not those of the table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elasticity.stage import FailedPlayError, Plan, Stage, newest, our_events
from benchmarks.testbed.figures import Figure, figure
from benchmarks.testbed.launchers import OURS, Job
from benchmarks.testbed.marks import Lane, Process, Span
from benchmarks.testbed.tracing import SPANS

__all__ = ["Breakdown", "dissect", "gloo_contexts", "measure_breakdown"]

_CONTEXTS = {
    "Global Gloo context initialized.": "Gloo context 1: global",
    "Local Gloo context initialized.": "Gloo context 2: local",
    "Cross-node Gloo context initialized.": "Gloo context 3: cross",
    "Global Gloo context initialized for": "Gloo context 4: process set, global",
    "Local Gloo context initialized for": "Gloo context 5: process set, local",
    "Cross-node Gloo context for": "Gloo context 6: process set, cross",
}
"""What Horovod logs when it has made one, in order, and how it is called here."""
_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.([ \d]{6}): .*?\] (.*)")

NOTICE = "until the worker acts: rest of its step, notice, agreement"
ANNOUNCED = "not standing still: announced, until the last step before the pause ended"
BETWEEN = "between these"
FIRST = "next batch and first step"


@dataclass(frozen=True)
class Breakdown:
    """One event taken apart.

    Attributes:
        event: what happened.
        phases: name → seconds, in the order in which they pass; they add up to the stall, but for
            the first one, in which the others still train.
        stall: the whole of it.
    """

    event: str
    phases: Mapping[str, Figure]
    stall: Figure

    def table(self) -> Any:
        """For rich."""
        from rich.table import Table

        table = Table(title=f"Inside our stall: {self.event}", title_justify="left")
        table.add_column("part")
        table.add_column("median (range)")
        for name, taken in self.phases.items():
            table.add_row(name, str(taken))
        table.add_row("the whole stall", str(self.stall), style="bold")
        return table

    def as_json(self) -> dict[str, Any]:
        """For the kept file."""
        phases = {name: asdict(taken) for name, taken in self.phases.items()}
        return {"event": self.event, "phases": phases, "stall": asdict(self.stall)}


def gloo_contexts(lines: Iterable[str], clock_offset_s: float) -> list[tuple[str, float]]:
    """When each Gloo context was made, from Horovod's debug log.

    Args:
        lines: of a worker's log.
        clock_offset_s: the monotonic clock less that of the time of day [s].

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
    """The longest gap between two steps of a survivor after ``asked``, by what filled it.

    Args:
        process: a traced survivor.
        asked: when the event was asked for [s, monotonic].
        contexts: of :func:`gloo_contexts`, any time.

    Returns:
        Name → seconds, which add up to the gap, and when the gap began.
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
    """Add, remove and kill, with the worker traced."""
    first, second, third, _ = stage.bed().hosts
    one = {first: 1, second: 1}
    more = {**one, third: 1}
    events: dict[str, tuple[dict[str, int], int, list[Lane], Callable[[Job], float]]] = {
        "a host is added (2 → 3)": (one, 3, [], lambda job: job.use(more)),
        "a host is removed on request (3 → 2)": (more, 2, [(third, 0)], lambda job: job.use(one)),
        "kill -9 of a worker beside another (2 → 1)": (
            {first: 2},
            1,
            [(first, 1)],
            lambda job: job.bed.kill(first, newest(job, (first, 1)).pid),
        ),
    }
    told = []
    for event, (slots, size, victims, do) in events.items():
        taken: list[dict[str, float]] = []
        for number in range(1, repetitions + 1):
            say(f"inside our stall: {event}, round {number} of {repetitions}")
            try:
                taken.append(_trace_once(stage, slots, size, victims, do))
            except FailedPlayError as error:
                say(f"inside our stall: {event}: {error.short}")
        if taken:
            names = dict.fromkeys(name for phases in taken for name in phases)
            figures = {name: figure([each.get(name, 0.0) for each in taken]) for name in names}
            stall = figure(
                [sum(s for name, s in each.items() if name != ANNOUNCED) for each in taken]
            )
            told.append(Breakdown(event, figures, stall))
    return told


def _trace_once(
    stage: Stage,
    slots: dict[str, int],
    size: int,
    victims: list[Lane],
    do: Callable[[Job], float],
) -> dict[str, float]:
    environment = {"HVD_ELASTIC_BENCH_TRACE": "1", "HOROVOD_LOG_LEVEL": "debug"}
    plan = Plan(slots, environment=environment)
    with stage.training(stage.bed(), OURS, plan) as job:
        asked = do(job)
        stage.change(job, asked, size, victims)
        host = next(iter(slots))
        survivor = newest(job, (host, 0))
        log = Path(job.events).parent / "logs" / f"{host}.0.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        contexts = gloo_contexts(lines, time.monotonic() - time.time())
        phases, began = dissect(survivor, asked, contexts)
        announced = [e["mono"] for e in our_events(job) if e["kind"] == "rescale_started"][-1]
        return {ANNOUNCED: max(0.0, began - announced), **phases}
