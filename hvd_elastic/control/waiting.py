"""Reports what a run waits for, each time that changes, and when waiting is in vain."""

from __future__ import annotations

from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.fleet import Fleet, Stage
from hvd_elastic.control.membership import SlotId
from hvd_elastic.control.outbox import Outbox
from hvd_elastic.control.plan import Plan
from hvd_elastic.formatting import count, hosts_named, plural
from hvd_elastic.run_events import Waiting


class WaitingReport:
    """Emits ``waiting`` events.

    Args:
        out: outbox for the events.
        config: limits and timeouts of the run.
        plan: slots that should hold a worker.
        fleet: agents and workers that exist.

    Attributes:
        saved_step: step of the checkpoint that has the state of workers that had to go; None: none
            has it.
    """

    def __init__(self, out: Outbox, config: MachineConfig, plan: Plan, fleet: Fleet) -> None:
        self._out = out
        self._config = config
        self._plan = plan
        self._fleet = fleet
        self._starting_since: float | None = None
        self._last = ""
        self.saved_step: int | None = None

    @property
    def for_start(self) -> bool:
        """Return whether the last report was about workers that are starting."""
        return self._starting_since is not None

    def is_over(self) -> None:
        """Reset the report, because the run no longer waits."""
        self._starting_since, self._last, self.saved_step = None, "", None

    def emit(self, have: int, now: float) -> None:
        """Report what is missing beside ``have`` usable workers, if that has changed."""
        reason = self._what_is_missing(have, now)
        if reason != self._last:
            self._last = reason
            self._out.emit(Waiting(reason, have, self._config.min_np))

    def _what_is_missing(self, have: int, now: float) -> str:
        need, slots = self._config.min_np, self._plan.offered()
        if len(self._plan.desired) >= need:
            return self._who_is_starting(now)
        self._starting_since = None
        if len(slots) < need:
            verb = "is" if need == 1 else "are"
            what = f"the hosts have {count(len(slots), 'slot')}, at least {need} {verb} needed"
            if self._plan.draining:
                what += f" ({hosts_named(sorted(self._plan.draining))} drained and not counted)"
            if self.saved_step is not None:
                what += f". Nothing is lost: the checkpoint of step {self.saved_step} is complete"
        else:
            what = "; ".join(self._fleet.troubles_in_brief(slots))
        more = f"{need - have} more of " if have else ""
        return f"waiting for {more}{count(need, 'worker')}: {what}"

    def _who_is_starting(self, now: float) -> str:
        """Return which workers are starting; after a while, how many are warm and which are not."""
        desired = self._plan.desired
        empty = [slot for slot in desired if not self._is_ready(slot)]
        if not empty:
            return "workers are trying to meet"
        hosts = [host for host, _ in empty]
        if self._starting_since is None:
            self._starting_since = now
            what = "the command" if self._config.plain else "workers"
            return f"starting {what} on {', '.join(dict.fromkeys(hosts))}"
        slow_at = self._starting_since + self._config.slow_start_s
        if now < slow_at:
            self._out.wake(slow_at)
            return self._last
        warm = len(desired) - len(empty)
        verb = "is" if 1 in (warm, len(desired)) else "are"
        return (
            f"{warm} of {count(len(desired), 'worker')} {verb} warm, "
            f"waiting for {hosts_named(hosts)}"
        )

    def _is_ready(self, slot: SlotId) -> bool:
        worker = self._fleet.worker_at(slot)
        return worker is not None and worker.stage is not Stage.STARTING and not worker.leaving

    # -- in vain ---------------------------------------------------------------------------

    def why_in_vain(self, *, has_trained: bool) -> str:
        """Return why no wait can bring enough workers; empty: it may.

        Args:
            has_trained: whether the run has ever trained.
        """
        nobody = "" if has_trained else self._nobody_is_known()
        if nobody:
            return nobody
        slots, need = self._plan.offered(), self._config.min_np
        conceivable = [slot for slot in slots if self._fleet.conceivable(slot)]
        if len(conceivable) >= need or len(slots) < need:
            return ""  # with too few slots in the hostfile, the run waits for more
        if any(worker.holds_state for worker in self._fleet.present(*Stage)):
            return ""  # the state is safe, and saving the hostfile after a repair starts new tries
        return (
            f"{len(conceivable)} of {len(slots)} slots can be used and at least "
            f"{need} are needed: {'; '.join(self._fleet.troubles(slots))}"
        )

    def _nobody_is_known(self) -> str:
        """Return the error that no host name of the hostfile can be looked up; empty: one can."""
        names = [host.name for host in self._plan.hosts]
        tries = self._config.max_unknown_tries
        if not self._fleet.nobody_is_known(names, tries):
            return ""
        return (
            f"the {plural('name', len(names))} of {hosts_named(names)} cannot be looked up "
            f"({count(tries, 'try')}), and the hostfile has no other host. Mend the hostfile, or "
            "give the hosts a HostName in the ssh configuration"
        )
