"""Decides which slots should hold a worker, from the hostfile, the limits and users' requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvd_elastic.control.commands import Outbox
from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.fleet import Fleet, Stage, Worker
from hvd_elastic.control.ranks import SlotId, choose_slots, list_slots, target_size
from hvd_elastic.formatting import count, hosts_named, plural
from hvd_elastic.run_events import HostSlots, Waiting

_NOT_ASKED_FOR = 3  # above the highest cost of a slot, so that requested slots always come first


class Plan:
    """Holds the slots that should have a worker.

    Args:
        fleet: knows which slots can be used, and starts the missing workers.

    Attributes:
        requested_np, preferred: size and slots that were requested during the run.
        desired: slots that should hold a member.
        spare: further slots, for warm standbys.
        draining: drained hosts, with the time until which their workers may train [s], None if
            unknown.
    """

    def __init__(self, config: MachineConfig, fleet: Fleet) -> None:
        self.config = config
        self.fleet = fleet
        self.hosts: tuple[HostSlots, ...] = ()
        self.requested_np: int | None = None
        self.preferred: frozenset[SlotId] = frozenset()
        # The keys are the slots, in order; looking one up takes the same time for any number.
        self.desired: dict[SlotId, None] = {}
        self.spare: dict[SlotId, None] = {}
        self.draining: dict[str, float | None] = {}
        self._empty: set[str] = set()

    def drain(self, host: str, until: float | None) -> None:
        """Stop using a host; its workers may train until ``until`` [s]."""
        self.draining[host] = until
        self._empty.discard(host)

    def drain_only(self, hosts: Iterable[str]) -> None:
        """Allow the use of all drained hosts except these."""
        self.draining = {host: self.draining[host] for host in self.draining if host in hosts}
        self._empty &= self.draining.keys()

    def emptied(self) -> list[str]:
        """Return the drained hosts without workers that were not returned before."""
        held = {worker.host for worker in self.fleet.workers.values()}
        found = [host for host in self.draining if host not in held | self._empty]
        self._empty.update(found)
        return found

    def end_of(self, workers: Iterable[Worker]) -> float | None:
        """Return when the first of the workers' hosts has to be left [s]; None if unknown."""
        ends = (self.draining.get(worker.host) for worker in workers)
        return min((end for end in ends if end is not None), default=None)

    def offered(self) -> list[SlotId]:
        """Return the slots of the hostfile except those of drained hosts."""
        return list_slots(host for host in self.hosts if host.name not in self.draining)

    def update(self, now: float) -> None:
        """Choose the slots, start the missing workers, and stop agents without workers."""
        slots, fleet, spares = self.offered(), self.fleet, self.config.spares
        config = self.config
        if config.plain and fleet.workers:
            # It cannot continue elsewhere, and must not run twice.
            self.desired = dict.fromkeys(worker.slot for worker in fleet.workers.values())
            fleet.stop_idle_agents([*self.desired])
            return
        target = target_size(
            len(slots), config.min_np, config.max_np, config.np, self.requested_np, spares
        )
        self.desired = dict.fromkeys(choose_slots(slots, target, fleet.usable, self._cost))
        rest = [slot for slot in slots if slot not in self.desired]
        self.spare = dict.fromkeys(choose_slots(rest, spares, fleet.usable, self._cost))
        filled = [*self.desired, *self.spare]
        hoped_for = choose_slots(slots, target + spares, fleet.conceivable, self._cost)
        fleet.start(filled, hoped_for, now)
        fleet.stop_idle_agents(filled)

    def _cost(self, slot: SlotId) -> int:
        """Return the cost of a slot, such that requested and pinned slots come before others."""
        asked = slot in self.preferred or slot[0] in self.config.pinned
        if not asked and (self.preferred or self.config.pinned):
            return self.fleet.cost(slot) + _NOT_ASKED_FOR
        return self.fleet.cost(slot)


_START_SPREAD = 0.15  # workers started together become warm within this share of the first's time


class Candidates:
    """The workers that could be announced next."""

    def __init__(self, out: Outbox, plan: Plan) -> None:
        self._out, self._plan = out, plan
        self._config, self._fleet = plan.config, plan.fleet
        # start times of waits; None: nothing is waited for
        self._enough_since: float | None = None
        self._short_since: float | None = None

    def forget_waits(self) -> None:
        """Let the next wait for more workers start again."""
        self._enough_since = self._short_since = None

    # -- who -------------------------------------------------------------------------------

    def available(self, now: float) -> list[Worker]:
        """Return the workers in desired slots that can be announced now, except current members."""
        found = []
        for worker in self._fleet.present(Stage.READY, Stage.WAITING):
            if worker.slot not in self._plan.desired:
                continue
            if now < worker.retry.at:
                self._out.wake(worker.retry.at)
                continue
            found.append(worker)
        return found

    def state_holder(self) -> Worker | None:
        """Return the worker outside the desired slots that alone holds the newest state, if any."""
        holders = [w for w in self._fleet.present(Stage.WAITING) if w.holds_state]
        newest = max((worker.progress for worker in holders), default=None)
        best = [worker for worker in holders if worker.progress == newest]
        if not best or any(worker.slot in self._plan.desired or worker.saved for worker in best):
            return None
        return best[0]

    def is_superfluous(self, worker: Worker) -> bool:
        """Return whether a worker has no desired or spare slot and no state that must be kept."""
        if worker.slot in self._plan.spare and not worker.holds_state:
            return False
        return worker.slot not in self._plan.desired and worker is not self.state_holder()

    # -- how long to wait for more ---------------------------------------------------------

    def start_at(self, available: Sequence[Worker], holder: Worker | None, now: float) -> float:
        """Return until when enough available workers wait for the rest [s]."""
        if self._enough_since is None:
            self._enough_since = now
        return self._enough_since + self._patience(available, holder)

    def _patience(self, available: Sequence[Worker], holder: Worker | None) -> float:
        survivors = [worker for worker in available if worker.holds_state]
        if len(survivors) >= self._config.min_np or len(available) >= len(self._plan.desired):
            return 0.0
        if survivors or holder:
            return self._config.join_window_s
        return self._config.start_grace_s

    def are_all_here(self, newcomers: Sequence[Worker], staying: int, now: float) -> bool:
        """Return whether newcomers to running workers wait for no more of them."""
        if staying + len(newcomers) >= len(self._plan.desired):
            return True
        first = min(newcomers, key=lambda worker: worker.ready_at)
        took_s = first.ready_at - first.started_at
        end = first.ready_at + self._config.join_window_s
        limit = first.ready_at + self._config.longest_join_window_s
        for worker in self._fleet.present(Stage.STARTING):
            if worker.slot in self._plan.desired and worker.started_at + took_s <= limit:
                due = worker.started_at + (1 + _START_SPREAD) * took_s
                end = max(end, min(due, limit))
        return self._is_past(end, now)

    def may_train_on(self, going: Sequence[Worker], ready: int, now: float) -> bool:
        """Return whether members on drained hosts train on while their replacements start."""
        end = self._plan.end_of(going)
        if end is None or ready >= max(len(self._plan.desired), self._config.min_np):
            return False
        return not self._is_past(end, now)

    def are_replacements_awaited(self, now: float) -> bool:
        """Return whether members that have to leave train on until enough others are ready.

        They do so for at most ``regroup_timeout_s``.
        """
        if len(self._plan.desired) < self._config.min_np:
            return False
        if self._short_since is None:
            self._short_since = now
        return not self._is_past(self._short_since + self._config.regroup_timeout_s, now)

    def _is_past(self, end: float, now: float) -> bool:
        """Return whether a time is over; if it is not, ask to look again then."""
        if now < end:
            self._out.wake(end)
        return now >= end


class WaitingReport:
    """Emits ``waiting`` events.

    Attributes:
        saved_step: step of the checkpoint that has the state of workers that had to go; None: none
            has it.
    """

    def __init__(self, out: Outbox, plan: Plan) -> None:
        self._out, self._plan = out, plan
        self._config, self._fleet = plan.config, plan.fleet
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
            f"({count(tries, 'try')}), and the hostfile has no other host. Fix the hostfile, or "
            "give the hosts a HostName in the ssh configuration"
        )
