"""Commands that the machine returns, one frozen type each.

A command is a request; its outcome is reported back to the machine as an event.
"""

from __future__ import annotations

import msgspec

from hvd_elastic.run_events import Event, Status


class StartAgent(msgspec.Struct, frozen=True):
    """Open the connection to ``host`` and start its agent."""

    host: str


class StopAgent(msgspec.Struct, frozen=True):
    """End the agent of ``host``, which has no workers left."""

    host: str


class StartWorker(msgspec.Struct, frozen=True):
    """Start a worker named ``worker`` in a slot; it waits as a standby once it is warm."""

    worker: str
    host: str
    slot: int


class KillWorker(msgspec.Struct, frozen=True):
    """Kill a worker's process; its exit is reported as an event."""

    worker: str
    reason: str


class Member(msgspec.Struct, frozen=True):
    """One worker's place in a generation; ranks and sizes are those of Horovod."""

    worker: str
    host: str
    slot: int
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Announce(msgspec.Struct, frozen=True):
    """Announce a new generation to its members.

    Args:
        generation: its number, one higher than that of the last announcement.
        members: all members, ordered by rank.
        root: member whose live state all others receive; None if no member holds one.
        restore: with ``root`` None, whether rank 0 restores a checkpoint, if there is one, before
            it starts afresh.
        reason: why the generation is announced, for log and dashboard.
    """

    generation: int
    members: tuple[Member, ...]
    root: str | None
    restore: bool
    reason: str


class Leave(msgspec.Struct, frozen=True):
    """Ask a worker to leave: a member at its next step boundary, a waiting one at once."""

    worker: str


class Hold(msgspec.Struct, frozen=True):
    """Ask a member to stop at its next step boundary, keep its state and wait."""

    worker: str


class SaveState(msgspec.Struct, frozen=True):
    """Ask a worker to write a checkpoint as soon as it can, because its host will be lost."""

    worker: str


class Abort(msgspec.Struct, frozen=True):
    """Abort ``generation`` and every earlier one that has not ended on all workers.

    Workers that are blocked in its collectives give up; members of a later one are not affected.
    """

    generation: int
    reason: str


class Emit(msgspec.Struct, frozen=True):
    """Record one event in events.jsonl."""

    event: Event


class Finish(msgspec.Struct, frozen=True):
    """End the run with ``succeeded``, ``failed`` or ``stopped``; always the last command."""

    status: Status
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


class Outbox:
    """Holds commands in the order they were sent; commands after Finish are dropped.

    Attributes:
        ordered: number of those that do not only record an event.
        wake_at: when the machine next needs to be called [s]; None: not at all.
    """

    def __init__(self) -> None:
        self.closed = False
        self.sent = self.ordered = 0
        self.wake_at: float | None = None
        self._commands: list[Command] = []

    def send(self, command: Command) -> None:
        """Add a command."""
        if self.closed:
            return
        self._commands.append(command)
        self.sent += 1
        self.ordered += not isinstance(command, Emit)
        self.closed = isinstance(command, Finish)

    def emit(self, event: Event) -> None:
        """Add a command that records an event in events.jsonl."""
        self.send(Emit(event))

    def wake(self, at: float) -> None:
        """Request a Tick at time ``at`` [s] or earlier."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def forget_wakes(self) -> None:
        """Discard the requested times, because everything is about to be compared again."""
        self.wake_at = None

    def take_commands(self) -> list[Command]:
        """Remove and return the commands added since the last call."""
        commands, self._commands = self._commands, []
        return commands
