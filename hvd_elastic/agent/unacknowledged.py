"""What an agent has told its leader, and what of it the leader is known to have acted upon.

A leader that is killed has read more than it has acted upon. So the agent numbers what matters,
keeps it until the leader acknowledges it, and keeps apart what a leader with just that knowledge
would know of its workers. To the next leader it gives this, and tells it the rest again: then for
the new leader nothing was lost, and what happened meanwhile just happened late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.events import FoundWorker
from hvd_elastic.wire import messages as msg

_MAX_LOG_BYTES = 32 << 20


class UnacknowledgedLog:
    """What one agent's leader knows and does not know yet."""

    def __init__(self) -> None:
        self._workers: dict[str, FoundWorker] = {}
        self._unacknowledged: deque[msg.AgentToLeader] = deque()
        self._log_bytes = 0
        self._last = 0
        self._generation = 0
        self._members: tuple[Member, ...] = ()

    # -- what the leader asked for ---------------------------------------------------------

    def started(self, worker: str, host: str, slot: int) -> None:
        """A worker was asked for."""
        self._workers[worker] = FoundWorker(worker, host, slot)

    def announced(self, order: Announce, here: Iterable[str]) -> None:
        """A generation was announced; ``here``: those of its members that are on this host."""
        self._generation, self._members = order.generation, order.members
        for name in here:
            if name not in self._workers:
                continue
            # The leader had heard of all that led to this, whatever it acknowledged.
            kept = deque[msg.AgentToLeader]()
            for message in self._unacknowledged:
                if _where_it_stands(message) == name:
                    self._apply(message)
                else:
                    kept.append(message)
            self._unacknowledged = kept
            self._change(name, generation=order.generation, waiting=False)

    def told_to_leave(self, worker: str) -> None:
        """The leader told the worker to leave."""
        self._change(worker, leaving=True)

    def killed(self, worker: str, reason: str) -> None:
        """The leader had the worker killed."""
        self._change(worker, leaving=True, killed=reason)

    # -- what the leader is told -----------------------------------------------------------

    def number(self, message: msg.AgentToLeader) -> msg.AgentToLeader:
        """Remember ``message`` until it is acknowledged; return it with its number."""
        self._last += 1
        message.seq = self._last
        if isinstance(message, msg.Log):
            if self._log_bytes + len(message.data) > _MAX_LOG_BYTES:
                return message  # of all that may be lost, what workers print is the least
            self._log_bytes += len(message.data)
        self._unacknowledged.append(message)
        return message

    def acknowledged(self, number: int) -> None:
        """The leader has acted upon everything up to ``number``."""
        while self._unacknowledged and self._unacknowledged[0].seq <= number:
            message = self._unacknowledged.popleft()
            if isinstance(message, msg.Log):
                self._log_bytes -= len(message.data)
            self._apply(message)

    @property
    def any_finished(self) -> bool:
        """Whether a worker came to the end of its training; the next leader will want to hear."""
        return any(worker.finished for worker in self._workers.values()) or any(
            isinstance(message, msg.WorkerSaid) and isinstance(message.message, msg.Finished)
            for message in self._unacknowledged
        )

    # -- what the next leader is told ------------------------------------------------------

    def snapshot(self) -> msg.HeldRun:
        """Return what the last leader knew of this host's workers, and of the generation."""
        return msg.HeldRun(self._generation, self._members, tuple(self._workers.values()))

    def unacknowledged(self) -> list[msg.AgentToLeader]:
        """Return what it did not know yet, in order."""
        return list(self._unacknowledged)

    def unacknowledged_readings(self) -> list[msg.Reading]:
        """Return what of that belongs to the record of what was read (``--audit``)."""
        said = (
            message.message
            for message in self._unacknowledged
            if isinstance(message, (msg.WorkerSaid, msg.PastReading))
        )
        return [reading for reading in said if isinstance(reading, (msg.Dataset, msg.Used))]

    def _change(self, worker: str, **fields: object) -> None:
        if worker in self._workers:
            self._workers[worker] = replace(self._workers[worker], **fields)  # type: ignore[arg-type]

    def _apply(self, message: msg.AgentToLeader) -> None:
        match message:
            case msg.WorkerEnded(worker=name) | msg.WorkerNotStarted(worker=name):
                self._workers.pop(name, None)
            case msg.WorkerSaid(worker=name, message=said) if name in self._workers:
                known = self._workers[name]
                match said:
                    case msg.Ready():
                        self._change(name, ready=True)
                    case msg.Joined(generation=generation):
                        joined = max(known.joined, generation)
                        self._change(name, joined=joined, holds_state=True, step=0, state=0)
                    case msg.Broken() | msg.Held():
                        self._change(
                            name,
                            waiting=said.generation >= known.generation,
                            holds_state=known.holds_state and said.step >= 0,
                            step=max(said.step, 0),
                            state=said.state,
                        )
                    case msg.Finished():
                        self._change(name, finished=True)


def _where_it_stands(message: msg.AgentToLeader) -> str | None:
    """Return the worker that says where it stands in a generation; None for other messages."""
    if isinstance(message, msg.WorkerSaid):
        if isinstance(message.message, (msg.Ready, msg.Standing)):
            return message.worker
    return None
