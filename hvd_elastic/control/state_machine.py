"""Controls a run as a state machine: events in, commands out; no clock, no threads, no files.

Three things are kept apart. The *plan* is what the hostfile and the user want. *Requested* is what
agents and workers were asked to do (an agent started, a generation announced, a worker asked to
leave). *Observed* is what they reported. Every event changes the plan or what was observed; then
the machine compares the three and returns commands until nothing is missing.

A run moves through four phases::

    ASSEMBLING ──announce──► FORMING ──all joined──► RUNNING ──announce──► FORMING
        ▲                       │                      │
        └── all accounted for ── REGROUPING ◄──────────┘  broken (Abort), or too few (Hold)

``ASSEMBLING``: there is no generation; workers wait or are being started. ``FORMING``: a
generation was announced, and not every member has joined it. ``RUNNING``: all members have joined.
``REGROUPING``: the generation has ended, and some members have not yet reported whether they
survived and at which step. At most one generation is being formed at any time.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hvd_elastic import run_events
from hvd_elastic.control import events as ev
from hvd_elastic.control.backoff import FailureBackoff
from hvd_elastic.control.commands import (
    Abort,
    Announce,
    Command,
    Finish,
    Hold,
    KillWorker,
    Member,
    Outbox,
    SaveState,
)
from hvd_elastic.control.config import MachineConfig
from hvd_elastic.control.endings import (
    NEEDS_LESS_MEMORY,
    Endings,
    crashed,
    how_it_ended,
)
from hvd_elastic.control.fleet import AgentState, Fleet, Stage, Worker
from hvd_elastic.control.plan import Candidates, Plan, WaitingReport
from hvd_elastic.control.ranks import SlotId, assign_ranks, describe_change
from hvd_elastic.formatting import worker_name
from hvd_elastic.run_events import Departure

__all__ = ["MachineConfig", "Phase", "RunMachine"]

_LAST_HOPE = 5  # multiple of the timeout for silent members that alone hold the training state
_MAX_PASSES = 100  # far above what is ever needed: the first pass without a command is the last


class Phase(enum.Enum):
    """Phase of a run; see the module's docstring."""

    ASSEMBLING = "assembling"
    FORMING = "forming"
    RUNNING = "running"
    REGROUPING = "regrouping"


_TOGETHER = (Phase.FORMING, Phase.RUNNING)  # phases in which a generation is alive


@dataclass
class Generation:
    """The last announced generation and what happened to it.

    Attributes:
        number, members, root: as announced; number 0 before the first announcement.
        formed: whether all members have joined it.
        broken: why it broke; empty: it continues, or was held on purpose.
        member_lost: whether a member died, which explains why it broke.
        crashed: whether one was ended by what its own code did.
        losses: what happened to lost members, by slot.
    """

    number: int = 0
    members: tuple[Member, ...] = ()
    root: str | None = None
    formed: bool = False
    broken: str = ""
    member_lost: bool = False
    crashed: bool = False
    out_of_memory: bool = False
    losses: dict[SlotId, str] = field(default_factory=dict)


class RunMachine:
    """Decides what a run does next.

    Args:
        has_checkpoint: whether a checkpoint may exist already, as in a resumed run.
    """

    def __init__(self, config: MachineConfig, has_checkpoint: bool = False) -> None:
        self._config = config
        self._out = Outbox()
        self._fleet = Fleet(self._out, config)
        self._plan = Plan(config, self._fleet)
        self._candidates = Candidates(self._out, self._plan)
        # requested
        self._current = Generation()
        self._aborted = 0
        # observed
        self._phase = Phase.ASSEMBLING
        self._formed: tuple[Member, ...] = ()  # members of the last generation that ran
        self._taken: set[SlotId] = set()  # slots that have had a member
        self._may_have_progress = has_checkpoint
        self._backoff = FailureBackoff(config.restart_backoff_s, config.max_stuck_generations)
        # since when training is over for at least one worker, so that no worker joins any more
        self._finishing_since: float | None = None
        self._endings = Endings()
        self._last_word_at = 0.0
        # all hosts that train and will go, with the time of that, when a checkpoint was requested
        self._prepared: dict[str, float | None] = {}
        self._waiting = WaitingReport(self._out, self._plan)

    # -- the interface ---------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Handle one event at time ``now`` [s, never decreasing]; return the commands it causes.

        After Finish, no more commands are returned.
        """
        if self._out.closed:
            return []
        phase, ordered = self._phase, self._out.ordered
        self._take_event(event, now)
        changed = (phase, ordered) != (self._phase, self._out.ordered)
        if changed or not self._awaits_more_like(event):
            self._advance(now)
        return self._out.take_commands()

    def deadline(self) -> float | None:
        """Return when the next Tick is needed if no event comes before [s]; None: not at all."""
        return None if self._out.closed else self._out.wake_at

    @property
    def generation(self) -> int:
        """Return the number of the last announced generation; 0 before the first."""
        return self._current.number

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members of the last announced generation by rank, including dead ones."""
        return self._current.members

    @property
    def training(self) -> tuple[int, tuple[Member, ...]]:
        """Return the number and members of the generation that trains; (0, ()) if none does.

        While the next one is being formed, members may still be in a step of the last one.
        """
        number = self._current.number
        if self._phase is Phase.RUNNING:
            return number, self._current.members
        if self._phase is Phase.FORMING and self._formed and self._aborted < number - 1:
            return number - 1, self._formed
        return 0, ()

    @property
    def phase(self) -> Phase:
        """Return the phase of the run."""
        return self._phase

    @property
    def draining(self) -> frozenset[str]:
        """Return the hosts of the hostfile that are drained."""
        return frozenset(self._plan.draining)

    @property
    def state_holders(self) -> list[Worker]:
        """Return live workers with a complete state, in the order to ask them for a checkpoint."""
        members = [w for w in self._live() if w.stage is Stage.MEMBER and not w.finished]
        waiting = sorted(self._fleet.present(Stage.WAITING), key=lambda w: w.progress, reverse=True)
        # Training members share the work of writing; members of a broken generation may not answer.
        both = [*members, *waiting] if self._phase in _TOGETHER else [*waiting, *members]
        return [worker for worker in both if worker.holds_state]

    def agent_states(self) -> dict[str, AgentState]:
        """Return the state of each agent by host, except for hosts that were never used."""
        return {name: agent.state for name, agent in self._fleet.agents.items()}

    def _awaits_more_like(self, event: ev.Event) -> bool:
        """Return whether only the last of many such reports, which come in a pause, matters."""
        match event:
            case ev.WorkerJoined():
                return self._phase is Phase.FORMING
            case ev.WorkerBroken() | ev.WorkerHeld():
                return self._phase is Phase.REGROUPING and any(self._unanswered())
        return False

    # -- observed: one event ---------------------------------------------------------------

    def _take_event(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.HostsChanged():
                self._plan.hosts = event.hosts
                self._fleet.forgive({host.name for host in event.hosts})
                # Removing a host from the hostfile and adding it again ends its draining.
                self._plan.drain_only({host.name for host in event.hosts})
            case ev.HostDraining():
                self._drain(event, now)
            case ev.HostReturned():
                if event.host in self._plan.draining:
                    self._plan.drain_only(set(self._plan.draining) - {event.host})
                    self._out.emit(run_events.HostReturned(event.host))
            case ev.StateSaved():
                self._backoff.saved(event.step)
                for waiting in self._fleet.present(Stage.WAITING):
                    if waiting.saved is not None:
                        waiting.saved = event.step >= waiting.step
                        if waiting.saved:
                            self._waiting.saved_step = event.step
            case ev.RunTakenOver():
                self._take_over(event, now)
            case ev.TargetChanged():
                self._plan.requested_np = event.np
                self._plan.preferred = frozenset(event.slots)
            case ev.AgentReady():
                self._fleet.agent_ready(event.host)
            case ev.AgentFailed() | ev.AgentLost():
                self._on_agent_gone(event, now)
            case ev.GenerationStuck():
                is_alive = self._phase in _TOGETHER and event.generation == self._current.number
                if not is_alive and event.generation != self.training[0]:
                    return  # it has ended since
                if event.by_script:
                    self._out.send(Finish("failed", event.cause))
                else:
                    self._call_off(event.generation, event.cause, now)
            case ev.StopRequested():
                self._out.send(Finish(event.status, event.reason))
            case ev.Tick():
                pass
            case _:
                # Events about a process that was already seen to end are outdated.
                worker = self._fleet.workers.get(event.worker)
                if worker is not None:
                    self._take_from_worker(event, worker, now)

    def _drain(self, event: ev.HostDraining, now: float) -> None:
        """Begin to drain a host, or update the time of one that is being drained."""
        until = None if event.train_for_s is None else now + event.train_for_s
        self._plan.drain(event.host, until)
        cause, leave_in_s = event.cause, event.leave_in_s
        self._out.emit(run_events.HostDraining(event.host, cause, leave_in_s, event.asked))

    def _take_over(self, event: ev.RunTakenOver, now: float) -> None:
        """Continue a run that another leader began, from what was found of it."""
        plan = self._plan
        plan.hosts, plan.requested_np = event.hosts, event.requested_np
        plan.preferred = frozenset(event.slots)
        plan.draining = dict.fromkeys(event.draining)
        plan.drain_only({host.name for host in event.hosts})
        self._fleet.take_over(event.agents, event.awaited, event.workers, now)
        self._current = Generation(event.generation, event.members)
        workers = self._fleet.workers
        if workers:
            live = [member for member in event.members if member.worker in workers]
            slots = sorted(worker.slot for worker in workers.values())
            self._out.emit(run_events.TakenOver(event.generation, len(live), len(workers), slots))
        if any(found.finished for found in event.workers):
            self._finishing_since = now
        if not event.members:
            return
        self._may_have_progress = True
        members = self._live()
        missing = [member for member in event.members if member.worker not in workers]
        joined = all(w.joined == event.generation or w.finished for w in members)
        self._phase = Phase.RUNNING if joined else Phase.FORMING
        self._formed = event.members if joined else ()
        self._taken.update((m.host, m.slot) for m in self._formed)
        if missing or any(w.stage is Stage.WAITING and not w.finished for w in members):
            self._break("the leader was lost while the world changed", now)
        self._current.losses = {
            slot: f"worker {worker_name(*slot)} was lost with the leader"
            for slot in ((member.host, member.slot) for member in missing)
        }
        self._current.formed = joined
        # If it breaks now, the loss of the leader explains that.
        self._current.member_lost = bool(missing) or not joined

    def _take_from_worker(self, event: ev.WorkerEvent, worker: Worker, now: float) -> None:
        match event:
            case ev.WorkerReady():
                if worker.stage is Stage.STARTING:
                    self._fleet.worker_ready(worker, now)
                    self._out.emit(run_events.WorkerStandby(*worker.slot, event.warm_s))
            case ev.WorkerJoined():
                self._on_joined(worker, event.generation, now)
            case ev.WorkerBroken() | ev.WorkerHeld():
                self._on_waiting(worker, event, now)
            case ev.WorkerFinished():
                self._on_finished(worker, now)
            case ev.WorkerSilent():
                self._on_silent(worker, event.cause, now)
            case ev.ScriptFailed():
                self._on_script_failed(worker, event.traceback)
            case ev.WorkerExited():
                self._on_exited(worker, event, now)

    def _on_agent_gone(self, event: ev.AgentFailed | ev.AgentLost, now: float) -> None:
        if event.host not in self._fleet.agents:
            return  # the agent was stopped on purpose
        if isinstance(event, ev.AgentFailed):
            self._fleet.agent_failed(event, now)
        else:
            self._fleet.agent_lost(event, now)
        what = f"host {event.host} was lost ({event.cause})"
        for worker in list(self._fleet.workers.values()):
            if worker.host == event.host:
                self._gone(worker, Departure.HOST_LOST, what, now)

    def _on_joined(self, worker: Worker, generation: int, now: float) -> None:
        first = worker.joined_at is None
        self._fleet.worker_joined(worker, generation, now)
        if first:
            place = next((m for m in self._current.members if m.worker == worker.name), None)
            if place is not None:
                self._out.emit(run_events.WorkerJoined(*worker.slot, place.rank))
        number = self._current.number
        if self._phase is Phase.FORMING and all(
            member.joined == number or member.finished for member in self._each_live()
        ):
            self._phase = Phase.RUNNING
            self._current.formed = True
            self._may_have_progress = True
            self._formed = self._current.members
            self._taken.update((m.host, m.slot) for m in self._formed)

    def _on_waiting(
        self, worker: Worker, event: ev.WorkerBroken | ev.WorkerHeld, now: float
    ) -> None:
        if worker.finished or event.generation > self._current.number:
            return
        if isinstance(event, ev.WorkerBroken):
            cause = f"worker {worker.place} broke off: {event.cause or 'a collective failed'}"
        else:
            cause = f"worker {worker.place} stopped"
        if worker.leaving:
            if isinstance(event, ev.WorkerBroken):
                self._fell_out(worker, event.generation, cause, now)
            return
        worker.holds_state = worker.holds_state and event.step >= 0
        worker.step, worker.rank_of_state = max(event.step, 0), event.state
        if worker.stage is not Stage.MEMBER:
            return
        if self._phase is Phase.REGROUPING:
            # An answer for an older generation counts as well: the worker is in no collective, and
            # has been sent the abort of the later generation too.
            worker.stage = Stage.WAITING
            self._last_word_at = now  # others may be about to end the same long step
            if isinstance(event, ev.WorkerBroken):
                self._break(cause, now)  # in case the generation was only to be held
        elif event.generation == self._current.number:
            worker.stage = Stage.WAITING
            self._break(cause, now)
        elif worker.name == self._current.root and not worker.holds_state:
            self._break(f"the state of worker {worker.place} is not whole", now)
        else:
            # It will join the generation that was announced since.
            self._fell_out(worker, event.generation, cause, now)

    def _on_finished(self, worker: Worker, now: float) -> None:
        worker.finished = True
        if self._finishing_since is not None:
            return
        self._finishing_since = now
        # Workers finish after a barrier of their generation, so all its members have joined even if
        # some reports are still on the way. Other newcomers and standbys are not needed any more.
        together = worker.joined == self._current.number
        self._fleet.dismiss_if(
            lambda w: not (w.holds_state or w.finished or (together and w.stage is Stage.MEMBER)),
            *Stage,
        )
        for newcomer in self._fleet.workers.values():
            if (
                newcomer.leaving
                and newcomer.member_of == self._current.number
                and not newcomer.joined
            ):
                self._kill(newcomer, f"worker {newcomer.place} came when training was over")

    def _on_silent(self, worker: Worker, cause: str, now: float) -> None:
        """Kill a frozen or stuck worker, and break its generation if the others wait for it."""
        if worker.killed:
            return
        cause = f"worker {worker.place} {cause}"
        if worker.finished:
            cause += " after its training function had returned"
            self._endings.badly(worker.name, cause)
        in_the_way = worker.member_of == self._current.number > 0 and not worker.finished
        if not in_the_way or worker.leaving:
            self._kill(worker, cause)
            if in_the_way and worker.joined == self._current.number:
                self._break(cause, now)
            return
        was_member = worker.stage is Stage.MEMBER
        self._lose(worker, cause)
        if was_member:
            self._break(cause, now)

    def _on_script_failed(self, worker: Worker, traceback: str) -> None:
        self._out.emit(run_events.ScriptFailed(*worker.slot, traceback))
        if worker.leaving or self._can_do_without(worker):
            return
        last_line = traceback.strip().rsplit("\n", 1)[-1]
        self._out.send(
            Finish("failed", f"the training script failed in worker {worker.place}: {last_line}")
        )

    def _on_exited(self, worker: Worker, event: ev.WorkerExited, now: float) -> None:
        code, how = how_it_ended(event)
        what = f"worker {worker.place} {how}"
        if worker.finished:
            if code == 0:
                self._endings.well(worker.name)
            elif code is not None and not worker.leaving:
                self._fail(worker, f"{how} after training was done")
            if code == 0:
                self._gone(worker, Departure.FINISHED, "finished", now)
            else:
                self._gone(worker, Departure.DIED, what, now)
        elif worker.leaving:
            if code == 0 or (worker.stage is Stage.STARTING and not worker.killed):
                self._gone(worker, Departure.LEFT, "left", now)
            elif worker.killed:
                self._gone(worker, Departure.KILLED, worker.killed, now, blame=worker.killed)
            else:
                self._gone(worker, Departure.DIED, what, now)
        elif self._config.plain:
            end = Departure.FINISHED if code == 0 else Departure.DIED
            self._fleet.bury(worker, now, "")
            self._out.emit(run_events.WorkerLeft(*worker.slot, what, end))
            ended = f"the command {how} on host {worker.host}"
            self._out.send(Finish("succeeded" if code == 0 else "failed", ended))
        elif code is None:
            if crashed(event) and worker.member_of == self._current.number > 0:
                self._current.crashed = True
                self._current.out_of_memory |= event.out_of_memory
            self._gone(worker, Departure.DIED, what, now, blame=what)
        elif self._can_do_without(worker):
            blame = f"the script {how} before it joined; its log says more"
            self._gone(worker, Departure.DIED, what, now, blame=blame)
        elif worker.joined_at is not None:
            hint = "" if code else "; hvd.stop(reason) ends training early on all of them"
            self._fail(worker, f"{how} before its training function returned", hint)
        elif code == 0:
            how = f"{how} without ever calling the run function of hvd_elastic"
            hint = (
                "; training is done in a function with @hvd.run (docs/training-script.md), and "
                "hvd-elastic submit --plain runs a command that does not train"
            )
            self._fail(worker, how, hint)
        else:
            self._fail(worker, f"{how} before training began")

    def _fail(self, worker: Worker, how: str, hint: str = "") -> None:
        text = f"the training script {how} in worker {worker.place}{hint}"
        self._out.send(Finish("failed", text))

    def _can_do_without(self, worker: Worker) -> bool:
        """Return whether a failed worker is a newcomer to a run whose state others hold.

        Then the failure is probably one of its host, and does not end the run.
        """
        return worker.joined_at is None and any(w.holds_state for w in self._fleet.present(*Stage))

    def _gone(
        self, worker: Worker, how: Departure, cause: str, now: float, *, blame: str = ""
    ) -> None:
        """Remove a worker whose process has ended or was lost with its host.

        Args:
            cause: text for the log; names the worker unless it left in order.
            now: time [s].
            blame: why its end counts as a failure of its slot; empty: it does not.
        """
        self._fleet.bury(worker, now, blame)
        self._out.emit(run_events.WorkerLeft(*worker.slot, cause, how))
        if worker.finished:
            if not how.in_order:
                self._endings.badly(worker.name, cause)
                message = f"{cause}, after its training function had returned"
                self._out.emit(run_events.Warned(message))
            return
        if worker.joined_at is not None and not worker.leaving:
            self._endings.badly(worker.name, cause)
        if worker.leaving:
            if not how.in_order:
                self._fell_out(worker, worker.member_of, cause, now)
        elif worker.member_of == self._current.number > 0:
            self._current.losses[worker.slot] = cause
            self._current.member_lost = True
            if worker.stage is Stage.MEMBER:
                self._break(cause, now)

    def _fell_out(self, worker: Worker, generation: int, cause: str, now: float) -> None:
        """Abort ``generation``, which ``worker`` has left while others may wait in a collective."""
        if worker.joined:
            self._call_off(generation, cause, now)

    def _call_off(self, generation: int, cause: str, now: float) -> None:
        """Abort the current generation, or the one before it, which its members may not have left.

        They join the current one afterwards.
        """
        if generation == self._current.number:
            self._break(cause, now)
        elif (
            self._phase is Phase.FORMING
            and generation == self._current.number - 1
            and self._aborted < generation
        ):
            self._abort(generation, cause)

    # -- the end of a generation -----------------------------------------------------------

    def _break(self, cause: str, now: float) -> None:
        """Abort the current generation, once, and begin to wait for its members' reports."""
        if self._phase is Phase.ASSEMBLING or (
            self._phase is Phase.REGROUPING and self._current.broken
        ):
            return
        self._abort(self._current.number, cause)
        self._phase = Phase.REGROUPING
        self._current.broken = cause
        self._last_word_at = now

    def _abort(self, generation: int, cause: str) -> None:
        self._aborted = generation
        self._out.send(Abort(generation, cause))

    def _hold(self, staying: Sequence[Worker], going: Sequence[Worker], now: float) -> None:
        """Stop training at a step boundary and keep the state until there are enough hosts."""
        # If the hostfile names none of the members' hosts, one member has to keep the state.
        keepers = list(staying) or [going[0]]
        for worker in keepers:
            self._out.send(Hold(worker.name))
        for worker in going:
            if worker not in keepers:
                self._fleet.dismiss(worker)
        self._phase = Phase.REGROUPING
        self._current.broken = ""
        self._waiting.emit(len(staying), now)

    def _regroup(self, now: float) -> None:
        missing = list(self._unanswered())
        if missing and self._current.broken:
            end = self._last_word_at + self._patience_with(missing)
            if now < end:
                self._out.wake(end)
                return
            # Their end is not awaited: not even SIGKILL ends a process that is blocked on a disk.
            for worker in missing:
                self._lose(worker, f"worker {worker.place} gave no answer")
        elif missing:
            return  # they will hold at a step boundary, and a step may take any time
        self._phase = Phase.ASSEMBLING
        if self._current.broken:
            self._learn(now)

    def _patience_with(self, missing: Sequence[Worker]) -> float:
        """Return how long members may be silent after their generation broke [s]."""
        patience = self._config.regroup_timeout_s
        if any(w.holds_state for w in self._fleet.present(Stage.WAITING)):
            return patience
        # The state would be lost with them, and a long step may be all that delays them.
        return patience * (_LAST_HOPE if any(w.holds_state for w in missing) else 1)

    def _learn(self, now: float) -> None:
        """Update the backoffs after a broken generation, so that failures are not repeated fast."""
        waiting = self._fleet.present(Stage.WAITING)
        newest = max((w.step for w in waiting if w.holds_state), default=-1)
        broken = self._current.broken
        if self._current.crashed and self._current.formed:
            if times := self._backoff.crashed(newest, now):
                where = f", now at step {newest}" if newest >= 0 else " and none is left"
                text = f"workers crashed {times} times without progress{where}: {broken}"
                way = f". {NEEDS_LESS_MEMORY}" if self._current.out_of_memory else ""
                self._out.send(Finish("failed", text + way))
        elif self._current.member_lost:
            self._backoff.explained()
        elif self._current.formed:
            if times := self._backoff.broke_while_running(newest, now):
                text = f"training broke {times} times at step {newest} though no worker died"
                self._out.send(Finish("failed", f"{text}: {broken}"))
        elif newcomers := [w for w in waiting if not w.holds_state]:
            # Workers that have trained together can probably connect, so newcomers are suspected.
            for worker in newcomers:
                worker.retry.failed(now)
                if worker.retry.failures >= self._config.max_worker_failures:
                    cause = f"it could not join the others {worker.retry.failures} times in a row"
                    self._fleet.give_up(worker.slot, f"{cause} ({self._current.broken})")
        else:
            self._backoff.did_not_form(now)

    # -- plan against requested and observed -----------------------------------------------

    def _advance(self, now: float) -> None:
        for _ in range(_MAX_PASSES):
            sent = self._out.sent
            self._out.forget_wakes()
            self._compare(now)
            if self._out.closed or self._out.sent == sent:
                return
        raise AssertionError("the machine does not come to rest")

    def _compare(self, now: float) -> None:
        if self._phase is Phase.REGROUPING:
            self._regroup(now)
        if self._finishing_since is None:
            self._plan.update(now)
            is_superfluous = self._candidates.is_superfluous
            self._fleet.dismiss_if(is_superfluous, Stage.STARTING, Stage.READY, Stage.WAITING)
            if self._phase is Phase.ASSEMBLING:
                self._assemble(now)
            elif self._phase is Phase.RUNNING:
                self._adjust(now)
            self._save_before_all_go()
            self._save_what_would_go()
        else:
            self._wind_up(now)
        self._hasten_leavers(now)
        for host in self._plan.emptied():
            self._out.emit(run_events.HostDrained(host))

    def _assemble(self, now: float) -> None:
        """Announce a generation as soon as there are enough workers for it."""
        if self._config.plain and self._fleet.workers:
            return  # the command runs
        available, holder = self._candidates.available(now), self._candidates.state_holder()
        if len(available) < self._config.min_np:
            self._candidates.forget_waits()
            self._waiting.emit(len(available), now)
            if in_vain := self._waiting.why_in_vain(has_trained=bool(self._formed)):
                self._out.send(Finish("failed", in_vain))
            return
        start_at = self._candidates.start_at(available, holder, now)
        start_at = max(start_at, self._backoff.pause_until)
        if now < start_at:
            self._out.wake(start_at)
            if self._waiting.for_start:
                self._waiting.emit(len(available), now)
            return
        self._announce([*available, *([holder] if holder else [])])

    def _adjust(self, now: float) -> None:
        """Change a running generation: add newcomers, remove members without a desired slot."""
        members, candidates = self._live(), self._candidates
        staying = [worker for worker in members if worker.slot in self._plan.desired]
        going = [worker for worker in members if worker.slot not in self._plan.desired]
        newcomers = candidates.available(now)
        if going and candidates.may_train_on(going, len(staying) + len(newcomers), now):
            return
        if not going:
            candidates.forget_waits()
            if newcomers and candidates.are_all_here(newcomers, len(staying), now):
                self._announce([*members, *newcomers])
        elif len(staying) + len(newcomers) >= self._config.min_np:
            if staying:
                self._announce([*staying, *newcomers])
                for worker in going:
                    self._fleet.dismiss(worker)
            elif candidates.are_all_here(newcomers, 0, now):
                # All holders of the state have to leave: newcomers receive it from them in this
                # generation, and the old members leave once it runs.
                self._announce([*going, *newcomers])
        elif self._plan.end_of(going) is not None or not candidates.are_replacements_awaited(now):
            self._hold(staying, going, now)

    def _save_before_all_go(self) -> None:
        """Have a checkpoint written if all hosts that train will go, maybe before the said time."""
        if self._phase is not Phase.RUNNING:
            return
        ends = {member.host: self._plan.draining.get(member.host) for member in self._each_live()}
        if ends and None not in ends.values() and not ends.items() <= self._prepared.items():
            self._prepared = ends
            self._out.send(SaveState(next(self._each_live()).name))

    def _save_what_would_go(self) -> None:
        """Have the newest state written to a checkpoint if only a drained host holds it."""
        holder = self._candidates.state_holder()
        if holder is not None and holder.host in self._plan.draining and holder.saved is None:
            holder.saved = False
            self._out.send(SaveState(holder.name))

    def _announce(self, workers: Sequence[Worker]) -> None:
        members = assign_ranks((worker.seat for worker in workers), self._plan.hosts)
        rank = {member.worker: member.rank for member in members}
        holders = [worker for worker in workers if worker.holds_state]
        root = max(holders, key=lambda w: (w.progress, -rank[w.name]), default=None)
        reason = describe_change(
            [(m.host, m.slot) for m in self._formed],
            [(m.host, m.slot) for m in members],
            self._current.losses,
            "" if self._current.losses else self._current.broken,
            self._taken,
        )
        number = self._current.number + 1
        self._current = Generation(number, members, root.name if root else None)
        for worker in workers:
            worker.stage = Stage.MEMBER
            worker.member_of = number
        self._phase = Phase.FORMING
        self._candidates.forget_waits()
        self._waiting.is_over()
        slots = Counter(member.host for member in members)
        self._out.emit(
            run_events.RescaleStarted(
                number, len(self._formed), len(members), [*slots], [*slots.values()], reason
            )
        )
        restore = root is None and self._may_have_progress
        self._out.send(Announce(number, members, self._current.root, restore, reason))

    # -- the end of the run ----------------------------------------------------------------

    def _wind_up(self, now: float) -> None:
        """End a run in which some worker has finished, once all others have had the chance to."""
        workers = self._fleet.present(*Stage)
        unfinished = [w for w in workers if w.stage is Stage.WAITING and not w.finished]
        # The exits of finished workers decide the result of the run, even if they were asked to
        # leave. Killed ones are not awaited: a process that is blocked on a disk does not end.
        ending = any(w.finished and not w.killed for w in self._fleet.workers.values())
        training = any(w.holds_state or w.stage is Stage.MEMBER for w in workers)
        if not ending and not training:
            chief = self._formed[0].worker if self._formed else ""
            self._out.send(self._endings.verdict(chief))
        elif self._phase is Phase.ASSEMBLING and unfinished:
            holders = [worker for worker in unfinished if worker.holds_state]
            if holders and now >= self._backoff.pause_until:
                self._announce(holders)
            elif holders:
                self._out.wake(self._backoff.pause_until)
            self._fleet.dismiss_if(lambda worker: worker not in holders, Stage.WAITING)
        elif self._phase is Phase.FORMING and self._finishing_since is not None:
            # Members that are joining wait for others that have finished instead.
            end = self._finishing_since + self._config.regroup_timeout_s
            if any(not worker.finished for worker in self._live()):
                if now >= end:
                    self._finishing_since = now
                    self._break("training is over for some of its members", now)
                else:
                    self._out.wake(end)

    # -- helpers ---------------------------------------------------------------------------

    def _live(self) -> list[Worker]:
        """Return the live members of the last generation that were not asked to leave, by rank."""
        return list(self._each_live())

    def _each_live(self) -> Iterator[Worker]:
        workers = (self._fleet.workers.get(member.worker) for member in self._current.members)
        return (worker for worker in workers if worker is not None and not worker.leaving)

    def _unanswered(self) -> Iterator[Worker]:
        """Return the members that have not reported since their generation ended."""
        return (w for w in self._each_live() if w.stage is Stage.MEMBER and not w.finished)

    def _lose(self, worker: Worker, cause: str) -> None:
        """Continue without a member that does not answer, and kill it."""
        self._current.member_lost = True
        self._current.losses[worker.slot] = cause
        self._endings.badly(worker.name, cause)
        self._kill(worker, cause)

    def _kill(self, worker: Worker, reason: str) -> None:
        """Kill a worker; it counts as gone at once, but occupies its slot until it has ended."""
        worker.killed, worker.leaving = reason, True
        self._out.send(KillWorker(worker.name, reason))

    def _hasten_leavers(self, now: float) -> None:
        """Kill workers that were asked to leave and have not done so in time."""
        for worker in self._fleet.workers.values():
            if not worker.leaving or worker.killed or worker.finished:
                continue
            if worker.leave_by is None and self._phase in (Phase.RUNNING, Phase.ASSEMBLING):
                # All others have passed the step boundary at which it should have left.
                worker.leave_by = now + self._config.regroup_timeout_s
            if worker.leave_by is None:
                continue
            if now >= worker.leave_by:
                self._kill(worker, f"worker {worker.place} did not leave when asked to")
            else:
                self._out.wake(worker.leave_by)
