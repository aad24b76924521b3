"""Reads and checks the records of the soak's training processes (:mod:`benchmarks.soak.train`).

Each process writes a file with a JSON object on each line; ``mono`` is the clock that all virtual
hosts share. The kinds of lines and their fields:

``process``   ``host``, ``worker``: the first line
``world``     ``world`` (a random number that all ranks agreed on), ``generation``, ``rank``,
              ``size``, ``step``: the process trains in this world, after ``step`` steps
``begin``     ``step``, ``epoch``, ``indices``: the step that uses these examples begins
``end``       ``step``: the optimizer has taken this step
``equal``     ``step``: all ranks hold the same parameters and momentum after ``step`` steps
``differ``    ``step``, ``sums``: they do not
``finished``  ``accuracy``: accuracy on the test set
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.testbed.marks import LineFolder
from hvd_elastic.records.audit import AuditResult, check_audit


@dataclass
class World:
    """Processes that train together, from one change to the next.

    Attributes:
        name: random number that its ranks agreed on.
        began: when the first of them recorded it [s, monotonic].
        step: number of steps taken before its first one.
        size: number of ranks.
        generation: the leader's number for it; a resumed run starts counting again.
        members: rank → name of the process's file, for processes that have recorded the world.
        hosts: rank → host.
        last_step: newest step that a member has finished.
        ends: number of its steps that have been finished.
    """

    name: int
    began: float
    step: int
    size: int
    generation: int
    members: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    last_step: int = 0
    ends: int = 0

    def slots(self) -> Counter[str]:
        """Return the number of ranks on each host."""
        return Counter(self.hosts.values())


@dataclass
class _Process:
    host: str
    worker: str
    world: World | None = None


class Chronicle:
    """Course of the training from its processes' records: worlds, finished steps, differences.

    >>> chronicle = Chronicle()
    >>> chronicle.take("p", {"kind": "process", "mono": 0.0, "host": "a", "worker": "a:0.1"})
    >>> world = {"world": 5, "generation": 1, "rank": 0, "size": 1, "step": 0}
    >>> chronicle.take("p", {"kind": "world", "mono": 1.0, **world})
    >>> chronicle.take("p", {"kind": "end", "mono": 1.5, "step": 1})
    >>> chronicle.ends, chronicle.current.slots()
    ([1.5], Counter({'a': 1}))
    """

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.ends: list[float] = []
        self.compared = 0
        self.differences: list[str] = []
        self.accuracies: list[float] = []
        self._processes: dict[str, _Process] = {}
        self._by_name: dict[int, World] = {}

    @property
    def current(self) -> World | None:
        """Newest world in which a step was finished; None before the first."""
        return next((world for world in reversed(self.worlds) if world.ends), None)

    @property
    def step(self) -> int:
        """Newest step of the current world."""
        return self.current.last_step if self.current is not None else 0

    def worker_of_rank(self, rank: int) -> tuple[str, str] | None:
        """Return host and worker of a rank of the current world, or None."""
        if self.current is None or rank not in self.current.members:
            return None
        process = self._processes[self.current.members[rank]]
        return process.host, process.worker

    def ends_since(self, mono: float) -> int:
        """Return the number of steps finished after a time."""
        return len(self.ends) - bisect.bisect_right(self.ends, mono)

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest time without a finished step [s].

        It counts from the last step before ``begin`` to ``end``.

        >>> chronicle = Chronicle()
        >>> chronicle.ends = [1.0, 2.0, 5.0, 6.0]
        >>> chronicle.longest_gap(1.5, 6.0)
        3.0
        """
        first = max(0, bisect.bisect_right(self.ends, begin) - 1)
        inside = [mono for mono in self.ends[first:] if mono <= end]
        if not inside:
            return max(0.0, end - begin)
        edges = [*inside, max(end, inside[-1])]
        return max(later - earlier for earlier, later in pairwise(edges))

    def first_end_after(self, mono: float) -> float | None:
        """Return when the first step after a time was finished, or None."""
        place = bisect.bisect_right(self.ends, mono)
        return self.ends[place] if place < len(self.ends) else None

    def take(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line of the file ``name``; the lines of a file must come in order."""
        kind = record["kind"]
        if kind == "process":
            self._processes[name] = _Process(record["host"], record["worker"])
            return
        process = self._processes[name]
        if kind == "world":
            process.world = self._world(name, process, record)
        elif kind == "end" and process.world is not None:
            world, step = process.world, int(record["step"])
            if step > world.last_step or not world.ends:
                world.last_step = step
                world.ends += 1
                bisect.insort(self.ends, record["mono"])
        elif kind == "equal":
            self.compared += 1
        elif kind == "differ":
            self.differences.append(
                f"after {record['step']} steps the ranks hold different parameters, as "
                f"{process.worker} saw: (checksum, step) by rank {record['sums']}"
            )
        elif kind == "finished":
            self.accuracies.append(record["accuracy"])

    def _world(self, name: str, process: _Process, record: Mapping[str, Any]) -> World:
        world = self._by_name.get(record["world"])
        if world is None:
            world = World(
                name=record["world"],
                began=record["mono"],
                step=int(record["step"]),
                size=int(record["size"]),
                generation=int(record["generation"]),
            )
            self._by_name[world.name] = world
            bisect.insort(self.worlds, world, key=lambda world: world.began)
        world.members[record["rank"]] = name
        world.hosts[record["rank"]] = process.host
        return world


class RecordFolder:
    """Reads a folder of records while it grows.

    Args:
        folder: folder that the script was given as ``--records``.
    """

    def __init__(self, folder: Path) -> None:
        self.chronicle = Chronicle()
        self._lines = LineFolder(folder)

    def poll(self) -> None:
        """Read what was written since the last call."""
        for name, record in self._lines.poll():
            self.chronicle.take(name, record)

    def read_all(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return all records from the beginning, each with the name of its file."""
        return LineFolder(self._lines.folder).poll()


@dataclass
class _Told:
    """Records of the processes of one world about its steps."""

    began: float
    first: int
    members: set[str] = field(default_factory=set)
    begun: dict[int, dict[str, tuple[int, list[int]]]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


def _worlds_told(records: Iterable[tuple[str, Mapping[str, Any]]]) -> list[_Told]:
    worlds: dict[int, _Told] = {}
    inside: dict[str, _Told] = {}
    for name, record in records:
        kind = record["kind"]
        if kind == "world":
            told = worlds.setdefault(
                record["world"], _Told(record["mono"], int(record["step"]) + 1)
            )
            told.began = min(told.began, record["mono"])
            told.members.add(name)
            inside[name] = told
        elif kind == "begin":
            entry = (int(record["epoch"]), list(record["indices"]))
            inside[name].begun.setdefault(int(record["step"]), {})[name] = entry
        elif kind == "end":
            inside[name].ended.add(int(record["step"]))
    return sorted((told for told in worlds.values() if told.begun), key=lambda told: told.began)


def check_steps(
    records: Iterable[tuple[str, Mapping[str, Any]]], examples: int, *, finished: bool
) -> AuditResult:
    """Check that every example was used exactly once in each epoch, by the processes' records.

    The steps of earlier worlds from the first step of a world on are void.

    Args:
        records: records of all processes; those of one process in order.
        examples: size of the data set.
        finished: whether training has finished, so that the last epoch must be complete too.
    """
    used: list[dict[str, Any]] = [{"kind": "dataset", "n": examples}]
    for number, told in enumerate(_worlds_told(records), start=1):
        for step, parts in sorted(told.begun.items()):
            indices = [index for _, part in parts.values() for index in part]
            epoch = max(epoch for epoch, _ in parts.values())
            used.append(
                {
                    "kind": "used",
                    "generation": number,
                    "step": step,
                    "epoch": epoch,
                    "indices": indices,
                }
            )
    return check_audit(used, finished=finished)


def epochs_between(
    records: Iterable[tuple[str, Mapping[str, Any]]],
    windows: Iterable[tuple[float, float | None]],
) -> set[int]:
    """Return the epochs of the steps that began in one of the time windows, or just after it.

    Args:
        records: records of all processes.
        windows: begin and end [s, monotonic]; an end of None means the end of the run.
    """
    edges = [(begin, float("inf") if end is None else end + 1.0) for begin, end in windows]
    return {
        int(record["epoch"])
        for _, record in records
        if record["kind"] == "begin" and any(begin <= record["mono"] <= end for begin, end in edges)
    }


def split_audit(audit: AuditResult, excused: Collection[int]) -> tuple[list[int], list[str]]:
    """Divide the problems that the run's own audit has found into excused and real ones.

    Args:
        audit: result of the audit.
        excused: epochs of which records may be missing.

    Returns:
        The excused epochs with missing records, and the descriptions of all other problems.
    """
    forgiven = [
        epoch.epoch
        for epoch in audit.epochs
        if not epoch.ok and epoch.epoch in excused and not (epoch.duplicated or epoch.foreign)
    ]
    prefixes = tuple(f"epoch {epoch}: " for epoch in forgiven)
    return forgiven, [text for text in audit.problems() if not text.startswith(prefixes)]


def step_problems(records: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[int]]:
    """Find steps that were repeated without need or left out.

    If a process of one world survives into the next, at most the step in flight may be repeated;
    if none does, training goes back to a checkpoint. No step may be left out.

    Returns:
        Descriptions of what is wrong, and the number of steps lost by each return to a checkpoint.
    """
    problems: list[str] = []
    lost: list[int] = []
    ended = begun = 0
    holders: set[str] = set()
    for told in _worlds_told(records):
        again = ended + 1 - told.first
        if told.first > begun + 1 and begun:
            problems.append(f"steps {begun + 1} to {told.first - 1} were left out")
        if holders & told.members:
            if again > 1:
                problems.append(
                    f"steps {told.first} to {ended} were done again although a process that had "
                    "made them lived on"
                )
        elif again > 0:
            lost.append(again)
        ended, begun = max(told.ended, default=told.first - 1), max(told.begun)
        # A process that began a step holds at least the state before it.
        holders = {name for step in (ended, begun) for name in told.begun.get(step, ())}
    return problems, lost
