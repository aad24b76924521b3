"""Decides which of two leaders of one run ends, and what it says.

Every agent knows who leads it and refuses anybody else, as long as that one is heard of; leaders
that share no host meet at the place of the run's checkpoints (:mod:`hvd_elastic.checkpoint.lease`).
A leader that has begun nothing gives way to whoever is there. One that trains already meets another
only on a host or a place that it could not ask before; then the one that began to lead later gives
way. Both compare the same two times, so exactly one of them ends.
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

from hvd_elastic.checkpoint.lease import PATIENCE_S, Claim, ClaimKeeper
from hvd_elastic.checkpoint.url import CheckpointUrl
from hvd_elastic.wire.messages import LeaderIdentity

__all__ = ["Fence", "Rival"]

_BACKLOG_S = 2.0
"""What hosts said while this process stood still is read within this time."""


@dataclass(frozen=True)
class Rival:
    """Another leader.

    Attributes:
        who: its identity, and how long ago it was heard of.
        what: it leads, in words.
        forgotten_s: after so much silence it counts as gone [s].
    """

    who: LeaderIdentity
    what: str
    forgotten_s: float

    @classmethod
    def of_agent(cls, host: str, led: LeaderIdentity, failure_timeout_s: float) -> Rival:
        """Return who leads ``host``, as its agent said when it refused or left this leader."""
        return cls(led, f"host {host} is led by", failure_timeout_s)

    @classmethod
    def of_claim(cls, claim: Claim, place: str) -> Rival:
        """Return who has just renewed its claim on the place of the checkpoints."""
        who = LeaderIdentity(claim.run, claim.leader, claim.led_by, claim.led_since)
        return cls(who, f"checkpoints in {place} are kept by", PATIENCE_S)

    def goes_before(self, leader: str, led_since: float) -> bool:
        """Return whether it began to lead before ``leader`` did.

        >>> earlier, later = (Rival(LeaderIdentity("r", x, "", t), "", 5) for x, t in [("a", 1), ("b", 2)])
        >>> earlier.goes_before("b", 2), later.goes_before("a", 1)
        (True, False)
        """  # noqa: E501
        return (self.who.led_since, self.who.leader) < (led_since, leader)

    @property
    def _since(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.who.led_since))

    def explain(self, why: str) -> str:
        """Return what a leader that gives way says, and what its user can do.

        Args:
            why: it is that one; empty: it has begun nothing.
        """
        end = f"which {why}, ends" if why else "ends, and has started nothing"
        run, said = self.who.run_id, f"{self.what} {self.who.led_by} since {self._since}"
        heard = f"{self.who.heard_s:.1f} s ago" if self.who.heard_s >= 0.05 else "just now"
        return (
            f"run {run} has a leader: {said}, which was heard from {heard}. Two "
            f"would undo each other's work, so this one {end}. Look at the run there (hvd-elastic "
            f"status {run}), or end it there (hvd-elastic stop {run}). If that process is gone, "
            f"this is known after {self.forgotten_s:g} s: try again then"
        )

    def explain_takeover(self) -> str:
        """Return what a leader says that was silent while this one took its last host over."""
        run = self.who.run_id
        return (
            f"run {run} was taken over by {self.who.led_by} (since {self._since}), while nothing "
            "was heard from this leader. This one ends and starts nothing again. Whether the run "
            f"goes on there or has ended, that machine knows: hvd-elastic status {run}"
        )


class Fence:
    """Says whether this leader has to end since another one leads its run.

    Each question is answered with the reason, for the user; empty: this leader goes on.

    Args:
        run_id: the run.
        place: of its checkpoints.
        failure_timeout_s: after so much silence agents forget their leader [s].

    Attributes:
        identity: of this leader.
        has_led: it has begun something.
        gave_way: it ends and leaves to the other one what lives on the hosts.
        led_elsewhere: it ends since another one leads.
    """

    def __init__(self, run_id: str, place: Path | CheckpointUrl, failure_timeout_s: float) -> None:
        self.identity = _new_identity(run_id)
        self.has_led = False
        self.gave_way = False
        self.led_elsewhere = False
        self._own_ids = {self.identity.leader}
        self._place = place
        self._failure_timeout_s = failure_timeout_s
        self._claim: ClaimKeeper | None = None

    def lead_anew(self) -> None:
        """Come as another leader, to agents that were out of reach."""
        self.identity = _new_identity(self.identity.run_id)
        self._own_ids.add(self.identity.leader)

    @contextlib.contextmanager
    def claim(
        self, on_settled: Callable[[], None], on_rival: Callable[[Claim, float], None]
    ) -> Iterator[None]:
        """Claim the place of the checkpoints; see :class:`ClaimKeeper` for the arguments."""
        own = Claim.of_this_process(self.identity.run_id, self.identity.led_since)
        self._claim = ClaimKeeper(self._place, own, on_settled, on_rival)
        try:
            yield
        finally:
            self._claim.end()

    @property
    def claims(self) -> bool:
        """Return whether there is a claim."""
        return self._claim is not None

    def refused(self, host: str, led: LeaderIdentity, *, leads: bool, has_host: bool) -> str:
        """The agent of ``host`` is led by another leader.

        Args:
            host: where.
            led: who.
            leads: this leader has taken over what there was.
            has_host: some agent follows it.
        """
        rival = Rival.of_agent(host, led, self._failure_timeout_s)
        if led.leader in self._own_ids:
            return ""  # an agent that has not noticed yet that this leader was cut off
        if not leads:
            return self._give_way(rival)
        if rival.goes_before(self.identity.leader, self.identity.led_since):
            return self._give_way(rival, "began later")
        # If it has a host, the other one gives way as soon as they meet; the host is tried again.
        return "" if has_host else self._give_way(rival, "has no host left")

    def left(self, host: str, led: LeaderIdentity) -> str:
        """``host``, the last one, follows another leader: nothing was heard of this one."""
        self.led_elsewhere = True
        return Rival.of_agent(host, led, self._failure_timeout_s).explain_takeover()

    def claimed(self, claim: Claim, seen: float, *, trains: bool, last_read: float) -> str:
        """Another leader has claimed the place.

        Args:
            claim: its claim.
            seen: when that was first seen [s].
            trains: this leader has workers.
            last_read: when something was last read from one of its agents [s].
        """
        assert self._claim is not None
        rival, own = Rival.of_claim(claim, str(self._place)), self._claim.claim
        if not trains:
            return self._give_way(rival, "has no process that trains")
        if rival.goes_before(own.leader, own.led_since):
            return self._give_way(rival, "began later")
        if last_read > seen + _BACKLOG_S:
            self._claim.insist()  # it gives way as soon as it sees that
        return ""

    def claimed_before(self, claim: Claim, *, found_workers: bool) -> str:
        """Another leader had claimed the place when this one asked the hosts who leads them."""
        assert self._claim is not None
        if not found_workers:
            return self._give_way(Rival.of_claim(claim, str(self._place)))
        self._claim.insist()  # its hosts have lost that leader
        return ""

    def _give_way(self, rival: Rival, why: str = "") -> str:
        """Return the reason; ``why``: this one, empty where it leads nothing that would end too."""
        self.led_elsewhere = True
        self.gave_way = not why
        if not why and self.has_led:  # it was cut off, and asked its hosts again
            why = "lost its hosts meanwhile"
        return rival.explain(why)


def _new_identity(run_id: str) -> LeaderIdentity:
    led_by = f"process {os.getpid()} on {socket.gethostname()}"
    return LeaderIdentity(run_id, secrets.token_hex(8), led_by, time.time())
