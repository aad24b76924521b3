"""Where one call of the machine collects its commands and the times it wants to be woken at."""

from __future__ import annotations

from hvd_elastic.control.commands import Command, Emit, Finish

__all__ = ["Outbox"]


class Outbox:
    """Commands in the order they are asked for; nothing is taken after Finish."""

    def __init__(self) -> None:
        self.closed = False
        self.sent = 0
        self.wake_at: float | None = None
        self._commands: list[Command] = []

    def send(self, command: Command) -> None:
        """Ask for ``command``."""
        if self.closed:
            return
        self._commands.append(command)
        self.sent += 1
        self.closed = isinstance(command, Finish)

    def emit(self, kind: str, **fields: object) -> None:
        """Ask for a line in events.jsonl."""
        self.send(Emit(kind, fields))

    def wake(self, at: float) -> None:
        """Be told the time at ``at``, whatever else happens."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def forget_wakes(self) -> None:
        """Everything is about to be looked at again."""
        self.wake_at = None

    def take(self) -> list[Command]:
        """What was asked for since the last call."""
        commands, self._commands = self._commands, []
        return commands
