"""Decide which node of a copy feeds which, and when to change that; no I/O, time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

# Seconds without a report after which a node is taken out; nodes report four times a second.
SILENT_S = 2.0
# Seconds without progress on a link that wants to send after which the node gets another feeder.
STALLED_S = 2.5
# Rates are averaged over this time, because TCP starts slowly.
RATE_WINDOW_S = 1.5
# A node is slow when its rate is at most this share of the best rate.
SLOW_SHARE = 0.5
# A slow node is moved only if it still needs more than this time at its current rate.
WORTH_MOVING_S = 2.0
# A node that this number of feeders could not send to is given up.
MOST_STALLS = 3
# A node that failed to connect with this number of other nodes is fed by the source itself.
MOST_BLOCKED = 2


class Why(Enum):
    """Reason why a node must be moved or removed."""

    SILENT = "fell silent"
    STALLED = "is not reached by what feeds it"
    SLOW = "is slower than the others"
    HOPELESS = "was not reached by anything that fed it"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a node that must not keep its place in the chain."""

    name: str
    why: Why


@dataclass
class _Member:
    """One node of the chain.

    Attributes:
        heard: time of its last report [s].
        left: bytes that it still needs; None until it has reported that.
        received: bytes that it has received.
        history: (time, bytes received) of its reports in the rate window.
        sent: bytes that its feeder has sent to it; -1 until connected.
        sent_changed: time when ``sent`` last changed, or nothing was to be sent [s].
        sending: whether its feeder is waiting for the link.
        stalls: number of times that it was moved, since it received something, because its feeder
            could not send to it.
        moved: whether it was moved to the end because it is slow.
        blocked: nodes that could not connect to it.
    """

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

    def rate(self) -> float:
        """Return the bytes per second received in the window; 0 until the window is full."""
        if not self.history:
            return 0.0
        (begun, before), (ended, after) = self.history[0], self.history[-1]
        return (after - before) / (ended - begun) if ended - begun >= RATE_WINDOW_S else 0.0

    def start(self, now: float) -> None:
        """Reset what was measured of the old feeder, because a new one takes over."""
        self.sent, self.sent_changed, self.sending = -1, now, False
        self.history.clear()


class Chain:
    """Order in which the nodes pass on the data.

    Args:
        source: name of the node that has all data; None if each node has a share, in which case
            the last node of the chain feeds the first.
        spread: whether the source feeds each node itself, because each gets different files.
    """

    def __init__(self, source: str | None, spread: bool = False) -> None:
        self.source = source
        self.order: list[str] = []
        self._spread = spread
        self._members: dict[str, _Member] = {}
        self._apart: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def add_node(self, name: str, now: float) -> None:
        """Add a node at the end of the chain, but before the slow nodes that were moved there."""
        place = len(self.order)
        while place and self._members[self.order[place - 1]].moved:
            place -= 1
        self.order.insert(place, name)
        self._members[name] = _Member(now, sent_changed=now)

    def remove(self, name: str) -> None:
        """Remove a node; the node that it fed is then fed by the node before it."""
        if name in self._members:
            del self._members[name]
            self.order.remove(name)
            # If the host joins again later, its network may work again.
            self._apart.discard(name)
            for member in self._members.values():
                if name in member.blocked:
                    member.blocked.remove(name)

    def links(self) -> dict[str, str]:
        """Return the feeder of each node that still needs data.

        >>> chain = Chain("leader")
        >>> chain.add_node("a", 0.0); chain.add_node("b", 0.0)
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
        """Return the nearest earlier node that is reachable and not slow, or else the source."""
        if self.source is None:
            return self.order[place - 1] if len(self.order) > 1 else None
        name = self.order[place]
        if not self._spread and name not in self._apart:
            for feeder in reversed(self.order[:place]):
                if feeder in self._members[name].blocked or feeder in self._apart:
                    continue
                # Slow nodes feed nobody. All of them are fed by the last of the fast nodes, which
                # has no other node to feed.
                if not self._members[feeder].moved:
                    return feeder
        return self.source

    def _block(self, name: str, feeder: str) -> None:
        """Record that a feeder could not connect to a node.

        A node with such failures towards ``MOST_BLOCKED`` others is fed by the source from then on.
        """
        member = self._members[name]
        if feeder not in member.blocked:
            member.blocked.append(feeder)
        pairs = [(a, b) for b, each in self._members.items() for a in each.blocked]
        for node in {name, feeder} - {self.source}:
            others = {a if b == node else b for a, b in pairs if node in (a, b)}
            if len(others - {self.source}) >= MOST_BLOCKED:
                self._apart.add(node)

    def blocked(self, name: str) -> list[str]:
        """Return the nodes that could not connect to a node."""
        return list(self._members[name].blocked) if name in self._members else []

    def after(self, name: str) -> list[str]:
        """Return all other nodes in feeding order, beginning with the one that this node feeds.

        >>> chain = Chain(None)
        >>> chain.add_node("a", 0.0); chain.add_node("b", 0.0); chain.add_node("c", 0.0)
        >>> chain.after("b")
        ['c', 'a']
        """
        place = self.order.index(name)
        return self.order[place + 1 :] + self.order[:place]

    def linked(self, name: str, now: float) -> None:
        """Record that a node has a new feeder, and restart its measurements and its followers'."""
        self._members[name].start(now)
        for follower in self.order[self.order.index(name) + 1 :]:
            self._members[follower].history.clear()

    def hear(self, name: str, now: float, received: int | None, left: int | None) -> None:
        """Record a node's report of the bytes it has received and still needs."""
        member = self._members[name]
        member.heard = now
        if received is None:
            return
        if received > member.received:
            member.stalls = 0
        member.received, member.left = received, left
        member.history.append((now, received))
        while len(member.history) > 2 and now - member.history[1][0] >= RATE_WINDOW_S:
            member.history.popleft()

    def hear_feeding(self, name: str, now: float, sent: int, sending: bool) -> None:
        """Record a feeder's report on the node that it feeds.

        Args:
            name: the node that is fed.
            now: time [s].
            sent: bytes sent to it; -1 before the connection is made.
            sending: whether the feeder is waiting for the link.
        """
        member = self._members.get(name)
        if member is None:
            return
        if sent != member.sent or not sending:
            member.sent, member.sent_changed = sent, now
        member.sending = sending

    def discount(self, seconds: float) -> None:
        """Extend all deadlines by the time [s] for which the leader itself was suspended."""
        for member in self._members.values():
            member.heard += seconds
            member.sent_changed += seconds

    def verdicts(self, now: float) -> list[Verdict]:
        """Return the nodes that must be removed or moved: all silent ones, or else at most one."""
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
        """Return the verdict on a node that its feeder cannot reach: STALLED or HOPELESS."""
        hopeless = self._members[name].stalls + 1 >= MOST_STALLS
        return Verdict(name, Why.HOPELESS if hopeless else Why.STALLED)

    def move(self, name: str, why: Why) -> None:
        """Move a node to the end of the chain, or to the start if it is the last one.

        Without a source it changes places with the node that it feeds. A node that its feeder could
        not even connect to stays and gets another feeder, unless that feeder is the source.
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
        """Return the first node whose link slows down itself and the nodes after it, or None."""
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
