"""What training processes wrote down (see :mod:`benchmarks.testbed.marking`), and what it means."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvd_elastic.records.json_lines import LineFollower

Lane = tuple[str, int]
"""A place for a worker: host and slot. Processes may follow each other in it."""


@dataclass(frozen=True)
class Step:
    """A finished training step: when [s, monotonic], and in a world of how many ranks."""

    mono: float
    size: int


@dataclass(frozen=True)
class Span:
    """A traced part of a rescale: its name, begin and end [s, monotonic]."""

    name: str
    begin: float
    end: float


@dataclass
class Process:
    """One training process, as far as it got.

    Attributes:
        host: where it ran.
        pid: its id as seen on that host.
        born: start of the process [s, monotonic].
        torch: end of PyTorch's import; None before.
        steps: its finished steps, in order.
        slot: which process of its host it is.
        ready: when it was about to meet the others [s, monotonic]; None before.
        spans: what was traced.
        notes: (number of steps finished before, text), as the script wrote them.
    """

    host: str
    pid: int
    born: float
    torch: float | None = None
    steps: list[Step] = field(default_factory=list)
    slot: int = 0
    ready: float | None = None
    spans: list[Span] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return (self.host, self.slot)


@dataclass(frozen=True)
class Change:
    """What a change of the world cost.

    Attributes:
        pause_s: longest time between two finished steps of a worker that was there before and
            stayed, between the request and the settling of the new world.
        survivors: how many workers were there before and stayed.
    """

    pause_s: float
    survivors: int


def first_step(processes: Iterable[Process]) -> float | None:
    """When the first step of all was finished [s, monotonic]; None when there is none yet.

    >>> early, late = Step(12.0, 3), Step(12.5, 3)
    >>> first_step([Process("a", 1, 9.0, steps=[late]), Process("b", 1, 9.0, steps=[early])])
    12.0
    """
    return min((process.steps[0].mono for process in processes if process.steps), default=None)


def lanes(processes: Iterable[Process]) -> dict[Lane, list[Process]]:
    """Processes by host and slot, oldest first."""
    found: dict[Lane, list[Process]] = {}
    for process in sorted(processes, key=lambda process: process.born):
        found.setdefault(process.lane, []).append(process)
    return found


def longest_gap(times: Sequence[float]) -> float:
    """The longest time between two neighbours; 0 where there are fewer than two.

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
    """The cost of a change that was asked for at ``asked`` and leads to ``size`` ranks.

    A launcher that restarts its workers is measured by places: the process that follows another
    one in the slot of its host carries on, and is in the new world whatever its size.

    Args:
        processes: all that trained so far.
        asked: when the hostfile was edited or the worker killed [s, monotonic].
        size: ranks of the new world.
        settle_steps: steps that a survivor must have finished in the new world.
        victims: lanes that do not survive.

    Returns:
        None until all survivors have settled. What one does after it settled does not count.
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
    """When a process that had not trained at ``asked`` first finished a step in ``size`` ranks."""
    firsts = [
        step.mono
        for process in processes
        if process.steps and process.steps[0].mono > asked
        for step in process.steps
        if step.size == size
    ]
    return min(firsts, default=None)


def step_times(process: Process, note: str) -> list[float]:
    """Times between neighbouring steps within the blocks that a note begins [s].

    The first time of a block is left out, since it reaches over the border.
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
        """Names of files and the records that were written to them since the last call."""
        for path in sorted(self.folder.glob("*.jsonl")):
            self._files.setdefault(path.name, LineFollower(path))
        for name, lines in self._files.items():
            for line in lines.poll():
                yield name, json.loads(line)


class MarkFolder:
    """Reads the marks of a job while its processes write them.

    Args:
        folder: the folder given to :mod:`benchmarks.testbed.marking`.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = LineFolder(folder)
        self._processes: dict[str, Process] = {}

    @property
    def processes(self) -> list[Process]:
        """All processes that have begun, oldest first."""
        return sorted(self._processes.values(), key=lambda process: process.born)

    def poll(self) -> None:
        """Take in what was written since the last call."""
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
                case "note":
                    process.notes.append((len(process.steps), record["text"]))
                case "step":
                    process.steps.append(Step(record["mono"], record["size"]))
