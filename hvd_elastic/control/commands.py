"""What the machine asks for: imperative, one frozen dataclass each.

A command is a request, never a fact: what became of it comes back as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StartAgent:
    """Open the connection to ``host`` and start its agent."""

    host: str


@dataclass(frozen=True)
class StopAgent:
    """Nothing is left to do on ``host``: let its agent end."""

    host: str


@dataclass(frozen=True)
class StartWorker:
    """Start a standby in a slot; ``worker`` is its name from now on."""

    worker: str
    host: str
    slot: int


@dataclass(frozen=True)
class KillWorker:
    """End the process, however it feels about it; its exit is reported as an event."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Member:
    """One worker's place in a generation; ranks mean what they mean in Horovod."""

    worker: str
    host: str
    slot: int
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Announce:
    """Form ``generation`` of ``members``, ordered by rank.

    Args:
        generation: rises by one with every announcement.
        members: all of them, ranks 0..n-1.
        root: the member whose live state all take; None if nobody holds one.
        restore: with ``root`` None, rank 0 looks for a checkpoint before it starts afresh.
        reason: in words, for log and dashboard.
    """

    generation: int
    members: tuple[Member, ...]
    root: str | None
    restore: bool
    reason: str


@dataclass(frozen=True)
class Leave:
    """Tell a worker to go: a member at its next step boundary, a waiting one at once."""

    worker: str


@dataclass(frozen=True)
class Hold:
    """Tell a member to stop at its next step boundary, keep its state and wait."""

    worker: str


@dataclass(frozen=True)
class SaveState:
    """Have ``worker`` write a checkpoint as soon as it can: its host will go."""

    worker: str


@dataclass(frozen=True)
class Abort:
    """``generation`` is broken, and with it every earlier one that somebody may still be in.

    Whoever is blocked in its collectives gives up; members of a later one are not concerned.
    """

    generation: int
    reason: str


@dataclass(frozen=True)
class Emit:
    """One line for events.jsonl."""

    kind: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """The run is over: ``succeeded``, ``failed`` or ``stopped``. Always the last command."""

    status: str
    message: str


Command = (
    StartAgent
    | StopAgent
    | StartWorker
    | KillWorker
    | Announce
    | Leave
    | Hold
    | SaveState
    | Abort
    | Emit
    | Finish
)
