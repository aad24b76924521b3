"""Reads the marks of training processes (:mod:`benchmarks.testbed.marking`) and evaluates them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvd_elastic.records.json_lines import LineFollower

Lane = tuple[str, int]
"""A place for a worker: host and slot. Several processes may use it one after the other."""


@dataclass(frozen=True)
class Step:
    """A finished training step.

    Attributes:
        mono: end of the step [s, monotonic].
        size: number of ranks.
        cpu: processor time of the process until then, of all its threads [s].
        switches: context switches of the process until then.
    """

    mono: float
    size: int
    cpu: float = 0.0
    switches: int = 0


@dataclass(frozen=True)
class Span:
    """A traced part of a rescale: its name, begin and end [s, monotonic]."""

    name: str
    begin: float
    end: float


@dataclass
class Process:
    """Marks of one training process.

    Attributes:
        host: host of the process.
        pid: process id on that host.
        born: start of the process [s, monotonic].
        torch: end of PyTorch's import [s, monotonic]; None before.
        steps: finished steps, in order.
        slot: slot on the host.
        ready: when it was ready to meet the other ranks [s, monotonic]; None before.
        spans: traced parts of rescales.
        parts: traced parts of each finished step, by name [s].
        notes: (number of steps finished before, text) of the script's notes.
    """

    host: str
    pid: int
    born: float
    torch: float | None = None
    steps: list[Step] = field(default_factory=list)
    slot: int = 0
    ready: float | None = None
    spans: list[Span] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def lane(self) -> Lane:
        """Host and slot of the process."""
        return (self.host, self.slot)


@dataclass(frozen=True)
class Change:
    """Cost of a change of the world.

    Attributes:
        pause_s: longest time between two finished steps of a surviving worker, between the request
            and the settling of the new world [s].
        survivors: number of workers that trained before and after.
    """

    pause_s: float
    survivors: int


def first_step(processes: Iterable[Process]) -> float | None:
    """Return when any process finished the first step [s, monotonic]; None: not yet.

    >>> early, late = Step(12.0, 3), Step(12.5, 3)
    >>> first_step([Process("a", 1, 9.0, steps=[late]), Process("b", 1, 9.0, steps=[early])])
    12.0
    """
    return min((process.steps[0].mono for process in processes if process.steps), default=None)


def lanes(processes: Iterable[Process]) -> dict[Lane, list[Process]]:
    """Return the processes by host and slot, each list oldest first."""
    found: dict[Lane, list[Process]] = {}
    for process in sorted(processes, key=lambda process: process.born):
        found.setdefault(process.lane, []).append(process)
    return found


def longest_gap(times: Sequence[float]) -> float:
    """Return the longest time between two consecutive times; 0 for fewer than two.

    >>> longest_gap([1.0, 1.5, 4.0])
    2.5
    """
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def measure_change(
    processes: Iterable[Process],
    asked: float,
    size: int,
    settle_steps: int,
    victims: Collection[Lane] = (),
) -> Change | None:
    """Return the cost of a change that was requested at ``asked`` and leads to ``size`` ranks.

    A launcher that restarts its workers is measured by lanes: a process that replaces another one
    in its lane counts as the same worker, and as part of the new world at any size.

    Args:
        processes: all processes that have trained so far.
        asked: when the hostfile was edited or the worker killed [s, monotonic].
        size: number of ranks of the new world.
        settle_steps: number of steps that a survivor must finish in the new world.
        victims: lanes that do not survive.

    Returns:
        The cost; None until all survivors have settled. Steps of a survivor after that do not
        count.
    """
    pauses = []
    for lane, members in lanes(processes).items():
        steps = [(step, process.born) for process in members for step in process.steps]
        before = [step.mono for step, _ in steps if step.mono <= asked]
        after = [(step, born) for step, born in steps if step.mono > asked]
        new = [step.mono for step, born in after if step.size == size or born > asked]
        if lane in victims or not before:
            continue
        if len(new) < settle_steps:
            return None
        end = new[settle_steps - 1]
        times = [before[-1], *(step.mono for step, _ in after if step.mono <= end)]
        pauses.append(longest_gap(times))
    if not pauses:
        return None
    return Change(max(pauses), len(pauses))


def newcomer_step(processes: Iterable[Process], asked: float, size: int) -> float | None:
    """Return when a process new since ``asked`` first finished a step with ``size`` ranks."""
    firsts = [
        step.mono
        for process in processes
        if process.steps and process.steps[0].mono > asked
        for step in process.steps
        if step.size == size
    ]
    return min(firsts, default=None)


def step_times(process: Process, note: str) -> list[float]:
    """Return the times between consecutive steps in blocks that begin with a note [s].

    The first time of a block is left out, since it begins in the block before.
    """
    found: list[float] = []
    borders = [*process.notes, (len(process.steps), "")]
    for (begin, text), (end, _) in pairwise(borders):
        if text == note:
            monos = [step.mono for step in process.steps[begin:end]]
            found += [later - earlier for earlier, later in pairwise(monos)]
    return found


class LineFolder:
    """Reads a folder of JSON lines while processes write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, LineFollower] = {}

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the records written since the last call, each with the name of its file."""
        for path in sorted(self.folder.glob("*.jsonl")):
            self._files.setdefault(path.name, LineFollower(path))
        for name, lines in self._files.items():
            for line in lines.poll():
                yield name, json.loads(line)


class MarkFolder:
    """Reads the marks of a job while its processes write them.

    Args:
        folder: folder that :mod:`benchmarks.testbed.marking` writes to.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = LineFolder(folder)
        self._processes: dict[str, Process] = {}

    @property
    def processes(self) -> list[Process]:
        """All processes that have started, oldest first."""
        return sorted(self._processes.values(), key=lambda process: process.born)

    def poll(self) -> None:
        """Read the marks written since the last call."""
        for name, record in self._lines.poll():
            if record["mark"] == "process":
                begun = Process(record["host"], record["pid"], record["born"])
                begun.slot = record.get("slot", 0)
                self._processes[name] = begun
                continue
            process = self._processes[name]
            match record["mark"]:
                case "torch":
                    process.torch = record["mono"]
                case "ready":
                    process.ready = record["mono"]
                case "span":
                    process.spans.append(Span(record["name"], record["begin"], record["end"]))
                case "parts":
                    process.parts.append(record["s"])
                case "note":
                    process.notes.append((len(process.steps), record["text"]))
                case "step":
                    del record["mark"]
                    process.steps.append(Step(**record))
