"""Who feeds whom in a copy, and when that must change: no input, no output, time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

# Nodes tell how far they are four times a second.
SILENT_S = 2.0
STALLED_S = 2.5
# A rate is that of so many seconds: TCP begins slowly.
RATE_WINDOW_S = 1.5
SLOW_SHARE = 0.5
# A host that is nearly through is left where it is.
WORTH_MOVING_S = 2.0
MOST_STALLS = 3
MOST_BLOCKED = 2


class Why(Enum):
    """What is wrong with a node."""

    SILENT = "fell silent"
    STALLED = "is not reached by what feeds it"
    SLOW = "is slower than the others"
    HOPELESS = "was not reached by anything that fed it"


@dataclass(frozen=True)
class Verdict:
    """A node that must not stay where it is."""

    name: str
    why: Why


@dataclass
class _Member:
    """``left`` [bytes] is None until the node has told it; ``history`` holds (time, received)."""

    heard: float
    left: int | None = None
    received: int = 0
    history: deque[tuple[float, int]] = field(default_factory=deque)
    sent: int = -1
    sent_changed: float = 0.0
    sending: bool = False
    stalls: int = 0
    moved: bool = False
    blocked: list[str] = field(default_factory=list)
    """Nodes that could not connect to it."""

    def rate(self) -> float:
        """Bytes a second that arrived in the window; 0 until it is full."""
        if not self.history:
            return 0.0
        (begun, before), (ended, after) = self.history[0], self.history[-1]
        return (after - before) / (ended - begun) if ended - begun >= RATE_WINDOW_S else 0.0

    def start(self, now: float) -> None:
        """A new feeder: what was seen of the old one says nothing about it."""
        self.sent, self.sent_changed, self.sending = -1, now, False
        self.history.clear()


class Chain:
    """The order in which nodes pass the data on.

    Args:
        source: the node that has it all; None where each node has a share, and the last of the
            chain feeds the first.
        spread: whether the source feeds each node itself, as when each gets something else.
    """

    def __init__(self, source: str | None, spread: bool = False) -> None:
        self.source = source
        self.order: list[str] = []
        self._spread = spread
        self._members: dict[str, _Member] = {}
        self._apart: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def add(self, name: str, now: float) -> None:
        """A node at the end of the chain, before those that were put there since they are slow."""
        place = len(self.order)
        while place and self._members[self.order[place - 1]].moved:
            place -= 1
        self.order.insert(place, name)
        self._members[name] = _Member(now, sent_changed=now)

    def remove(self, name: str) -> None:
        """A node less; who was fed by it is fed by who fed it."""
        if name in self._members:
            del self._members[name]
            self.order.remove(name)
            # Who comes back may come back whole.
            self._apart.discard(name)
            for member in self._members.values():
                if name in member.blocked:
                    member.blocked.remove(name)

    def links(self) -> dict[str, str]:
        """Who feeds each node that still needs something, or whose followers do.

        >>> chain = Chain("leader")
        >>> chain.add("a", 0.0); chain.add("b", 0.0)
        >>> chain.links()
        {'a': 'leader', 'b': 'a'}
        >>> chain.remove("a"); chain.links()
        {'b': 'leader'}
        """
        found = {}
        for place, name in enumerate(self.order):
            feeder = self._feeder_at(place)
            if feeder is not None and self._members[name].left != 0:
                found[name] = feeder
        return found

    def _feeder_at(self, place: int) -> str | None:
        """The nearest node before that can reach it and is not slow; else the source."""
        if self.source is None:
            return self.order[place - 1] if len(self.order) > 1 else None
        name = self.order[place]
        if not self._spread and name not in self._apart:
            for feeder in reversed(self.order[:place]):
                if feeder in self._members[name].blocked or feeder in self._apart:
                    continue
                # A slow host holds up nobody: all of them are fed by the last of the others, which
                # has nobody else to feed.
                if not self._members[feeder].moved:
                    return feeder
        return self.source

    def _block(self, name: str, feeder: str) -> None:
        """A node could not connect to another one; who cannot with two is apart from all."""
        member = self._members[name]
        if feeder not in member.blocked:
            member.blocked.append(feeder)
        pairs = [(a, b) for b, each in self._members.items() for a in each.blocked]
        for node in {name, feeder} - {self.source}:
            others = {a if b == node else b for a, b in pairs if node in (a, b)}
            if len(others - {self.source}) >= MOST_BLOCKED:
                self._apart.add(node)

    def blocked(self, name: str) -> list[str]:
        """Who could not connect to a node."""
        return list(self._members[name].blocked) if name in self._members else []

    def after(self, name: str) -> list[str]:
        """The nodes from the one that this one feeds on, round to the one before it.

        >>> chain = Chain(None)
        >>> chain.add("a", 0.0); chain.add("b", 0.0); chain.add("c", 0.0)
        >>> chain.after("b")
        ['c', 'a']
        """
        place = self.order.index(name)
        return self.order[place + 1 :] + self.order[:place]

    def linked(self, name: str, now: float) -> None:
        """A node was given a new feeder; what its followers got before was not their fault."""
        self._members[name].start(now)
        for follower in self.order[self.order.index(name) + 1 :]:
            self._members[follower].history.clear()

    def hear(self, name: str, now: float, received: int | None, left: int | None) -> None:
        """A node told how far it is [bytes]."""
        member = self._members[name]
        member.heard = now
        if received is None:
            return
        member.received, member.left = received, left
        member.history.append((now, received))
        while len(member.history) > 2 and now - member.history[1][0] >= RATE_WINDOW_S:
            member.history.popleft()

    def hear_feeding(self, name: str, now: float, sent: int, sending: bool) -> None:
        """A node's feeder told how much it has sent [bytes], and whether the link holds it up.

        -1 bytes: it has not connected yet.
        """
        member = self._members.get(name)
        if member is None:
            return
        if sent != member.sent or not sending:
            member.sent, member.sent_changed = sent, now
        member.sending = sending

    def excuse(self, seconds: float) -> None:
        """The leader itself was asleep for so long: nobody's silence is meant by that."""
        for member in self._members.values():
            member.heard += seconds
            member.sent_changed += seconds

    def judge(self, now: float) -> list[Verdict]:
        """Nodes that must be taken out or moved; SILENT ones first."""
        silent = [
            Verdict(name, Why.SILENT)
            for name in self.order
            if now - self._members[name].heard > SILENT_S
        ]
        if silent:
            return silent
        for name in self.links():
            member = self._members[name]
            if member.sending and now - member.sent_changed > STALLED_S:
                return [self.blame(name)]
        slow = self._find_slow()
        return [Verdict(slow, Why.SLOW)] if slow else []

    def blame(self, name: str) -> Verdict:
        """What is said of a node that what feeds it does not reach: that, or that nothing does."""
        hopeless = self._members[name].stalls + 1 >= MOST_STALLS
        return Verdict(name, Why.HOPELESS if hopeless else Why.STALLED)

    def move(self, name: str, why: Why) -> None:
        """Puts a node where it holds nobody up; one that is there already is fed by the source.

        Where there is no source it changes places with the node that it feeds. One that was not
        even connected to stays, if it is not the source that failed.
        """
        member = self._members[name]
        place = self.order.index(name)
        feeder = self._feeder_at(place)
        if why is Why.STALLED and self.source and feeder and member.sent < 0:
            self._block(name, feeder)
            if feeder != self.source:
                return
        last = place == len(self.order) - 1
        self.order.remove(name)
        if last:
            self.order.insert(0 if self.source else 1, name)
        elif not self.source:
            self.order.insert(place + 1, name)
        else:
            self.order.append(name)
        if why is Why.SLOW:
            member.moved = True
        else:
            member.stalls += 1

    def _find_slow(self) -> str | None:
        """The first node whose link is the reason why it and those after it are slow."""
        if self._spread or not self.source:
            return None
        rates = {name: self._members[name].rate() for name in self.order}
        best = max(rates.values(), default=0.0)
        for position, name in enumerate(self.order[:-1]):
            member = self._members[name]
            rate = rates[name]
            if not member.sending or member.moved or not rate or rate > SLOW_SHARE * best:
                continue
            if self._waiting(self.order[position + 1 :]) and (member.left or 0) > (
                WORTH_MOVING_S * rate
            ):
                return name
        return None

    def _waiting(self, names: Iterable[str]) -> bool:
        return any(self._members[name].left != 0 for name in names)
