"""Two leaders for one run: which of them goes on, and what the other one says.

Every agent knows who leads it and refuses anybody else, as long as that one is heard of; leaders
that share no host meet at the place of the run's checkpoints, see
:mod:`hvd_elastic.checkpoint.lease`. A leader that has begun nothing gives way to whoever is there.
One that trains already meets another only on a host or a place that it could not ask before; then
the one that began to lead later gives way. Both compare the same two times, so it is exactly one
of them that ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvd_elastic.checkpoint.lease import PATIENCE_S, Claim
from hvd_elastic.wire.messages import LeaderIdentity

__all__ = ["Rival"]


@dataclass(frozen=True)
class Rival:
    """Another leader.

    Attributes:
        run_id: of what it leads; of this run, but where two were given one place.
        leader: tells it from all other leaders.
        led_by: what users call it.
        led_since: when it began to lead [Unix seconds, of its own clock].
        heard_s: how long ago it was heard of [s].
        what: it leads, in words.
        forgotten_s: after so much silence it counts as gone [s].
    """

    run_id: str
    leader: str
    led_by: str
    led_since: float
    heard_s: float
    what: str
    forgotten_s: float

    @classmethod
    def of_agent(cls, host: str, led: LeaderIdentity, failure_timeout_s: float) -> Rival:
        """Return who leads ``host``, as its agent said when it refused or left this leader."""
        who = led.run_id, led.leader, led.led_by, led.led_since, led.heard_s
        return cls(*who, f"host {host} is led by", failure_timeout_s)

    @classmethod
    def of_claim(cls, claim: Claim, place: str) -> Rival:
        """Who has renewed its claim on the place of the checkpoints just now."""
        what = f"checkpoints in {place} are kept by"
        said = claim.run, claim.leader, claim.led_by, claim.led_since
        return cls(*said, 0.0, what, PATIENCE_S)

    def goes_before(self, leader: str, led_since: float) -> bool:
        """Whether it began to lead before ``leader`` did.

        >>> earlier, later = (Rival("r", x, "", t, 0, "", 5) for x, t in (("a", 1), ("b", 2)))
        >>> earlier.goes_before("b", 2), later.goes_before("a", 1)
        (True, False)
        """
        return (self.led_since, self.leader) < (led_since, leader)

    def explain(self, why: str) -> str:
        """What a leader that gives way says, and what its user can do.

        Args:
            why: it is that one; empty: it has begun nothing.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.led_since))
        end = f"which {why}, ends" if why else "ends, and has started nothing"
        run, said = self.run_id, f"{self.what} {self.led_by} since {since}"
        heard = f"{self.heard_s:.1f} s ago" if self.heard_s >= 0.05 else "just now"
        return (
            f"run {run} has a leader: {said}, which was heard from {heard}. Two "
            f"would undo each other's work, so this one {end}. Look at the run there (hvd-elastic "
            f"status {run}), or end it there (hvd-elastic stop {run}). If that process is gone, "
            f"this is known after {self.forgotten_s:g} s: try again then"
        )

    def explain_takeover(self) -> str:
        """What a leader says that was silent while this one took its last host over."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.led_since))
        return (
            f"run {self.run_id} was taken over by {self.led_by} (since {since}), while nothing was "
            "heard from this leader. This one ends and starts nothing again. Whether the run goes "
            f"on there or has ended, that machine knows: hvd-elastic status {self.run_id}"
        )
