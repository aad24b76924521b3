"""The rows of the table: what happens, what is hoped for, and who can be asked at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.elasticity import plays
from benchmarks.elasticity.plays import Play
from hvd_elastic.errors import UsageError

__all__ = ["ROWS", "Case", "Row", "parse_rows"]


@dataclass(frozen=True)
class Case:
    """One figure of a row.

    Attributes:
        name: as the play calls it.
        unit: ``s``, ``x`` (a ratio) or ``""`` (a count).
        target: ours shall not be above it; None for what is only told.
    """

    name: str
    unit: str = "s"
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of questions.

    Attributes:
        number: for ``--rows``.
        title: what happens.
        play: makes it happen.
        cases: the figures that the play gives, in order.
        without: launcher's key → why it is not asked.
    """

    number: int
    title: str
    play: Play
    cases: Sequence[Case]
    without: Mapping[str, str] = field(default_factory=dict)


_NOT_COMPARABLE = "has no live state: workers start again from a file"
_NO_COMMIT = "has no commit"

ROWS = (
    Row(
        1,
        "a host is added (2 → 3), its worker needs 1 s to start",
        plays.join(1.0),
        [Case("stall", target=0.2)],
    ),
    Row(
        2,
        "the same, its worker needs 20 s to start",
        plays.join(20.0),
        [Case("stall", target=0.2)],
    ),
    Row(
        3,
        "a host is removed on request (3 → 2)",
        plays.remove,
        [Case("stall", target=0.1)],
    ),
    Row(
        4,
        "kill -9 of a worker beside another on its host (2 → 1)",
        plays.kill_beside,
        [Case("stall", target=0.25)],
    ),
    Row(
        5,
        "kill -9 with a warm spare (ours: --spares 1)",
        plays.kill_with_spare,
        [Case("full size again", target=0.4)],
    ),
    Row(
        6,
        "a host crashes, connections close (3 → 2)",
        plays.crash,
        [Case("stall", target=0.4)],
    ),
    Row(
        7,
        "a cable is pulled (3 → 2)",
        plays.cut,
        [Case("stall", target=6.0)],
    ),
    Row(
        8,
        "a worker is stopped with SIGSTOP (3 → 2)",
        plays.freeze,
        [Case("stall", target=6.0)],
    ),
    Row(
        9,
        "fewer than the minimum are left, then a host joins",
        plays.below_minimum,
        [Case("ready to next step", target=1.0)],
    ),
    Row(
        10,
        "a host is added, 400 MB of state over 1 Gbit/s",
        plays.large_state,
        [
            Case("stall"),
            Case("raw TCP, same bytes"),
            Case("stall / raw TCP", "x", 1.3),
            Case("stall / wire time", "x", 1.3),
        ],
        {"torchrun": _NOT_COMPARABLE},
    ),
    Row(
        11,
        "the leader is killed, run --resume takes over",
        plays.lose_leader,
        [Case("steps lost", "", 0.0), Case("workers restarted", "", 0.0), Case("stall", "s", 0.25)],
        {
            "horovod": "has no way to take a run over",
            "torchrun": "has no leader",
            "torchft": "has no leader; its lighthouse keeps no state",
        },
    ),
    Row(
        12,
        "a commit at every step, against none",
        plays.commit_cost,
        [
            case
            for name in ("1 MB model", "400 MB model")
            for case in (
                Case(f"{name}: step without"),
                Case(f"{name}: step with"),
                Case(f"{name}: with / without", "x", 1.02),
            )
        ],
        {"torchrun": _NO_COMMIT, "torchft": _NO_COMMIT},
    ),
    Row(
        13,
        "16 ranks on 4 hosts, the last one joins (15 → 16), 50 ms steps",
        plays.sixteen,
        [Case("join 16", target=1.0)],
    ),
    Row(
        14,
        "world sizes 2 to 16, join (to n) and kill -9 (of n), 50 ms steps",
        plays.growth,
        [Case(f"{what} {size}") for size in plays.SIZES for what in ("join", "kill")],
        {
            "torchrun": "starts all workers again: row 13 tells",
            "torchft": "meets through its lighthouse at every step: row 13 tells",
        },
    ),
)


def parse_rows(text: str) -> list[Row]:
    """The rows that ``--rows`` names, in their own order.

    >>> [row.number for row in parse_rows("4,1-2")]
    [1, 2, 4]

    Raises:
        UsageError: names what is no row.
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
