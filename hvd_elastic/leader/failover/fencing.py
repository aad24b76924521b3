"""Decides which of two leaders of one run has to end (split brain), and explains it to the user.

An agent refuses a second leader as long as it hears from its own. Leaders that share no host find
each other through a lease file where the run's checkpoints are kept
(:mod:`hvd_elastic.checkpoint.lease`); the one that does not hold the lease ends. A leader that has
started nothing yet always ends. If both are training and meet on a host that one of them could not
reach before, the one that began to lead later ends. Both compare the same two times, so exactly one
ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_elastic.checkpoint.lease import PATIENCE_S, Lease, LeaseHolder
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.formatting import date_words, duration_words
from hvd_elastic.wire.messages import LeaderIdentity


@dataclass(frozen=True)
class OtherLeader:
    """Another leader of the same run.

    Attributes:
        who: identity of that leader, and the time since it was last heard from.
        what: start of a sentence that says what it leads, for messages.
        forgotten_s: silence after which it counts as gone [s].
    """

    who: LeaderIdentity
    what: str
    forgotten_s: float

    @classmethod
    def of_agent(cls, host: str, led: LeaderIdentity, failure_timeout_s: float) -> OtherLeader:
        """Return the leader of ``host`` that its agent named when it refused or left this one."""
        return cls(led, f"host {host} is led by", failure_timeout_s)

    @classmethod
    def of_lease(cls, lease: Lease, place: str) -> OtherLeader:
        """Return the leader that holds the lease on the checkpoint folder ``place``."""
        who = LeaderIdentity(lease.run, lease.leader, lease.led_by, lease.led_since)
        return cls(who, f"checkpoints in {place} are kept by", PATIENCE_S)

    def goes_before(self, leader: str, led_since: float) -> bool:
        """Return whether the other began to lead before ``leader``; ids decide between equal times.

        >>> earlier, later = (OtherLeader(LeaderIdentity("r", x, "", t), "", 5) for x, t in [("a", 1), ("b", 2)])
        >>> earlier.goes_before("b", 2), later.goes_before("a", 1)
        (True, False)
        """  # noqa: E501
        return (self.who.led_since, self.who.leader) < (led_since, leader)

    @property
    def _since(self) -> str:
        return date_words(self.who.led_since)

    def explain(self, why: str) -> str:
        """Return the message of a leader that ends in favour of this other.

        Args:
            why: why it is this leader that ends; empty: it has started nothing.
        """
        end = f"which {why}, ends" if why else "ends, and has started nothing"
        run, said = self.who.run_id, f"{self.what} {self.who.led_by} since {self._since}"
        heard = (
            f"{duration_words(self.who.heard_s)} ago" if self.who.heard_s >= 0.05 else "just now"
        )
        return (
            f"run {run} has a leader: {said}, which was heard from {heard}. Two "
            f"would undo each other's work, so this one {end}. Look at the run there (hvd-elastic "
            f"status {run}), or end it there (hvd-elastic stop {run}). If that process is gone, "
            f"this is known after {self.forgotten_s:g} s: try again then"
        )

    def explain_takeover(self) -> str:
        """Return the message of a leader that was cut off and lost its last host to this one."""
        run = self.who.run_id
        return (
            f"run {run} was taken over by {self.who.led_by} (since {self._since}), while nothing "
            "was heard from this leader. This one ends and starts nothing again. Whether the run "
            f"still runs there or has ended, that machine knows: hvd-elastic status {run}"
        )


class Fence:
    """Decides whether this leader has to end because another one leads its run.

    Methods that decide return the reason, as a message for the user; an empty string means that
    this leader continues.

    Args:
        failure_timeout_s: silence after which an agent accepts another leader [s].

    Attributes:
        has_led: whether this leader has started or taken over anything.
        gave_way: whether it ends and leaves the running workers to the other leader.
        led_elsewhere: whether it ends because another leader leads the run.
    """

    def __init__(self, run_id: str, place: Path | CheckpointUrl, failure_timeout_s: float) -> None:
        self.identity = _new_identity(run_id)
        self.has_led = False
        self.gave_way = False
        self.led_elsewhere = False
        self._own_ids = {self.identity.leader}
        self._place = place
        self._failure_timeout_s = failure_timeout_s
        self._lease: LeaseHolder | None = None

    def lead_anew(self) -> None:
        """Take a new identity, with which to return to agents that were unreachable."""
        self.identity = _new_identity(self.identity.run_id)
        self._own_ids.add(self.identity.leader)

    @contextlib.contextmanager
    def acquire(
        self, on_settled: Callable[[], None], on_other: Callable[[Lease, bool], None]
    ) -> Iterator[None]:
        """Hold a lease on the checkpoint folder; see :class:`LeaseHolder` for the arguments."""
        own = Lease.of_this_process(self.identity.run_id, self.identity.led_since)
        self._lease = LeaseHolder(self._place, own, on_settled, on_other)
        try:
            yield
        finally:
            self._lease.release_lease()

    @property
    def has_lease_file(self) -> bool:
        """Return whether this leader uses a lease."""
        return self._lease is not None

    def refused(self, host: str, led: LeaderIdentity, *, leads: bool, has_host: bool) -> str:
        """Decide after the agent of ``host`` refused this leader in favour of another one.

        Args:
            leads: whether this leader already leads the run.
            has_host: whether any agent follows this leader.
        """
        other = OtherLeader.of_agent(host, led, self._failure_timeout_s)
        if led.leader in self._own_ids:
            return ""  # the agent has not yet noticed that this leader was cut off and returned
        if not leads:
            return self._give_way(other)
        if other.goes_before(self.identity.leader, self.identity.led_since):
            return self._give_way(other, "began later")
        # With a host of its own, this leader continues: the other one ends when they meet. Until
        # then this host is tried again.
        return "" if has_host else self._give_way(other, "has no host left")

    def left(self, host: str, led: LeaderIdentity) -> str:
        """Return the reason to end after the last host was taken over by another leader."""
        self.led_elsewhere = True
        return OtherLeader.of_agent(host, led, self._failure_timeout_s).explain_takeover()

    def met_lease(self, lease: Lease, *, lost: bool) -> str:
        """Return the reason to end since another live leader holds the lease.

        Args:
            lease: the other leader's lease.
            lost: whether this leader has held it before. Then its workers train beside those of the
                other, and end; else they are those that the other leader had.
        """
        other = OtherLeader.of_lease(lease, str(self._place))
        if lost:
            return self._give_way(other, "has lost its lease")
        self.led_elsewhere = self.gave_way = True
        return other.explain("has no lease" if self.has_led else "")

    def _give_way(self, other: OtherLeader, why: str = "") -> str:
        """Note that this leader ends; return the message.

        Args:
            why: why it is this leader that ends; empty: it leads no workers that would end too.
        """
        self.led_elsewhere = True
        self.gave_way = not why
        if not why and self.has_led:  # it was cut off, and has just tried to return to its hosts
            why = "lost its hosts meanwhile"
        return other.explain(why)


def _new_identity(run_id: str) -> LeaderIdentity:
    led_by = f"process {os.getpid()} on {socket.gethostname()}"
    return LeaderIdentity(run_id, secrets.token_hex(8), led_by, time.time())
