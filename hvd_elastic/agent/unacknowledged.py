"""What an agent has told its leader, and what of it the leader is known to have taken in.

A leader that is killed has read more than it has acted upon. So the agent numbers what matters,
keeps it until the leader acknowledges it, and keeps apart what a leader with just that knowledge
would know of its workers. To the next leader it gives this, and tells it the rest again: then for
the new leader nothing was lost, and what happened meanwhile just happened late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hvd_elastic.wire.framing import Message

__all__ = ["Ledger", "WorkerFacts"]

_MAX_LOG_BYTES = 32 << 20
_READINGS = ("dataset", "used")
_STANDING = ("ready", "joined", "broken", "held")


@dataclass
class WorkerFacts:
    """One worker as the leader knows it.

    Attributes:
        worker, slot: its name and place.
        ready: it was warm once.
        generation: the last one it was announced into.
        joined: the last one it joined.
        waiting: it broke off or was held since.
        holds_state, step, state: whether its state is whole, and how far it was when it began to
            wait.
        finished: its training function returned.
        leaving: it was told to leave or killed.
        killed: why it was killed; empty: it was not.
    """

    worker: str
    slot: int
    ready: bool = False
    generation: int = 0
    joined: int = 0
    waiting: bool = False
    holds_state: bool = False
    step: int = 0
    state: int = 0
    finished: bool = False
    leaving: bool = False
    killed: str = ""


class Ledger:
    """What one agent's leader knows and does not know yet."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerFacts] = {}
        self._unacknowledged: deque[tuple[int, Message]] = deque()
        self._log_bytes = 0
        self._last = 0
        self._generation = 0
        self._members: list[list[object]] = []

    # -- what the leader asked for ---------------------------------------------------------

    def started(self, worker: str, slot: int) -> None:
        """A worker was asked for."""
        self._workers[worker] = WorkerFacts(worker, slot)

    def announced(self, generation: int, members: list[list[object]], here: Iterable[str]) -> None:
        """A generation was announced; ``here``: those of its members that are on this host."""
        self._generation, self._members = generation, members
        for name in here:
            if name not in self._workers:
                continue
            # The leader had heard of all that led to this, whatever it acknowledged.
            kept = deque[tuple[int, Message]]()
            for number, message in self._unacknowledged:
                if message.get("worker") == name and _kind(message) in _STANDING:
                    self._apply(message)
                else:
                    kept.append((number, message))
            self._unacknowledged = kept
            facts = self._workers[name]
            facts.generation, facts.waiting = generation, False

    def told(self, worker: str, kind: str) -> None:
        """The leader sent the worker an instruction."""
        if worker in self._workers and kind == "leave":
            self._workers[worker].leaving = True

    def killed(self, worker: str, reason: str) -> None:
        """The leader had the worker killed."""
        if worker in self._workers:
            self._workers[worker].leaving = True
            self._workers[worker].killed = reason or "it was killed"

    # -- what the leader is told -----------------------------------------------------------

    def number(self, message: Message) -> Message:
        """Remember ``message`` until it is acknowledged; the message with its number."""
        self._last += 1
        numbered = {**message, "seq": self._last}
        if message["ev"] == "log":
            size = len(message["data"])
            if self._log_bytes + size > _MAX_LOG_BYTES:
                return numbered  # of all that may be lost, what workers print is the least
            self._log_bytes += size
        self._unacknowledged.append((self._last, numbered))
        return numbered

    def acknowledged(self, number: int) -> None:
        """The leader has acted upon everything up to ``number``."""
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            _, message = self._unacknowledged.popleft()
            if message["ev"] == "log":
                self._log_bytes -= len(message["data"])
            self._apply(message)

    @property
    def any_finished(self) -> bool:
        """Whether a worker came to the end of its training; the next leader will want to hear."""
        told = (message for _, message in self._unacknowledged)
        known = any(facts.finished for facts in self._workers.values())
        return known or any(_kind(message) == "finished" for message in told)

    # -- what the next leader is told ------------------------------------------------------

    def snapshot(self) -> Message:
        """What the last leader knew of this host's workers, and of the generation."""
        return {
            "generation": self._generation,
            "members": self._members,
            "workers": [asdict(facts) for facts in self._workers.values()],
        }

    def unacknowledged(self) -> list[Message]:
        """What it did not know yet, in order."""
        return [message for _, message in self._unacknowledged]

    def unacknowledged_readings(self) -> list[Message]:
        """Of that, what is on record of what was read (``--audit``)."""
        found = []
        for _, message in self._unacknowledged:
            if message["ev"] == "past" or _kind(message) in _READINGS:
                found.append(message["message"])
        return found

    def _apply(self, message: Message) -> None:
        name = message.get("worker", "")
        facts = self._workers.get(name)
        if facts is None:
            return
        if message["ev"] in ("worker_exited", "worker_not_started"):
            del self._workers[name]
            return
        match _kind(message):
            case "ready":
                facts.ready = True
            case "joined":
                facts.joined = max(facts.joined, message["message"]["generation"])
                facts.holds_state, facts.step, facts.state = True, 0, 0
            case "broken" | "held":
                step = message["message"]["step"]
                facts.waiting = message["message"]["generation"] >= facts.generation
                facts.holds_state = facts.holds_state and step >= 0
                facts.step, facts.state = max(step, 0), message["message"].get("state", 0)
            case "finished":
                facts.finished = True


def _kind(message: Message) -> str:
    return str(message["message"]["kind"]) if message["ev"] == "worker" else ""
