"""Two leaders for one run: which of them goes on, and what the other one says.

Every agent knows who leads it and refuses anybody else, as long as that one is heard of. A leader
that has begun nothing gives way to whoever is there. One that trains already meets another only on
a host that it could not ask before; then the one that began to lead later gives way. Both compare
the same two times, so it is exactly one of them that ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvd_elastic.launch.protocol import Message

__all__ = ["Rival"]


@dataclass(frozen=True)
class Rival:
    """A leader that leads an agent of this run.

    Attributes:
        host: of that agent.
        leader: tells it from all other leaders.
        led_by: what users call it.
        led_since: when it began to lead [Unix seconds, of its own clock].
        heard_s: how long ago the agent heard of it [s].
    """

    host: str
    leader: str
    led_by: str
    led_since: float
    heard_s: float

    @classmethod
    def of(cls, host: str, refusal: Message) -> Rival:
        """Whom the agent of ``host`` said it is led by."""
        return cls(host, **{name: refusal[name] for name in list(cls.__annotations__)[1:]})

    def goes_before(self, leader: str, led_since: float) -> bool:
        """Whether it began to lead before ``leader`` did.

        >>> earlier, later = Rival("n1", "a", "", 10.0, 0.0), Rival("n1", "b", "", 20.0, 0.0)
        >>> earlier.goes_before("b", 20.0), later.goes_before("a", 10.0)
        (True, False)
        """
        return (self.led_since, self.leader) < (led_since, leader)

    def explain(self, run_id: str, failure_timeout_s: float, *, began: bool) -> str:
        """Why this leader ends, and what its user can do.

        Args:
            run_id: of the run that both lead.
            failure_timeout_s: after so much silence an agent gives its leader up.
            began: this leader has started workers.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.led_since))
        end = "which began later, ends" if began else "ends, and has started nothing"
        return (
            f"run {run_id} has a leader: host {self.host} is led by {self.led_by} since {since}, "
            f"and heard of it {self.heard_s:.1f} s ago. Two would undo each other's work, so this "
            f"one {end}. Look at the run there (hvd-elastic status {run_id}), or end it there "
            f"(hvd-elastic stop {run_id}). If that process is gone, its hosts know after "
            f"{failure_timeout_s:g} s: try again then"
        )
