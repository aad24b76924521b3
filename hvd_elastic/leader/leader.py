"""Leads a run: gives the machine events and carries out its commands.

:class:`hvd_elastic.control.machine.RunMachine` decides; this module acts through the other modules
of this package. Everything runs in one loop; the threads of the agents' connections and of file
transfers only post calls to it.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_elastic.checkpoint.collector import Brought, CheckpointCollector
from hvd_elastic.checkpoint.final import LastCheckpoint
from hvd_elastic.checkpoint.lease import Lease
from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.checkpoint.saved_collector import SavedFileCollector
from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import StopCause, explain_script_error
from hvd_elastic.control.loop import Loop
from hvd_elastic.control.machine import MachineConfig, Phase, RunMachine
from hvd_elastic.control.progress import Position, ProgressWatch
from hvd_elastic.errors import CheckpointError
from hvd_elastic.formatting import count, hosts_named
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader import requests
from hvd_elastic.leader.agents import LOOK_S, Agents
from hvd_elastic.leader.fencing import Fence
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.journal import Journal, Show, ShowOutput
from hvd_elastic.leader.remote_agent import AgentConnection, FromAgent
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.takeover import Takeover
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary, summarize
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.hosts.engine import Engine
    from hvd_elastic.leader.scaling import Scaler

_TAKEOVER_S = 12.0
"""How long a takeover waits for the hosts' answers [s]: enough for a slow ssh connection."""
_STOP_CHECKPOINT_S = 10.0
"""How long a stop waits for the last checkpoint [s], beside the time to notice a frozen worker."""
_FETCH_PATIENCE_S = 60.0
"""How long the end of a run waits for its last checkpoint to be fetched from the hosts [s]."""
_LEAST_RESERVE_S = 10.0
"""Part of a preempted host's remaining time kept for a last checkpoint and for leaving [s]."""

# Signals that stop a run, with the cause that is recorded.
_STOP_SIGNALS = {
    signal.SIGINT: StopCause.INTERRUPT,
    signal.SIGTERM: StopCause.TERMINATE,
    signal.SIGHUP: StopCause.HANGUP,
}
_SHUTDOWN = {StopCause.TERMINATE, StopCause.HANGUP}
"""A machine that shuts down may send both signals in a row; together they are one request."""


_START = Position(0, 0, 0, 0)  # before the first step


@dataclass
class _Progress:
    """The progress of training as far as the leader knows it.

    Attributes:
        reached: newest position that a worker reported.
        written: position of the newest checkpoint of which a worker has written its shard.
        is_known: False after a takeover of workers, until they report their position.
        stopped: why the script has ended training early; empty: it has not.
    """

    reached: Position = _START
    written: Position = _START
    is_known: bool = True
    stopped: str = ""

    def note_if_further(self, progress: Position | None) -> None:
        """Update ``reached`` if ``progress`` is at a later step: metrics come less often."""
        if progress is not None and progress.step > self.reached.step:
            self.reached = progress


class Leader:
    """Leads one run from its start, or from where its last leader left it, to its end.

    Args:
        spec: specification of the run.
        folder: run folder, whose lock the caller holds.
        environment: variables for the workers, passed on through the agents' stdin.
        show: called with every event as it is recorded.
        show_output: called with (host, local rank, line) for each line that rank 0 prints.
        resumed: whether the run had a leader before.
        engine: what owns the hosts; None: they are reached over ssh.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        environment: Mapping[str, str],
        show: Show,
        show_output: ShowOutput,
        *,
        resumed: bool = False,
        engine: Engine | None = None,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._resumed = resumed
        self._loop = Loop(self._next_deadline, self._tick)
        self._next_tick = time.monotonic()
        self._journal = Journal(folder, show, show_output, audit=spec.audit)
        self._hostfile = HostfileWatch(spec, self._journal.warn)
        self._agents = Agents(spec, environment, self._post, engine)
        self._workers = Workers(folder)
        self._watch = ProgressWatch(spec.failure_timeout_s)
        self._readers = InputHosts(
            spec,
            folder,
            environment,
            led=lambda: self._fence.identity,
            post=self._loop.post,
            emit=self._journal.emit,
            changed=self._tell_of_readers,
            engine=engine,
        )
        store = CheckpointStore(
            folder.run_id,
            folder.checkpoints,
            spec.checkpoint_folder,
            keep=spec.keep_checkpoints,
            resumed=resumed,
        )
        self._collector = CheckpointCollector(
            store,
            copies=spec.checkpoint_copies,
            resumed=resumed,
            agents=lambda: self._agents.by_host,
            post=self._loop.post,
            emit=self._journal.emit,
            warn=self._journal.warn,
            on_idle=self._checkpoints_idle,
        )
        self._fence = Fence(folder.run_id, store.place, spec.failure_timeout_s)
        self._saved = SavedFileCollector(
            folder.saved,
            life=lambda: self._fence.identity.leader,
            agents=lambda: self._agents.usable,
            post=self._loop.post,
            emit=self._journal.emit,
            warn=self._journal.warn,
            on_idle=self._end_when_fetched,
        )
        self._machine = self._new_machine(has_checkpoint=resumed)
        self._scaler: Scaler | None = None
        self._takeover: Takeover | None = None
        """State of a takeover; None: it is complete, and this leader leads."""
        self._progress = _Progress()
        self._stop: StopCause | None = None
        self._last: LastCheckpoint | None = None
        self._finish: cmd.Finish | None = None
        self._finished_at = 0.0

    def _new_machine(self, *, has_checkpoint: bool) -> RunMachine:
        spec = self._spec
        np = spec.np
        if np is None and spec.policy != "fixed":
            # A policy starts small: its first measurements show what more slots would gain.
            if not self._hostfile.hosts:
                self._hostfile.read()
            hosts = self._hostfile.hosts.values()
            np = max(spec.min_np, sum(h.slots for h in hosts if h.name in spec.pin_hosts))
        config = MachineConfig(
            min_np=spec.min_np,
            max_np=spec.max_np,
            np=np,
            pinned=spec.pin_hosts,
            spares=spec.spares,
            plain=spec.plain,
        )
        return RunMachine(config, has_checkpoint)

    # -- from start to end -----------------------------------------------------------------

    @property
    def gave_way(self) -> bool:
        """Return whether this leader ended in favour of another one and had started nothing."""
        return self._fence.gave_way and not self._fence.has_led

    def run(self) -> cmd.Finish:
        """Lead the run until it ends; return how it ended.

        Raises:
            HostfileError: the hostfile cannot be read at the start.
            CheckpointError: the checkpoint folder cannot be written and no worker is running.
        """
        unwritable: CheckpointError | None = None
        try:
            self._collector.check()
        except CheckpointError as error:
            if not self._resumed:
                raise
            unwritable = error  # running workers can train on without checkpoints
        self._hostfile.read()
        records = self._folder.read_events() if self._resumed else []
        past = summarize(records)
        self._progress.stopped = past.stopped_for
        self._expect_checkpoint(past)
        self._start_scaler(records)
        self._journal.emit(
            "run_started",
            {
                "run_id": self._folder.run_id,
                "hosts": self._hosts_and_slots(),
                "min_np": self._spec.min_np,
                "max_np": self._spec.max_np,
                "np": self._spec.np,
                "pinned": list(self._spec.pin_hosts),
                "command": list(self._spec.command),
                "resumed": self._resumed,
            },
        )
        with self._signals(), self._lease():
            try:
                if self._resumed:
                    self._ask_hosts(past, _TAKEOVER_S, unwritable=unwritable)
                else:
                    self._fence.has_led = True
                    self._hosts_changed()
                self._loop.run()
            except BaseException as error:
                if self._machine.members:
                    self._let_go(error)
                else:
                    self._end_agents()
                raise
            assert self._finish is not None
            if not self._fence.gave_way:
                self._finish = _with_missing(self._finish, self._saved.missing())
            self._end_agents()
        newest, reached = self._collector.newest_step, self._progress.reached
        self._journal.emit(
            "run_finished",
            {
                "run_id": self._folder.run_id,
                "status": self._finish.status,
                "message": self._outcome(self._finish),
                "steps": reached.step,
                "examples": reached.examples,
                "epochs": reached.epoch,
                "checkpoint_step": newest if newest >= 0 else None,
                "led_elsewhere": self._fence.led_elsewhere,
            },
        )
        self._workers.close()
        self._journal.close()
        return self._finish

    def _outcome(self, finish: cmd.Finish) -> str:
        """Return why the run has ended, in words."""
        ended_itself = finish.status == "succeeded" and self._progress.stopped
        return (
            f"training was stopped by the script: {ended_itself}"
            if ended_itself
            else finish.message
        )

    def _expect_checkpoint(self, past: RunSummary) -> None:
        """Prevent training from starting afresh if a checkpoint exists or may exist elsewhere."""
        if past.checkpoints:
            self._collector.expect(f"that of step {past.checkpoints[-1].step} was written")
        elif self._folder.began_elsewhere:
            self._collector.expect("it was led by another machine, which may have written one")

    def _start_scaler(self, past: Sequence[Mapping[str, Any]]) -> None:
        if self._spec.policy == "fixed":
            return
        from hvd_elastic.leader.scaling import Scaler

        age_s = max(0.0, time.time() - past[0]["t"]) if past else 0.0
        scaler = Scaler(self._spec, self._journal.emit, time.monotonic() - age_s, past)
        self._journal.listeners.append(
            lambda event: scaler.note(event["kind"], event, event["mono"])
        )
        self._scaler = scaler

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask_to_stop(number: int, _: Any) -> None:
            cause = _STOP_SIGNALS[signal.Signals(number)]
            self._loop.post(functools.partial(self._ask_to_stop, cause))

        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread, which is the caller's
            return
        for number in _STOP_SIGNALS:
            signal.signal(number, ask_to_stop)
        try:
            yield
        finally:
            # A second Ctrl-C must not interrupt the end of the agents, or processes would remain.
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _lease(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds a lease on a shared checkpoint folder, if there is one."""
        if self._spec.checkpoint_folder is None:  # then the lock of the run folder is enough
            return contextlib.nullcontext()
        return self._fence.acquire(
            lambda: self._loop.post(self._lease_is_settled),
            lambda lease, seen: self._loop.post(lambda: self._on_lease(lease, seen)),
        )

    def _end_agents(self) -> None:
        """End all agents and their workers, and wait until they have ended."""
        if self._fence.gave_way:
            self._agents.drop()  # the workers belong to the other leader
            self._readers.drop()
            return
        succeeded = self._finish is not None and self._finish.status == "succeeded"
        self._collector.end(succeeded=succeeded)
        self._saved.end()
        for host in self._agents.end():
            self._journal.warn(f"host {host}: the agent did not answer the end of the run")
        self._readers.end()

    def _let_go(self, error: BaseException) -> None:
        """Leave the workers running after an internal error of this process."""
        self._agents.drop()
        self._readers.drop()
        with contextlib.suppress(Exception):  # the journal itself may be what failed
            self._journal.warn(
                f"the leader fails ({type(error).__name__}: {error}). The hosts go on without it "
                f"for {self._spec.leader_grace_s:g} s (--leader-grace), and then leave a "
                f"checkpoint: hvd-elastic run --resume {self._folder.run_id} leads on"
            )

    def _end_with(self, finish: cmd.Finish) -> None:
        self._finish = finish
        self._loop.stop()

    # -- taking over from an earlier leader --------------------------------------------------

    def _ask_hosts(
        self,
        past: RunSummary,
        wait_s: float,
        *,
        patient: bool = False,
        unwritable: CheckpointError | None = None,
    ) -> None:
        """Begin a takeover: start agents and ask them what they still hold of the run.

        Args:
            past: summary of the run so far.
            wait_s: how long to wait for the answers [s].
            patient: whether unreachable hosts are tried again during that time.
            unwritable: why checkpoints cannot be written; None: they can.
        """
        now = time.monotonic()
        takeover = self._takeover = Takeover(
            list(self._hostfile.hosts),
            past,
            self._spec.np,
            now + wait_s,
            patient=patient,
            lease_open=self._fence.has_lease_file and not patient,
            unwritable=unwritable,
        )
        for name in takeover.asked:
            if patient:
                takeover.postpone(name, now)
            else:
                self._start_agent(name, take_over=True)
        self._take_over_when_complete()

    def _lead_again(self, silent_s: float) -> None:
        """Return to the run after this machine was cut off from all hosts.

        The workers have continued without a leader, so this is a takeover of its own run.
        """
        grace_s = self._spec.leader_grace_s
        fields = {"silent_s": round(silent_s, 3), "grace_s": grace_s}
        self._journal.emit("leader_cut_off", fields)
        self._agents.drop()
        self._workers.places.clear()
        self._watch = ProgressWatch(self._spec.failure_timeout_s)
        self._fence.lead_anew()
        self._machine = self._new_machine(has_checkpoint=True)
        past = summarize(self._folder.read_events())
        self._ask_hosts(past, max(_TAKEOVER_S, grace_s - silent_s), patient=True)

    def _heard_before(self, agent: AgentConnection, message: FromAgent, takeover: Takeover) -> None:
        """Handle an agent's message that arrives during a takeover."""
        host = agent.host.name
        match message:
            case msg.AgentHello():
                takeover.answered(host, message.held)
                if takeover.patient:  # the network is back, so the others will answer soon
                    self._hasten(takeover)
                # The collector has to know the spool before workers report newer shards.
                self._collector.offered(host, agent, message.spooled)
                self._saved.offered(host, agent, message.saved)
                message.spooled, message.saved = [], []
            case ev.AgentFailed(fatal=fatal):
                if takeover.patient and not agent.up and not fatal:
                    del self._agents.by_host[host]
                    takeover.postpone(host, time.monotonic())
                    return
                takeover.failed(host)
        takeover.postponed.append((agent, message))
        self._take_over_when_complete()

    def _hasten(self, takeover: Takeover) -> None:
        takeover.deadline = min(takeover.deadline, time.monotonic() + _TAKEOVER_S)

    def _on_refused(self, host: str, led: msg.LeaderIdentity) -> None:
        """Handle an agent's refusal: another leader leads it, and one of the two has to end."""
        if self._finish is None:
            leads, has_host = self._takeover is None, bool(self._agents.up)
            reason = self._fence.refused(host, led, leads=leads, has_host=has_host)
            self._give_way_for(reason)

    def _on_taken_over(self, agent: AgentConnection, led: msg.LeaderIdentity) -> None:
        """Handle an agent that followed another leader while this one was unreachable."""
        agent.taken_over = True
        if self._finish is None and all(other.taken_over for other in self._agents.up):
            self._give_way_for(self._fence.left(agent.host.name, led))
        # Otherwise the host counts as lost once its connection has ended.

    def _on_lease(self, lease: Lease, seen: float) -> None:
        """Handle the lease of another live leader: one of the two has to end.

        Args:
            lease: the other leader's lease.
            seen: when it was first seen [monotonic s].
        """
        if self._finish is not None:
            return
        if self._takeover is not None:  # the hosts' answers outweigh a lease: decide after them
            self._takeover.leased_by = lease
            self._lease_is_settled()
            return
        last_read = max((agent.last_read for agent in self._agents.by_host.values()), default=0.0)
        trains = bool(self._workers.places)
        reason = self._fence.contested(lease, seen, trains=trains, last_read=last_read)
        self._give_way_for(reason)

    def _give_way_for(self, reason: str) -> None:
        if reason:
            self._end_with(cmd.Finish("failed", reason))

    def _lease_is_settled(self) -> None:
        if self._takeover is not None:
            self._takeover.lease_open = False
            self._take_over_when_complete()

    def _take_over_when_complete(self) -> None:
        takeover = self._takeover
        if takeover is None or not (takeover.complete or time.monotonic() >= takeover.deadline):
            return
        self._takeover = None
        workers = takeover.workers
        if takeover.leased_by is not None:
            reason = self._fence.lease_found(takeover.leased_by, found_workers=bool(workers))
            if reason:
                self._give_way_for(reason)
                return
        self._journal.emit("hosts_changed", self._hosts())
        for host in takeover.came_back:
            self._journal.emit("host_returned", {"host": host})
        event = takeover.event(self._hostfile.slots)
        if takeover.unwritable is not None:
            if not workers:
                raise takeover.unwritable
            self._journal.warn(f"training goes on without checkpoints: {takeover.unwritable}")
        if event.awaited and not workers:
            names = hosts_named(event.awaited)
            self._journal.warn(
                f"{names} could not be asked whether another leader leads this run; if one does, "
                "the one that began later ends when they meet"
            )
        self._fence.has_led = True
        self._readers.update(self._hostfile.input_hosts, self._hostfile.hosts)
        self._workers.places = workers
        self._progress.is_known = not workers
        for found in event.workers:
            if found.finished:
                self._watch.finished(found.worker)
        self._tell(event)
        for agent, message in takeover.postponed:
            self._heard(agent, message)
        if self._machine.phase is Phase.FORMING:
            # Rendezvous entries on their way to other hosts were lost with the earlier leader.
            cause = "the leader was lost while the world changed"
            self._tell(ev.GenerationStuck(self._machine.generation, cause))
        if self._stop is not None and self._finish is None:
            self._begin_to_stop()

    # -- the loop --------------------------------------------------------------------------

    def _next_deadline(self) -> float:
        takeover = self._takeover
        due = self._machine.deadline() if takeover is None else takeover.deadline
        return self._next_tick if due is None else min(due, self._next_tick)

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + LOOK_S
            if self._takeover is None:
                if self._hostfile.changed():
                    self._hosts_changed()
                self._look_for_requests()
                self._look_for_silence(now)
                self._scale_by_policy(now)
                self._readers.look(now)
            else:
                # Other requests depend on the state of the run, which is not known yet.
                self._look_for_requests(only="stop")
                for host in self._takeover.due(now):
                    self._start_agent(host, take_over=True)
                self._take_over_when_complete()
            self._agents.beat(now, self._journal.recorded_step)
            if self._last is not None and self._takeover is None:
                self._ask_for_last_checkpoint(self._last, now)
            self._saved.look()
            self._agents.release(self._saved.holds)
            self._end_when_fetched()
        due = self._machine.deadline()
        if self._takeover is None and due is not None and now >= due:
            self._tell(ev.Tick())

    def _tell(self, event: ev.Event) -> None:
        """Give the machine an event and carry out the commands it returns."""
        if self._finish is None:
            for command in self._machine.handle(event, time.monotonic()):
                self._do(command)

    def _hosts_and_slots(self) -> list[list[Any]]:
        return [[host.name, host.slots] for host in self._hostfile.slots]

    def _hosts(self) -> dict[str, Any]:
        """Return the fields of the event ``hosts_changed``."""
        prices = {host.name: host.price for host in self._hostfile.hosts.values() if host.price}
        return {"hosts": self._hosts_and_slots(), **({"prices": prices} if prices else {})}

    def _hosts_changed(self) -> None:
        self._journal.emit("hosts_changed", self._hosts())
        self._readers.update(self._hostfile.input_hosts, self._hostfile.hosts)
        self._tell(ev.HostsChanged(self._hostfile.slots))

    def _look_for_silence(self, now: float) -> None:
        silence = self._agents.silence(now)
        if silence is None:
            return
        timeout_s = self._spec.failure_timeout_s
        if self._is_cut_off(silence.values()):
            if min(silence.values()) > timeout_s:
                self._lead_again(min(silence.values()))
            return
        for name, silent_s in silence.items():
            if silent_s > timeout_s:
                self._agents.by_host.pop(name).drop()
                self._agent_lost(name, f"no sign of life for {silent_s:.1f} s", silent_s)
        self._look_at_progress()

    def _is_cut_off(self, silence: Iterable[float]) -> bool:
        """Return whether every host of a training run is silent.

        It is then more likely that this machine was cut off than that all hosts failed.
        """
        trains = bool(self._workers.places and self._machine.members) and self._finish is None
        least_s = min(silence, default=0.0)
        # Heartbeats come at different moments: when one host exceeds the timeout, the others
        # count as silent too if they have reached half of it.
        overdue = least_s > self._spec.failure_timeout_s / 2
        return trains and self._spec.leader_grace_s > 0 and overdue

    def _look_at_progress(self) -> None:
        machine, places = self._machine, self._workers.places
        for agent in self._agents.by_host.values():
            for worker, activity in agent.take_activities().items():
                if worker in places:
                    self._watch.note(worker, activity)
                    self._readers.watch.note(worker, activity.reading)
        for silent in self._watch.silent():
            self._watch.forget(silent.worker)
            self._tell(silent)
        generation, ranks = machine.training
        if machine.phase is Phase.RUNNING:
            self._readers.watch_ranks([(member.worker, member.host) for member in ranks])
        members = [member.worker for member in ranks if member.worker in places]
        found = self._watch.stuck(generation, members)
        if isinstance(found, ev.GenerationStuck):
            self._progress.note_if_further(self._watch.furthest(members))
        for event in found if isinstance(found, list) else [found]:
            self._tell(event)
        for worker, step_s, line in self._watch.busy(generation, members):
            place = f", which is at {line}" if line else ""
            name = self._workers.name(worker)
            message = f"the others wait for worker {name}{place}, {step_s:.0f} s into its step"
            self._journal.emit("log_note", {"message": message})

    def _agent_lost(self, name: str, cause: str, silent_s: float | None) -> None:
        self._forget_workers(name)
        self._tell(ev.AgentLost(name, cause, silent_s))

    def _forget_workers(self, host: str) -> None:
        for worker in self._workers.of_host(host):
            del self._workers.places[worker]
            self._watch.forget(worker)

    def _scale_by_policy(self, now: float) -> None:
        if self._scaler is not None and self._stop is None:
            change = self._scaler.look(self._machine, self._hostfile.hosts.values(), now)
            if change is not None:
                self._tell(change)

    # -- requests of the user --------------------------------------------------------------

    def _look_for_requests(self, only: str | None = None) -> None:
        for request in self._folder.take_requests(only):
            answer = self._answer(request.op, request.fields)
            if answer.event is not None:
                self._tell(answer.event)
            fields = {
                "id": request.id,
                "op": request.op,
                "ok": answer.ok,
                "message": answer.message,
            }
            self._journal.emit("command_done", {**request.fields, **fields})

    def _answer(self, op: str, fields: Mapping[str, Any]) -> requests.Answer:
        hosts, draining = self._hostfile.hosts, self._machine.draining
        match op:
            case "stop":
                self._ask_to_stop(StopCause.COMMAND)
                return requests.Answer("the run is being stopped")
            case "scale":
                run_id, wanted = self._folder.run_id, fields.get("np")
                return requests.scale(
                    wanted, self._spec, run_id, hosts.values(), draining, self._scaler
                )
            case "policy":
                return requests.steer_policy(fields.get("do"), self._scaler)
            case "drain":
                return requests.drain(fields, hosts, draining, self._reserve_s)
        return requests.Answer(f"the leader knows no request {op!r}", ok=False)

    @property
    def _reserve_s(self) -> float:
        return max(_LEAST_RESERVE_S, 2 * self._collector.newest_s)

    def _ask_to_stop(self, cause: StopCause) -> None:
        """Stop the run: at the first request after a last checkpoint, at the second immediately."""
        if self._stop is not None:
            if {self._stop, cause} != _SHUTDOWN:
                self._stop_now()
                if self._finish is not None:
                    self._loop.stop()  # without what is still to be fetched
            return
        self._stop = cause
        self._journal.emit("stop_requested", {"reason": cause.value})
        if self._finish is not None:
            pass  # it ends anyway, when all is fetched
        elif self._takeover is None:
            self._begin_to_stop()
        else:  # workers may exist, and it is not yet known where and at which step
            self._hasten(self._takeover)

    def _begin_to_stop(self) -> None:
        progress, now = self._progress, time.monotonic()
        if self._spec.checkpoint_every_s and (progress.reached.step or not progress.is_known):
            # The others cannot reach a step boundary until a frozen worker counts as lost.
            patience_s = _STOP_CHECKPOINT_S + self._spec.failure_timeout_s
            self._last = LastCheckpoint(now, patience_s, step=progress.reached.step)
            self._ask_for_last_checkpoint(self._last, now)
        else:
            self._stop_now()

    def _ask_for_last_checkpoint(self, last: LastCheckpoint, now: float) -> None:
        holders = self._machine.state_holders
        if not holders or now >= last.deadline:
            self._stop_now()
            return
        if self._machine.phase in (Phase.REGROUPING, Phase.ASSEMBLING):
            last.survives_at(max(worker.step for worker in holders))
        for worker in last.whom_to_ask([worker.name for worker in holders], now):
            self._say(worker, msg.SaveState())

    def _stop_now(self) -> None:
        self._last = None
        if self._stop is not None:
            self._tell(ev.StopRequested(self._stop.value))

    # -- messages of agents ----------------------------------------------------------------

    def _post(self, agent: AgentConnection, message: FromAgent) -> None:
        self._loop.post(lambda: self._heard(agent, message))

    def _heard(self, agent: AgentConnection, message: FromAgent) -> None:
        host = agent.host.name
        if self._agents.by_host.get(host) is not agent:
            return  # from an agent that was dropped or asked to end
        if isinstance(message, msg.Refused):
            self._on_refused(host, message.led)
            return
        if self._takeover is not None:
            self._heard_before(agent, message, self._takeover)
            return
        if not isinstance(message, ev.AgentFailed) and message.seq:
            agent.acted_upon = message.seq
        places = self._workers.places
        match message:
            case msg.AgentHello():
                self._on_hello(agent, message)
            case ev.AgentFailed():
                del self._agents.by_host[host]
                if agent.up:
                    self._agent_lost(host, message.cause, None)
                else:
                    self._tell(message)
            case msg.TakenOver(led=led):
                self._on_taken_over(agent, led)
            case msg.EntryAdded(entry=entry):
                self._pass_on(entry, but=host)
            case msg.Notice(cause=cause, leave_in_s=leave_in_s):
                if host in self._hostfile.hosts:
                    self._tell(requests.host_draining(host, cause, leave_in_s, self._reserve_s))
            case msg.AgentWarning(message=text):
                self._journal.warn(f"host {host}: {text}")
            case msg.HostSample():
                self._journal.emit("host_sample", message.event_fields(host))
            case msg.PastReading(message=reading):
                self._journal.read(*reading.as_event())
            case msg.Log() | msg.WorkerEnded() | msg.WorkerNotStarted() | msg.WorkerSaid():
                if message.worker in places:
                    self._heard_of_worker(message)

    def _on_hello(self, agent: AgentConnection, hello: msg.AgentHello) -> None:
        host = agent.host.name
        fields = {
            "host": host,
            "seconds": round(time.monotonic() - agent.started_at, 3),
            "python": hello.python,
            "hostname": hello.hostname,
            "interface": hello.interface,
            "cpus": hello.cpus,
            "machine": hello.machine,
        }
        self._journal.emit("agent_started", fields)
        self._readers.watch.machines[host] = (hello.machine or host, hello.cpus)
        if hello.swept:
            strays = count(hello.swept, "stray process")
            self._journal.warn(f"host {host}: ended {strays} of this run")
        for found in hello.held.workers if hello.held is not None else ():
            if found.worker not in self._workers.places:  # its agent answered after the takeover
                agent.send(msg.Kill(found.worker))
        self._collector.offered(host, agent, hello.spooled)
        self._saved.offered(host, agent, hello.saved)
        self._tell(ev.AgentReady(host))

    def _heard_of_worker(
        self, message: msg.Log | msg.WorkerEnded | msg.WorkerNotStarted | msg.WorkerSaid
    ) -> None:
        worker = message.worker
        host, slot = self._workers.places[worker]
        match message:
            case msg.Log(data=data):
                lines = self._workers.log(worker, data)
                members = self._machine.members
                if members and members[0].worker == worker:
                    for line in lines:
                        self._journal.output(host, slot, line)
            case msg.WorkerEnded(code=code, signal=number):
                exited = ev.WorkerExited(worker, code, number)
                self._watch.forget(worker)
                match self._workers.ended(exited):
                    case ev.ScriptFailed() as failed:
                        self._tell(failed)
                    case (kind, fields):
                        self._journal.emit(kind, fields)
                self._tell(exited)
            case msg.WorkerNotStarted(error=error):
                del self._workers.places[worker]
                command = " ".join(self._spec.command)
                text = f"the command {command!r} cannot be started on host {host}: {error}"
                self._tell(ev.ScriptFailed(worker, text))
            case msg.WorkerSaid(message=said):
                self._on_report(worker, said)

    def _on_report(self, worker: str, said: msg.WorkerReport) -> None:
        match said:
            case msg.Ready(warm_s=warm_s):
                self._tell(ev.WorkerReady(worker, round(warm_s, 3)))
            case msg.Joined(generation=generation, stopped=stopped):
                if self._progress.stopped and not stopped:
                    # The rank that reported it was lost before another one had agreed.
                    self._progress.stopped = ""
                    self._journal.emit("training_goes_on", {"step": said.step})
                self._tell(ev.WorkerJoined(worker, generation))
            case msg.Broken(generation=generation, step=step, error=error, state=state):
                self._progress.note_if_further(said.progress)
                self._tell(ev.WorkerBroken(worker, generation, step, error, state))
            case msg.Held(generation=generation, step=step, state=state):
                self._tell(ev.WorkerHeld(worker, generation, step, state))
            case msg.Finished(progress=progress):
                self._progress.reached = progress
                self._watch.finished(worker)
                self._tell(ev.WorkerFinished(worker))
            case msg.ScriptRaised(traceback=traceback, progress=progress):
                # Workers do not print it themselves, so that the terminal shows it once.
                self._workers.write(worker, traceback)
                self._workers.failure_told = True
                self._progress.note_if_further(progress)
                self._tell(ev.ScriptFailed(worker, explain_script_error(traceback) or traceback))
            case msg.Metrics(progress=progress):
                self._progress.reached = progress
                self._journal.emit(*said.as_event())
            case msg.TrainingStopped(reason=reason):
                self._progress.stopped = reason
                self._journal.emit(*said.as_event())
            case msg.BatchPlan() | msg.Shares() | msg.RescaleFinished():
                self._journal.emit(*said.as_event())
            case msg.WorkerWarning(message=text):
                self._journal.warn(f"worker {self._workers.name(worker)}: {text}")
            case msg.Restored():
                self._progress.stopped = ""
                kind, fields = said.as_event()
                self._journal.emit(kind, {**fields, "path": self._collector.restored_from})
            case msg.Dataset() | msg.Used():
                self._journal.read(*said.as_event())
            case msg.CheckpointWritten():
                self._on_checkpoint_written(worker, said)
            case msg.FileSaved(file=saved, seconds=seconds):
                host, _ = self._workers.places[worker]
                self._saved.saved(host, self._agents.by_host[host], saved, seconds)
            case msg.CheckpointFailed(message=text):
                self._collector.failed(self._workers.places[worker][0], text)

    def _on_checkpoint_written(self, worker: str, said: msg.CheckpointWritten) -> None:
        host, _ = self._workers.places[worker]
        if self._last is not None:
            self._last.written(said.step)
        self._progress.written = Position(said.step, said.epoch, 0, said.examples)
        self._progress.note_if_further(self._progress.written)
        self._collector.written(host, self._agents.by_host[host], said)

    # -- checkpoints -----------------------------------------------------------------------

    def _checkpoints_idle(self) -> None:
        newest_step = self._collector.newest_step
        if self._takeover is None:
            self._tell(ev.StateSaved(newest_step))
        self._end_when_fetched()
        if self._last is not None and self._last.is_kept(newest_step):
            if newest_step == self._progress.written.step:
                # Steps after the last checkpoint are discarded by the stop.
                self._progress.reached = self._progress.written
            self._stop_now()

    def _end_when_fetched(self) -> None:
        """End the loop once training has ended and nothing is to be waited for."""
        if self._finish is None:
            return
        late = time.monotonic() >= self._finished_at + _FETCH_PATIENCE_S
        awaits_checkpoint = self._collector.busy and self._finish.status != "failed" and not late
        if self._saved.is_awaited(self._finished_at):
            self._saved.tell_awaited(self._finished_at)
        elif not awaits_checkpoint:
            self._loop.stop()

    # -- commands of the machine -----------------------------------------------------------

    def _do(self, command: cmd.Command) -> None:
        match command:
            case cmd.Emit(kind=kind, fields=fields):
                self._journal.emit(kind, fields)
            case cmd.StartAgent(host=host):
                self._start_agent(host, take_over=False)
            case cmd.StopAgent(host=host):
                self._stop_agent(host)
            case cmd.StartWorker(worker=worker, host=host, slot=slot):
                self._workers.places[worker] = (host, slot)
                known = self._hostfile.hosts.get(host, Host(host))
                # Other jobs may use the rest of the slots that the host may ever hold.
                slots = max(known.slots, known.max_slots or 0)
                order = msg.StartWorker(worker, slot, slots, devices=list(known.devices))
                self._agents.send(host, order)
                if self._readers.use is not None:
                    self._say(worker, self._readers.use)
            case cmd.KillWorker(worker=worker, reason=reason):
                self._send_to_host_of(worker, msg.Kill(worker, reason))
            case cmd.Leave(worker=worker):
                self._say(worker, msg.Leave())
            case cmd.Hold(worker=worker):
                self._say(worker, msg.Hold())
            case cmd.SaveState(worker=worker):
                self._save_state(worker)
            case cmd.Abort(generation=generation):
                self._agents.send_all(self._agents.by_host, msg.CallOff(generation))
            case cmd.Announce():
                self._form(command)
            case cmd.Finish():
                self._finish = command
                self._finished_at = time.monotonic()
                self._end_when_fetched()

    def _start_agent(self, name: str, *, take_over: bool) -> None:
        self._agents.start(name, self._hostfile.hosts, self._fence.identity, take_over=take_over)

    def _stop_agent(self, host: str) -> None:
        agent = self._agents.by_host.get(host)
        if agent is not None:
            self._collector.leaving(agent)
            self._agents.leave(host)
            self._agents.release(self._saved.holds)
            self._forget_workers(host)

    def _save_state(self, worker: str) -> None:
        if self._spec.checkpoint_every_s:
            self._say(worker, msg.SaveState())
        else:
            host, _ = self._workers.places[worker]
            self._journal.warn(
                f"host {host} will go with the only copy of the state, and this run writes no "
                "checkpoints (--checkpoint-every 0): add another host to the hostfile in time"
            )

    def _form(self, command: cmd.Announce) -> None:
        """Announce a generation; if no worker holds the state, send a checkpoint to it first."""
        if command.root is None and command.restore:
            hosts = list(dict.fromkeys(member.host for member in command.members))
            folder = f"restore-{command.generation}"
            wanted = functools.partial(self._is_forming, command.generation)
            done = functools.partial(self._restore, command)
            self._collector.bring(hosts, folder, wanted, done)
        else:
            self._announce(command)

    def _is_forming(self, generation: int) -> bool:
        machine = self._machine
        return machine.generation == generation and machine.phase is Phase.FORMING

    def _restore(self, command: cmd.Announce, brought: Brought) -> None:
        if not self._is_forming(command.generation):
            if self._finish is None:  # aborted; members that wait must still hear of it
                self._announce(command)
            return
        if brought.error:
            go_on = (
                "Nothing was removed or begun anew: mend that and go on with: hvd-elastic run "
                f"--resume {self._folder.run_id}, or start a new run"
            )
            self._tell(ev.StopRequested(f"{brought.error}. {go_on}", "failed"))
            return
        newest = brought.checkpoint
        # Recorded by the leader before the announcement, so it precedes all that workers record.
        restored = {"step": 0, "epoch": 0, "examples": 0}
        if newest is None:
            self._journal.warn("there is no complete checkpoint: training begins anew")
        else:
            restored = {"step": newest.step, "epoch": newest.epoch, "examples": newest.examples}
        self._journal.read("restored", restored)
        by_host = {member.host: member.worker for member in reversed(command.members)}
        path = None if newest is None else str(newest.path)
        rooted = replace(command, root=by_host.get(brought.host))
        self._announce(rooted, brought.manifest or None, path)

    def _announce(
        self, order: cmd.Announce, restore: str | None = None, checkpoint: str | None = None
    ) -> None:
        """Send the announcement of a generation to its members' hosts.

        See :class:`hvd_elastic.wire.messages.Announcement` for the arguments.
        """
        if order.generation != self._machine.generation:
            return  # a newer generation was announced while the checkpoint was transferred
        life = self._fence.identity.leader
        announcement = msg.Announcement(order, life, restore, checkpoint)
        hosts = dict.fromkeys(member.host for member in order.members)
        self._agents.send_all(hosts, msg.AnnounceGeneration.of(announcement))

    # -- sending ---------------------------------------------------------------------------

    def _tell_of_readers(self, use: msg.UseInput) -> None:
        """Tell all workers which processes of input hosts read for them now."""
        for worker in self._workers.places:
            self._say(worker, use)

    def _say(
        self, worker: str, message: msg.Hold | msg.Leave | msg.SaveState | msg.UseInput
    ) -> None:
        self._send_to_host_of(worker, msg.Tell(worker, message))

    def _send_to_host_of(self, worker: str, message: msg.Kill | msg.Tell) -> None:
        host, _ = self._workers.places.get(worker, ("", 0))
        self._agents.send(host, message)

    def _pass_on(self, entry: msg.StoreEntry, *, but: str) -> None:
        """Send a rendezvous entry to all hosts of its generation except ``but``, its origin."""
        if entry.generation == self._machine.generation:
            self._agents.pass_on(entry, but, self._machine.members)


def _with_missing(finish: cmd.Finish, missing: str) -> cmd.Finish:
    """Return how a run ended, given which saved files could not be fetched; empty: none."""
    if not missing:
        return finish
    if finish.status == "succeeded":
        return cmd.Finish("failed", f"training has ended, and {missing}")
    return replace(finish, message=f"{finish.message}; {missing}")
