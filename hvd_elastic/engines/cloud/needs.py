"""Decide how many spot and on-demand machines a run on a cloud may have now."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from hvd_elastic.engines.cloud.machines import Machines
from hvd_elastic.engines.cloud.provider import Machine, Offer
from hvd_elastic.jobs.progress import Measured
from hvd_elastic.policy.objective import Objective
from hvd_elastic.policy.spot import MachineNeed, MachinePlan, plan_machines
from hvd_elastic.run_events import (
    AgentStarted,
    HostDraining,
    HostReturned,
    Metrics,
    ReadEvent,
    RunStarted,
    Warned,
)


class RunNeeds:
    """Follows the progress of a run, which says whether its deadline forces machines on demand.

    Args:
        tell: called when it does, with why.
        objective: what the run is after; None: it has no deadline.

    Attributes:
        leaving: addresses of hosts that are drained, or that the cloud may end soon.
    """

    def __init__(
        self, machines: Machines, tell: Callable[[str], None], objective: Objective | None
    ) -> None:
        self._machines, self._tell = machines, tell
        self._deadline_s = None if objective is None else objective.deadline_s
        self._target = None if objective is None else objective.target
        self._measured = Measured()
        self._began: float | None = None
        """When the run began [Unix s]; None: it did not yet."""
        self._slot_throughput = 0.0
        """Examples/s of a slot, as last measured."""
        self._said = ""
        self._changing = threading.Lock()
        self.leaving: frozenset[str] = frozenset()

    def take_event(self, event: ReadEvent) -> None:
        """Take an event of the run."""
        with self._changing:
            self._measured.note_event(event)
            match event:
                case RunStarted() if self._began is None:  # later ones resume it
                    self._began = event.t
                case Metrics(size=size, throughput=speed) if size and speed:
                    self._slot_throughput = speed / size
                case Warned(host_at_risk=host) | HostDraining(host=host) if host:
                    self.leaving |= {host}
                case AgentStarted(host=host) | HostReturned(host=host):
                    self.leaving -= {host}  # or a new machine at an address that is free again

    def plan(self, held: Sequence[Machine], start_s: float | None) -> MachinePlan:
        """Return how many machines of each kind there may be.

        Args:
            start_s: time from an order until a machine can be used [s]; None: not known.
        """
        asked = self._machines.definition
        if not asked.spot:
            return MachinePlan(0, asked.most, "no spot machines are wanted")
        offers = self._machines.offers()
        spot = [each for each in held if each.offer.spot]
        began = time.time() if self._began is None else self._began
        need = MachineNeed(
            asked.most,
            len(spot),
            len(held) - len(spot),
            sum(each.address in self.leaving for each in spot),
            math.inf if self._deadline_s is None else began + self._deadline_s - time.time(),
            self._work_s(asked.most, offers),
            start_s or MachineNeed.start_s,
            asked.budget,
        )
        plan = plan_machines(need, offers)
        kind = plan.reason.partition(":")[0]
        if plan.on_demand and kind != self._said:
            self._tell(plan.reason)
        self._said = kind
        return plan

    def _work_s(self, machines: int, offers: Sequence[Offer]) -> float | None:
        """Return how long the rest of the work takes on so many machines [s]; None: not known."""
        slots = [min(each.slots for each in offers)] * machines
        with self._changing:
            goodput = self._measured.goodput(slots)
            todo = self._measured.remaining(self._target, None)
        if todo is None:
            return None
        # Without a noise scale, by the last throughput: then each example counts as useful.
        best = self._slot_throughput * sum(slots) if goodput is None else float(goodput[-1])
        return todo / best if best > 0 else None
