"""Finds the workers that the next generation can have, and how long it waits for more of them."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.fleet import Fleet, Stage, Worker
from hvd_elastic.control.outbox import Outbox
from hvd_elastic.control.plan import Plan

_START_SPREAD = 0.15  # workers started together become warm within this share of the first's time


class Candidates:
    """The workers that could be announced next.

    Args:
        out: is told when to look again.
        config: limits and timeouts of the run.
        plan: slots that should hold a worker.
        fleet: workers that exist.
    """

    def __init__(self, out: Outbox, config: MachineConfig, plan: Plan, fleet: Fleet) -> None:
        self._out = out
        self._config = config
        self._plan = plan
        self._fleet = fleet
        # start times of waits; None: nothing is waited for
        self._enough_since: float | None = None
        self._short_since: float | None = None

    def forget_waits(self) -> None:
        """Let the next wait for more workers begin anew."""
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
