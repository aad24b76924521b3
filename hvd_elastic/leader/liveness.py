"""Decides that a host is lost, and finds workers that are silent, stuck or waited for."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_elastic.control import events as ev
from hvd_elastic.control.progress import ProgressWatch
from hvd_elastic.control.state_machine import Phase
from hvd_elastic.formatting import duration_words
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.run_events import LogNote

_COMMAND_ENDS_S = 5.0
"""How long after the grace time the agent of a silent host may take to end a plain command [s]."""


class LivenessWatch:
    """Watches the heartbeats of agents and workers."""

    def __init__(self, run: LedRun, executor: Executor) -> None:
        self._run = run
        self._executor = executor
        self._watch = ProgressWatch(run.spec.failure_timeout_s)

    def begin_anew(self) -> None:
        """Forget all heartbeats."""
        self._watch = ProgressWatch(self._run.spec.failure_timeout_s)

    def finished(self, worker: str) -> None:
        """Note that a worker's training function returned."""
        self._watch.finished(worker)

    @property
    def longest_period_s(self) -> float:
        """Return the longest time between two steps with which the ranks agreed [s]."""
        return self._watch.longest_period_s

    def give_up_silent(self, now: float) -> float | None:
        """Give up silent hosts and workers; called often.

        Returns:
            How long all hosts have been silent [s], if it is more likely that this machine was cut
            off from them; none is given up then. Otherwise None.
        """
        silence = self._run.agents.silence(now)
        if silence is None:
            return None
        timeout_s = self._run.spec.failure_timeout_s
        if self._run.spec.plain:
            # It may start again elsewhere once the silent host has certainly ended it, not before.
            timeout_s = max(timeout_s, self._run.spec.leader_grace_s) + _COMMAND_ENDS_S
        if self._is_cut_off(silence.values()):
            least_s = min(silence.values())
            return least_s if least_s > timeout_s else None
        for name, cause, silent_s in self._run.agents.drop_silent(silence, timeout_s):
            self._executor.agent_lost(name, cause, silent_s)
        self._run.readers.give_up_silent(now)
        self._look_at_progress()
        return None

    def _is_cut_off(self, silence: Iterable[float]) -> bool:
        """Return whether every host of a training run is silent.

        It is then more likely that this machine was cut off than that all hosts failed.
        """
        executor = self._executor
        has_members = bool(self._run.workers.places and executor.machine.members)
        trains = has_members and executor.finish is None
        least_s = min(silence, default=0.0)
        # Heartbeats come at different moments: when one host exceeds the timeout, the others
        # count as silent too if they have reached half of it.
        overdue = least_s > self._run.spec.failure_timeout_s / 2
        return trains and self._run.spec.leader_grace_s > 0 and overdue

    def _look_at_progress(self) -> None:
        executor, places = self._executor, self._run.workers.places
        machine = executor.machine
        self._watch.keep_only(places)
        for agent in self._run.agents.by_host.values():
            for worker, activity in agent.take_activities().items():
                if worker in places:
                    self._watch.store_heartbeat(worker, activity)
                    self._run.readers.watch.store_reading(worker, activity.reading)
        for silent in self._watch.silent():
            self._watch.forget(silent.worker)
            executor.tell(silent)
        generation, ranks = machine.training
        if machine.phase is Phase.RUNNING:
            self._run.readers.watch_ranks([(member.worker, member.host) for member in ranks])
        members = [member.worker for member in ranks if member.worker in places]
        found = self._watch.stuck(generation, members)
        if isinstance(found, ev.GenerationStuck):
            self._run.progress.ended_at(self._watch.furthest(members))
        for event in found if isinstance(found, list) else [found]:
            executor.tell(event)
        for worker, step_s, line in self._watch.busy(generation, members):
            place = f", which is at {line}" if line else ""
            name = self._run.workers.name(worker)
            message = (
                f"the others wait for worker {name}{place}, {duration_words(step_s)} into its step"
            )
            self._run.journal.emit(LogNote(message))
