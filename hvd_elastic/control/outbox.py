"""Collects the commands of one call of the machine, and when it next needs to be called."""

from __future__ import annotations

from hvd_elastic.control.commands import Command, Emit, Finish
from hvd_elastic.run_events import Event


class Outbox:
    """Holds commands in the order they were sent; commands after Finish are dropped.

    Attributes:
        closed: whether Finish was sent.
        sent: number of commands so far.
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

    def take(self) -> list[Command]:
        """Remove and return the commands added since the last call."""
        commands, self._commands = self._commands, []
        return commands
