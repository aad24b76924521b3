"""The leader of a run: carries out what the machine decides, and tells it what happened.

It owns no policy: :class:`hvd_elastic.control.machine.RunMachine` decides, this module connects,
sends, writes and reads. Everything runs in one loop; the threads of the agents' connections and of
file transfers only post to it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import secrets
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.checkpoint.collector import Brought, CheckpointCollector
from hvd_elastic.checkpoint.final import LastCheckpoint
from hvd_elastic.checkpoint.lease import Claim, ClaimKeeper
from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import StopCause, crash_stack, explain_script_error, how_it_ended
from hvd_elastic.control.loop import Loop
from hvd_elastic.control.machine import MachineConfig, Phase, RunMachine
from hvd_elastic.control.progress import Position, ProgressWatch
from hvd_elastic.errors import CheckpointError, HostfileError
from hvd_elastic.formatting import count, hosts_named, worker_name
from hvd_elastic.hosts.hostfile import Host, parse_hostfile, require_prices
from hvd_elastic.hosts.ssh import SshOptions, is_local, own_address_towards
from hvd_elastic.leader.remote_agent import AgentConnection, AgentDown
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.split_brain import Rival
from hvd_elastic.leader.takeover import Adoption
from hvd_elastic.records.json_lines import EventLog, RecordNotWrittenError
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary, summarize
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from hvd_elastic.leader.scaling import Scaler

__all__ = ["Leader"]

_TICK_S = 0.25
_ADOPTION_S = 12.0
_STOP_CHECKPOINT_S = 10.0
_GRACE_S = 3.0
_FETCH_PATIENCE_S = 60.0
_LOG_TAIL_LINES = 30
_LOG_END_BYTES = 64 << 10  # holds the stacks of a hundred threads
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals at which Python's faulthandler writes a stack."""
_HOSTFILE_GONE_S = 2.0
_LEAST_RESERVE_S = 10.0
"""Of the time that a host has left, for the last checkpoint and for leaving."""

_BACKLOG_S = 2.0
"""What hosts said while this process stood still is read within this time."""

_STOP_SIGNALS = {
    signal.SIGINT: StopCause.INTERRUPT,
    signal.SIGTERM: StopCause.TERMINATE,
    signal.SIGHUP: StopCause.HANGUP,
}
_SHUTDOWN = {StopCause.TERMINATE, StopCause.HANGUP}
"""A machine that is shut down may send both, one right after the other: they are one request."""

FromAgent = msg.AgentToLeader | AgentDown
Show = Callable[[Mapping[str, Any]], None]
ShowOutput = Callable[[str, int, str], None]


class Leader:
    """Leads one run from its start, or from where it stood, to its end.

    Args:
        spec: what to run.
        folder: its run folder, whose lead the caller has taken.
        environment: variables for the workers; they reach them through the agents' stdin.
        show: called with every event as it is recorded.
        show_output: called with (host, local rank, line) for what the worker of rank 0 prints.
        resumed: the run had a leader before.
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
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._environment = dict(environment)
        self._show = show
        self._show_output = show_output
        self._events = EventLog(folder.events)
        self._audit = EventLog(folder.audit) if spec.audit else None
        self._output = EventLog(folder.output)
        self._loop = Loop(self._next_deadline, self._tick)
        self._hosts: dict[str, Host] = {}
        self._hostfile_stamp: tuple[int, int, int] | None = None
        self._hostfile_error = ""
        self._hostfile_gone_since: float | None = None
        self._agents: dict[str, AgentConnection] = {}
        self._taken: set[str] = set()
        """Hosts whose agents follow another leader, and whose connections end."""
        self._ending: list[AgentConnection] = []
        self._workers: dict[str, tuple[str, int]] = {}
        self._started: dict[str, float] = {}
        self._logs: dict[str, Any] = {}
        self._partial: dict[str, str] = {}
        self._members: tuple[cmd.Member, ...] = ()
        self._next_tick = time.monotonic()
        self._finish: cmd.Finish | None = None
        self._finish_deadline = 0.0
        self._stop: StopCause | None = None
        self._last: LastCheckpoint | None = None
        self._failure_shown = False
        self._crash_shown = ""
        self._progress = {"step": 0, "epoch": 0, "examples": 0}
        self._written = dict(self._progress)
        self._resumed = resumed
        self._collector = CheckpointCollector(
            folder.run_id,
            folder.checkpoints,
            spec.checkpoint_folder,
            keep=spec.keep_checkpoints,
            copies=spec.checkpoint_copies,
            resumed=resumed,
            agents=lambda: self._agents,
            post=self._loop.post,
            emit=self._emit,
            warn=self._warn,
            on_idle=self._checkpoints_idle,
        )
        self._machine = self._new_machine(has_checkpoint=resumed)
        self._id = secrets.token_hex(8)
        self._own_ids = {self._id}
        self._led_since = time.time()
        self._led_elsewhere = False
        self._gave_way = False
        self._has_led = False
        self._claim: ClaimKeeper | None = None
        self._claimed_by: Claim | None = None
        """Another leader, of which more is known when the hosts have been asked."""
        self._adoption: Adoption | None = None
        self._unwritable: CheckpointError | None = None
        self._took_over = False
        self._next_beat = 0.0
        self._recorded_step: int | None = None
        self._watch = ProgressWatch(spec.failure_timeout_s)
        self._looked_at = time.monotonic()
        self._scaler: Scaler | None = None

    def _expect_checkpoint(self, past: RunSummary) -> None:
        """Have nothing begun anew where a checkpoint was written, or may have been."""
        if past.checkpoints:
            self._collector.expect(f"that of step {past.checkpoints[-1].step} was written")
        elif self._folder.began_elsewhere:
            self._collector.expect("it was led by another machine, which may have written one")

    def _new_scaler(self, past: Sequence[Mapping[str, Any]]) -> Scaler | None:
        if self._spec.policy == "fixed":
            return None
        from hvd_elastic.leader.scaling import Scaler

        age_s = max(0.0, time.time() - past[0]["t"]) if past else 0.0
        return Scaler(self._spec, self._emit, time.monotonic() - age_s, past)

    def _new_machine(self, *, has_checkpoint: bool) -> RunMachine:
        spec = self._spec
        config = MachineConfig(
            min_np=spec.min_np,
            max_np=spec.max_np,
            np=self._first_np(),
            pinned=spec.pin_hosts,
            spares=spec.spares,
        )
        return RunMachine(config, has_checkpoint)

    def _first_np(self) -> int | None:
        """A policy begins with little, and learns from it what more would bring."""
        spec = self._spec
        if spec.np is not None or spec.policy == "fixed":
            return spec.np
        hosts = list(self._hosts.values()) or self._read_hostfile()
        pinned = sum(host.slots for host in hosts if host.name in spec.pin_hosts)
        return max(spec.min_np, pinned)

    # -- life ------------------------------------------------------------------------------

    @property
    def gave_way(self) -> bool:
        """Whether it ended because another one leads, and had begun nothing."""
        return self._gave_way and not self._has_led

    def run(self) -> cmd.Finish:
        """Lead until the end.

        Raises:
            HostfileError: the hostfile cannot be read at the start.
            CheckpointError: the checkpoint folder cannot be written, and nothing of the run lives.
        """
        try:
            self._collector.check()
        except CheckpointError as error:
            if not self._resumed:
                raise
            self._unwritable = error  # that costs checkpoints, not what is being trained
        hosts = self._read_hostfile()
        records = self._folder.read_events() if self._resumed else []
        past = summarize(records) if self._resumed else None
        if past is not None:
            self._expect_checkpoint(past)
        self._scaler = self._new_scaler(records)
        self._emit(
            "run_started",
            {
                "run_id": self._folder.run_id,
                "hosts": [[host.name, host.slots] for host in hosts],
                "min_np": self._spec.min_np,
                "max_np": self._spec.max_np,
                "np": self._spec.np,
                "pinned": list(self._spec.pin_hosts),
                "command": list(self._spec.command),
                "resumed": self._resumed,
            },
        )
        with self._signals(), self._claimed():
            try:
                if past is not None:
                    self._ask_around(hosts, past, _ADOPTION_S)
                else:
                    self._has_led = True
                    self._tell(self._hosts_changed(hosts))
                self._loop.run()
            except BaseException as error:
                if self._members:
                    self._let_go(error)
                else:
                    self._end_agents()
                raise
            self._end_agents()
        assert self._finish is not None
        newest = self._collector.newest_step
        self._emit(
            "run_finished",
            {
                "run_id": self._folder.run_id,
                "status": self._finish.status,
                "message": self._finish.message,
                "steps": self._progress["step"],
                "examples": self._progress["examples"],
                "epochs": self._progress["epoch"],
                "checkpoint_step": newest if newest >= 0 else None,
                "led_elsewhere": self._led_elsewhere,
            },
        )
        for file in self._logs.values():
            file.close()
        if self._audit is not None:
            self._audit.close()
        self._output.close()
        self._events.close()
        return self._finish

    @contextlib.contextmanager
    def _signals(self) -> Any:
        def ask_to_stop(number: int, _: Any) -> None:
            cause = _STOP_SIGNALS[signal.Signals(number)]
            self._loop.post(functools.partial(self._ask_to_stop, cause))

        before = {number: signal.signal(number, ask_to_stop) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            # A second Ctrl-C while the agents end must not leave anything behind.
            for number in before:
                signal.signal(number, signal.SIG_IGN)

    @contextlib.contextmanager
    def _claimed(self) -> Any:
        """Keep other leaders from a place of checkpoints that they may share."""
        if self._spec.checkpoint_folder is None:  # the lock of the run folder is enough
            yield
            return
        self._claim = ClaimKeeper(
            self._collector.place,
            Claim.of_this_process(self._folder.run_id, self._led_since),
            lambda: self._loop.post(self._claim_is_settled),
            lambda claim, seen: self._loop.post(lambda: self._on_claim(claim, seen)),
        )
        try:
            yield
        finally:
            self._claim.end()

    def _end_agents(self) -> None:
        """Every agent ends its workers and itself; wait until they have."""
        agents = [*self._agents.values(), *self._ending]
        if self._gave_way:
            for agent in agents:
                agent.drop()  # what lives there goes on as if this leader had never come
            return
        succeeded = self._finish is not None and self._finish.status == "succeeded"
        self._collector.end(succeeded=succeeded)
        for agent in agents:
            agent.shutdown(_GRACE_S)
        deadline = time.monotonic() + _GRACE_S + 9
        for agent in agents:
            if not agent.wait_gone(max(0.0, deadline - time.monotonic())):
                self._warn(f"host {agent.host.name}: the agent did not answer the end of the run")
                agent.drop()

    def _let_go(self, error: BaseException) -> None:
        """After a defect of this process: nobody's training ends with it."""
        for agent in self._agents.values():
            agent.drop()
        with contextlib.suppress(Exception):  # what is told may be what is broken
            self._warn(
                f"the leader fails ({type(error).__name__}: {error}). The hosts go on without it "
                f"for {self._spec.leader_grace_s:g} s (--leader-grace), and then leave a "
                f"checkpoint: hvd-elastic run --resume {self._folder.run_id} leads on"
            )

    # -- the succession of an earlier leader -------------------------------------------------

    def _ask_around(
        self, hosts: list[Host], past: RunSummary, wait_s: float, *, patient: bool = False
    ) -> None:
        """Before anything else: what do the hosts still hold of this run?"""
        awaited = past.generation_hosts or [host.name for host in hosts]
        # Those that the hostfile does not name any more hold workers that have to go.
        asked = list(dict.fromkeys([*awaited, *(host.name for host in hosts)]))
        adoption = Adoption(awaited, asked, time.monotonic() + wait_s, patient=patient)
        adoption.claim_open = self._claim is not None and not patient
        self._adoption = adoption
        if past.np == self._spec.np:  # otherwise the user has asked for another size just now
            adoption.requested_np, adoption.slots = past.scaled_to, tuple(past.scaled_slots)
        adoption.draining = tuple(past.draining)
        adoption.gave_notice = frozenset(
            name for name, found in past.draining.items() if not found.asked
        )
        self._hosts = {host.name: host for host in hosts}
        for name in asked:
            if patient:
                adoption.postpone(name, time.monotonic())
            else:
                self._start_agent(name, take_over=True)
        self._adopt_when_complete()

    def _lead_again(self, silent_s: float) -> None:
        """No host is heard any more: this machine is cut off, and the run goes on without it."""
        grace_s = self._spec.leader_grace_s
        self._emit("leader_cut_off", {"silent_s": round(silent_s, 3), "grace_s": grace_s})
        for agent in self._agents.values():
            agent.drop()
        self._agents.clear()
        self._workers.clear()
        self._members = ()
        self._watch = ProgressWatch(self._spec.failure_timeout_s)
        # The agents tell leaders apart by it, and this one comes as another.
        self._id = secrets.token_hex(8)
        self._own_ids.add(self._id)
        self._led_since = time.time()
        self._machine = self._new_machine(has_checkpoint=True)
        past = summarize(self._folder.read_events())
        wait_s = max(_ADOPTION_S, grace_s - silent_s)
        self._ask_around(list(self._hosts.values()), past, wait_s, patient=True)

    def _heard_of_the_past(
        self, agent: AgentConnection, host: str, message: FromAgent, adoption: Adoption
    ) -> None:
        match message:
            case msg.AgentHello():
                adoption.answered(host, message.held)
                if adoption.patient:  # whoever is alive can be reached by now
                    adoption.deadline = min(adoption.deadline, time.monotonic() + _ADOPTION_S)
                # Before any worker says that it has written another checkpoint.
                self._collector.offered(host, agent, message.spooled)
                message.spooled = []
            case AgentDown(fatal=fatal):
                if adoption.patient and not agent.up and not fatal:
                    del self._agents[host]
                    adoption.postpone(host, time.monotonic())
                    return
                adoption.failed(host)
        adoption.postponed.append((agent, host, message))
        self._adopt_when_complete()

    def _on_refused(self, host: str, led: msg.LeaderIdentity) -> None:
        """Another leader leads the agent of ``host``: one of the two has to end."""
        rival = Rival.of_agent(host, led, self._spec.failure_timeout_s)
        if rival.leader in self._own_ids or self._finish is not None:
            return  # an agent that has not noticed yet that this leader was cut off
        began = self._adoption is None
        if not began:
            self._give_way(rival)
        elif rival.goes_before(self._id, self._led_since):
            self._give_way(rival, "began later")
        elif not any(agent.up for agent in self._agents.values()):
            self._give_way(rival, "has no host left")
        # Else it gives way as soon as it meets this one; the host is tried again.

    def _on_taken_over(self, host: str, led: msg.LeaderIdentity) -> None:
        """The agent of ``host`` left for another leader, since nothing was heard of this one."""
        self._taken.add(host)
        up = (name for name, agent in self._agents.items() if agent.up)
        if self._finish is None and self._taken.issuperset(up):
            rival = Rival.of_agent(host, led, self._spec.failure_timeout_s)
            self._led_elsewhere = True
            self._finish = cmd.Finish("failed", rival.explain_takeover())
            self._loop.stop()
        # Else this host counts as lost as soon as the end of its connection is read.

    def _give_way(self, rival: Rival, why: str = "") -> None:
        """End; ``why`` this one, empty where it leads nothing that would have to end too."""
        self._led_elsewhere = True
        self._gave_way = not why
        if not why and self._has_led:  # it was cut off, and asked its hosts again
            why = "lost its hosts meanwhile"
        self._finish = cmd.Finish("failed", rival.explain(why))
        self._loop.stop()

    def _claim_is_settled(self) -> None:
        if self._adoption is not None:
            self._adoption.claim_open = False
            self._adopt_when_complete()

    def _on_claim(self, claim: Claim, seen: float) -> None:
        """Another leader lives, whose claim was first seen then: one of the two has to end."""
        if self._finish is not None or self._claim is None:
            return
        if self._adoption is not None:  # whom the hosts follow counts for more
            self._claimed_by = claim
            self._claim_is_settled()
            return
        own = self._claim.claim
        rival = Rival.of_claim(claim, str(self._collector.place))
        if not self._workers:
            self._give_way(rival, "has no process that trains")
        elif rival.goes_before(own.leader, own.led_since):
            self._give_way(rival, "began later")
        elif any(agent.last_read > seen + _BACKLOG_S for agent in self._agents.values()):
            self._claim.insist()  # it gives way as soon as it sees that

    def _adopt_when_complete(self) -> None:
        adoption = self._adoption
        if adoption is None or not (adoption.complete or time.monotonic() >= adoption.deadline):
            return
        self._adoption = None
        claimed_by, self._claimed_by = self._claimed_by, None
        if claimed_by is not None and self._claim is not None:
            if not adoption.workers:
                place = str(self._collector.place)
                self._give_way(Rival.of_claim(claimed_by, place))
                return
            self._claim.insist()  # its hosts have lost that leader
        slots = tuple(ev.HostSlots(host.name, host.slots) for host in self._hosts.values())
        self._emit("hosts_changed", {"hosts": [[host.name, host.slots] for host in slots]})
        for host in adoption.came_back:
            self._emit("host_returned", {"host": host})
        event = adoption.event(slots)
        if self._unwritable is not None and not event.workers:
            raise self._unwritable
        if self._unwritable is not None:
            self._warn(f"training goes on without checkpoints: {self._unwritable}")
            self._unwritable = None
        if event.awaited and not event.workers:
            names = hosts_named(event.awaited)
            self._warn(
                f"{names} could not be asked whether another leader leads this run; if one does, "
                "the one that began later ends when they meet"
            )
        self._has_led = True
        self._workers = dict(adoption.workers)
        self._took_over = bool(self._workers)
        self._members = event.members
        for found in event.workers:
            if found.finished:
                self._watch.finished(found.worker)
        self._tell(event)
        for agent, host, message in adoption.postponed:
            self._heard(agent, host, message)
        if self._machine.phase is Phase.FORMING:
            # What had been put into its stores for other hosts was lost with the leader.
            cause = "the leader was lost while the world changed"
            self._tell(ev.GenerationStuck(self._machine.generation, cause))
        if self._stop is not None and self._finish is None:
            self._begin_to_stop()

    # -- the loop --------------------------------------------------------------------------

    def _next_deadline(self) -> float:
        due = self._machine.deadline()
        if self._adoption is not None:
            due = self._adoption.deadline
        return self._next_tick if due is None else min(due, self._next_tick)

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            if self._adoption is None:
                self._look_at_hostfile()
                self._look_for_requests()
                self._look_for_silence(now)
                self._scale_by_policy(now)
            else:
                self._look_for_requests(only="stop")  # the others need to know what there is
                for host in self._adoption.due(now):
                    self._start_agent(host, take_over=True)
                self._adopt_when_complete()
            if now >= self._next_beat:
                self._next_beat = now + self._spec.heartbeat_s
                for agent in self._agents.values():
                    agent.beat(self._recorded_step)
            if self._last is not None and self._adoption is None:
                self._ask_for_last_checkpoint(self._last, now)
            if self._finish is not None and now >= self._finish_deadline:
                self._loop.stop()
        if self._adoption is None:
            self._tell(ev.Tick())

    def _tell(self, event: ev.Event) -> None:
        """Give the machine a fact and do what it says."""
        if self._finish is None:
            for command in self._machine.handle(event, time.monotonic()):
                self._do(command)

    def _emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        try:
            record = self._events.append(kind, fields)
        except RecordNotWrittenError as error:
            self._show({"t": time.time(), "kind": "warning", "message": str(error)})
            record = error.record
        self._show(record)
        if self._scaler is not None:
            self._scaler.note(kind, record, record["mono"])

    def _warn(self, message: str) -> None:
        self._emit("warning", {"message": message})

    # -- hosts -----------------------------------------------------------------------------

    def _read_hostfile(self) -> list[Host]:
        path = self._spec.hostfile_path
        if path is None:
            hosts = [Host("localhost", slots=self._spec.slots)]
        else:
            with contextlib.suppress(OSError):  # what is wrong with it is told next
                self._hostfile_stamp = _stamp(path)
            hostfile = parse_hostfile(path)
            hosts = list(hostfile.hosts)
            if self._spec.objective == "cost":
                require_prices(hostfile)
                hosts = self._cheapest_first(hosts)
        self._hosts = {host.name: host for host in hosts}
        return hosts

    def _cheapest_first(self, hosts: list[Host]) -> list[Host]:
        """Until steps are timed, the order is all that keeps to a budget."""
        from hvd_elastic.policy.prices import cheapest_hosts

        spec = self._spec
        pinned = [host for host in hosts if host.name in spec.pin_hosts]
        others = [host for host in hosts if host.name not in spec.pin_hosts]
        missing = max(spec.np or 0, spec.min_np) - sum(host.slots for host in pinned)
        first = cheapest_hosts(others, max(0, missing)) or ()
        return [*pinned, *first, *(host for host in others if host not in first)]

    def _hosts_changed(self, hosts: Iterable[Host]) -> ev.HostsChanged:
        slots = tuple(ev.HostSlots(host.name, host.slots) for host in hosts)
        self._emit("hosts_changed", {"hosts": [[host.name, host.slots] for host in slots]})
        return ev.HostsChanged(slots)

    def _hostfile_is_gone(self, path: Path, error: OSError) -> None:
        """Say so, unless it is for the moment in which an editor replaces it by renaming."""
        now = time.monotonic()
        if self._hostfile_gone_since is None:
            self._hostfile_gone_since = now
        elif now >= self._hostfile_gone_since + _HOSTFILE_GONE_S:
            self._hostfile_gone_since = math.inf
            gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "is gone" if gone else f"cannot be looked at ({error.strerror})"
            self._warn(f"the hostfile {path} {what}, the hosts stay; put it back to change them")

    def _look_at_hostfile(self) -> None:
        path = self._spec.hostfile_path
        if path is None:
            return
        try:
            stamp = _stamp(path)
        except OSError as error:
            self._hostfile_is_gone(path, error)
            return
        self._hostfile_gone_since = None
        if stamp == self._hostfile_stamp:
            return
        self._hostfile_stamp = stamp
        try:
            hosts = self._read_hostfile()
        except HostfileError as error:
            if str(error) != self._hostfile_error:
                self._warn(f"the hostfile was changed and cannot be used, the hosts stay: {error}")
            self._hostfile_error = str(error)
            return
        self._hostfile_error = ""
        # Also when it says the same: whoever mended a host saves the file to have it tried again.
        self._tell(self._hosts_changed(hosts))

    def _look_for_silence(self, now: float) -> None:
        gap_s, self._looked_at = now - self._looked_at, now
        if gap_s > _TICK_S + self._spec.heartbeat_s:
            # It was this process that stood still; nobody was silent for that long.
            for agent in self._agents.values():
                agent.last_heard = min(agent.last_heard + gap_s, now)
            return
        timeout_s = self._spec.failure_timeout_s
        silence = {name: now - a.last_heard for name, a in self._agents.items() if a.up}
        if self._is_cut_off(silence.values()):
            if min(silence.values()) > timeout_s:
                self._lead_again(min(silence.values()))
            return
        for name, silent_s in silence.items():
            if silent_s > timeout_s:
                self._agents.pop(name).drop()
                self._agent_lost(name, f"no sign of life for {silent_s:.1f} s", silent_s)
        self._look_at_progress()

    def _is_cut_off(self, silence: Iterable[float]) -> bool:
        """Whether all hosts of a training run, and so more likely this one, fell silent [s]."""
        trains = bool(self._workers and self._members) and self._finish is None
        least_s = min(silence, default=0.0)
        # Agents beat at different moments: when the first is overdue, the others nearly are.
        return (
            trains
            and self._spec.leader_grace_s > 0
            and (least_s > self._spec.failure_timeout_s / 2)
        )

    def _look_at_progress(self) -> None:
        for silent in self._watch.silent():
            self._watch.forget(silent.worker)
            self._tell(silent)
        if self._machine.phase is not Phase.RUNNING:
            return
        members = [member.worker for member in self._members if member.worker in self._workers]
        found = self._watch.stuck(self._machine.generation, members)
        if isinstance(found, ev.GenerationStuck):
            self._note_progress_if_further(self._watch.furthest(members))
        for event in found if isinstance(found, list) else [found]:
            self._tell(event)
        for worker, step_s, line in self._watch.busy(members):
            place = f", which is at {line}" if line else ""
            name = worker_name(*self._workers[worker])
            message = f"the others wait for worker {name}{place}, {step_s:.0f} s into its step"
            self._emit("log_note", {"message": message})

    def _agent_lost(self, name: str, cause: str, silent_s: float | None) -> None:
        if self._adoption is not None:
            self._adoption.failed(name)
        self._forget_workers(name)
        self._tell(ev.AgentLost(name, cause, silent_s))

    def _forget_workers(self, name: str) -> None:
        for worker in [w for w, (host, _) in self._workers.items() if host == name]:
            del self._workers[worker]
            self._watch.forget(worker)

    def _scale_by_policy(self, now: float) -> None:
        if self._scaler is None or self._stop is not None:
            return
        change = self._scaler.look(self._machine, self._hosts.values(), self._members, now)
        if change is not None:
            self._tell(change)

    # -- requests of the user --------------------------------------------------------------

    def _look_for_requests(self, only: str | None = None) -> None:
        for request in self._folder.take_requests(only):
            ok, message = True, ""
            if request.op == "stop":
                message = "the run is being stopped"
                self._ask_to_stop(StopCause.COMMAND)
            elif request.op == "scale":
                wanted = request.fields.get("np")
                ok, message = self._scale(wanted)
            elif request.op == "policy":
                ok, message = self._steer_policy(request.fields.get("do"))
            elif request.op == "drain":
                ok, message = self._drain_as_asked(request.fields)
            else:
                ok, message = False, f"the leader knows no request {request.op!r}"
            fields = {"id": request.id, "op": request.op, "ok": ok, "message": message}
            self._emit("command_done", {**request.fields, **fields})

    def _scale(self, wanted: Any) -> tuple[bool, str]:
        if wanted is None and self._scaler is not None:
            return self._steer_policy("resume")
        if wanted is None:
            self._tell(ev.TargetChanged(None))
            return True, "the number of processes follows the options of the run again"
        if not isinstance(wanted, int) or wanted < 1:
            return False, f"cannot scale to {wanted!r} processes: give a whole number of 1 or more"
        draining = self._machine.draining
        slots = sum(host.slots for host in self._hosts.values() if host.name not in draining)
        limit = min(slots, self._spec.max_np or slots)
        if not self._spec.min_np <= wanted <= limit:
            return False, (
                f"cannot scale to {count(wanted, 'process')}: this run takes "
                f"{self._spec.min_np} to {limit} (--min-np, --max-np and the slots of the hostfile"
                f"{' that are not drained' if draining else ''})"
            )
        until = ""
        if self._scaler is not None:
            self._scaler.pause(f"{count(wanted, 'process')} wanted by hvd-elastic scale")
            run = self._folder.run_id
            until = f"; the policy is paused until: hvd-elastic scale {run} auto"
        self._tell(ev.TargetChanged(wanted))
        return True, f"{count(wanted, 'process')} wanted{until}"

    def _steer_policy(self, do: Any) -> tuple[bool, str]:
        if self._scaler is None:
            return False, "this run has no policy to steer: it was started with --policy fixed"
        if do == "pause":
            self._scaler.pause("asked to by hvd-elastic policy")
            return True, "the number of processes stays as it is"
        if do == "resume":
            self._scaler.resume("the policy may decide again", time.monotonic())
            return True, "the policy decides the number of processes again"
        return False, f"a policy can be told to pause or resume, not to {do!r}"

    def _drain_as_asked(self, fields: Mapping[str, Any]) -> tuple[bool, str]:
        host, leave_in_s = str(fields.get("host")), fields.get("leave_in_s")
        if host not in self._hosts:
            return False, f"the hostfile has no host {host!r}; it has {', '.join(self._hosts)}"
        if fields.get("undo"):
            if host not in self._machine.draining:
                return False, f"host {host} is not drained"
            self._tell(ev.HostReturned(host))
            return True, f"host {host} may be used again"
        if leave_in_s is not None and not (_is_number(leave_in_s) and leave_in_s >= 0):
            return False, f"a host can leave in 0 seconds or more, not in {leave_in_s!r}"
        self._drain(host, "asked to by hvd-elastic drain", leave_in_s, asked=True)
        return True, f"the run leaves host {host}, and does not use it until it is given back"

    def _drain(
        self, host: str, cause: str, leave_in_s: float | None, *, asked: bool = False
    ) -> None:
        reserve_s = max(_LEAST_RESERVE_S, 2 * self._collector.newest_s)
        train_for_s = None if leave_in_s is None else max(0.0, leave_in_s - reserve_s)
        self._tell(ev.HostDraining(host, cause, train_for_s, leave_in_s, asked))

    def _ask_to_stop(self, cause: StopCause) -> None:
        """First: write a checkpoint and end. Again: end at once."""
        if self._stop is not None:
            if {self._stop, cause} != _SHUTDOWN:
                self._stop_now()
            return
        self._stop = cause
        self._emit("stop_requested", {"reason": cause.value})
        if self._adoption is None:
            self._begin_to_stop()
        else:  # there are workers, perhaps, and it is not yet known where and how far
            self._adoption.deadline = min(self._adoption.deadline, time.monotonic() + _ADOPTION_S)

    def _begin_to_stop(self) -> None:
        # Of workers that were taken over it is not yet known how far they are.
        if self._spec.checkpoint_every_s and (self._progress["step"] or self._took_over):
            now, step = time.monotonic(), self._progress["step"]
            # A frozen worker keeps the others from a step boundary until it counts as lost.
            patience_s = _STOP_CHECKPOINT_S + self._spec.failure_timeout_s
            self._last = LastCheckpoint(now, patience_s, step=step)
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

    # -- what agents say -------------------------------------------------------------------

    def _post(self, agent: list[AgentConnection], host: str, message: FromAgent) -> None:
        self._loop.post(lambda: self._heard(agent[0] if agent else None, host, message))

    def _heard(self, agent: AgentConnection | None, host: str, message: FromAgent) -> None:
        if agent is None or self._agents.get(host) is not agent:
            return  # an agent that was given up, or asked to go
        if isinstance(message, msg.Refused):
            self._on_refused(host, message.led)
            return
        if self._adoption is not None:
            self._heard_of_the_past(agent, host, message, self._adoption)
            return
        if not isinstance(message, AgentDown) and message.seq:
            agent.acted_upon = message.seq
        match message:
            case msg.AgentHello():
                self._on_hello(agent, host, message)
            case AgentDown():
                was_up = self._agents.pop(host).up
                if was_up:
                    self._agent_lost(host, message.cause, None)
                else:
                    self._tell(ev.AgentFailed(host, **asdict(message)))
            case msg.TakenOver(led=led):
                self._on_taken_over(host, led)
            case msg.EntryAdded(entry=entry):
                self._pass_on(entry, but=host)
            case msg.Notice():
                if host in self._hosts:
                    self._drain(host, message.cause, message.leave_in_s)
            case msg.AgentWarning(message=text):
                self._warn(f"host {host}: {text}")
            case msg.PastReading(message=reading):
                self._record_reading(reading)
            case msg.AgentBeat(workers=workers):
                for worker, activity in workers.items():
                    if worker in self._workers:
                        self._watch.note(worker, activity)
            case msg.Log() | msg.WorkerEnded() | msg.WorkerNotStarted() | msg.WorkerSaid():
                if message.worker in self._workers:
                    self._heard_of_worker(message.worker, message)

    def _on_hello(self, agent: AgentConnection, host: str, hello: msg.AgentHello) -> None:
        fields = {
            "host": host,
            "seconds": round(time.monotonic() - self._started.pop(host, time.monotonic()), 3),
            "python": hello.python,
            "hostname": hello.hostname,
            "interface": hello.interface,
            "cpus": hello.cpus,
            "machine": hello.machine,
        }
        self._emit("agent_started", fields)
        if hello.swept:
            self._warn(f"host {host}: ended {count(hello.swept, 'stray process')} of this run")
        for found in hello.held.workers if hello.held is not None else ():
            if found.worker not in self._workers:  # it answered too late
                agent.send(msg.Kill(found.worker))
        self._collector.offered(host, agent, hello.spooled)
        self._tell(ev.AgentReady(host))

    def _heard_of_worker(
        self,
        worker: str,
        message: msg.Log | msg.WorkerEnded | msg.WorkerNotStarted | msg.WorkerSaid,
    ) -> None:
        match message:
            case msg.Log(data=data):
                self._on_log(worker, data)
            case msg.WorkerEnded():
                self._on_worker_ended(worker, message)
            case msg.WorkerNotStarted(error=error):
                host, _ = self._workers.pop(worker)
                command = " ".join(self._spec.command)
                text = f"the command {command!r} cannot be started on host {host}: {error}"
                self._tell(ev.ScriptFailed(worker, text))
            case msg.WorkerSaid(message=said):
                self._on_report(worker, said)

    def _on_log(self, worker: str, text: str) -> None:
        host, slot = self._workers[worker]
        self._write_log(worker, text)
        *lines, self._partial[worker] = (self._partial.get(worker, "") + text).split("\n")
        if self._members and self._members[0].worker == worker:
            for line in lines:
                self._show_output(host, slot, line)
                with contextlib.suppress(RecordNotWrittenError):  # the event log says so
                    shown = {"host": host, "local_rank": slot, "line": line}
                    self._output.append("output", shown)

    def _write_log(self, worker: str, text: str) -> None:
        file = self._logs.get(worker)
        try:
            if file is None:
                path = self._folder.log_path(*self._workers[worker])
                # Unbuffered: what a full disk did not take must not come back at close().
                file = self._logs[worker] = path.open("ab", buffering=0)
            file.write(text.encode("utf-8", "replace"))
        except OSError:
            pass  # a full disk; the event log says so

    def _on_worker_ended(self, worker: str, message: msg.WorkerEnded) -> None:
        self._partial.pop(worker, None)
        file = self._logs.pop(worker, None)
        if file is not None:
            file.close()
        host, slot = self._workers.pop(worker)
        self._watch.forget(worker)
        # Without a traceback from the library (an error before init(), sys.exit()), the end of
        # the log has to tell; once, not for every worker that fails alike.
        exited = ev.WorkerExited(worker, message.code, message.signal)
        status, how = how_it_ended(exited)
        if status and not self._failure_shown:
            self._failure_shown = True
            lines = self._log_end(host, slot).rstrip().splitlines()[-_LOG_TAIL_LINES:]
            tail = "\n".join(lines) or f"exit status {status}, nothing printed"
            explained = explain_script_error(tail)
            if explained is not None:
                self._tell(ev.ScriptFailed(worker, explained))
            else:
                fields = {"host": host, "local_rank": slot, "traceback": tail}
                self._emit("script_failed", fields)
        elif message.signal in _CRASHES and (stack := crash_stack(self._log_end(host, slot))):
            if stack != self._crash_shown:  # the next worker of the slot may die in the same place
                self._crash_shown = stack
                stack += f"\n(log: {self._folder.log_path(host, slot)})"
                fields = {"host": host, "local_rank": slot, "cause": how, "traceback": stack}
                self._emit("worker_crashed", fields)
        self._tell(exited)

    def _log_end(self, host: str, slot: int) -> str:
        try:
            with self._folder.log_path(host, slot).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    # -- what workers say ------------------------------------------------------------------

    def _on_report(self, worker: str, said: msg.WorkerReport) -> None:
        match said:
            case msg.Ready(warm_s=warm_s):
                self._tell(ev.WorkerReady(worker, round(warm_s, 3)))
            case msg.Joined(generation=generation):
                self._tell(ev.WorkerJoined(worker, generation))
            case msg.Broken(generation=generation, step=step, error=error, state=state):
                self._note_progress_if_further(said.progress)
                self._tell(ev.WorkerBroken(worker, generation, step, error, state))
            case msg.Held(generation=generation, step=step, state=state):
                self._tell(ev.WorkerHeld(worker, generation, step, state))
            case msg.Finished(progress=progress):
                self._note_progress(progress)
                self._watch.finished(worker)
                self._tell(ev.WorkerFinished(worker))
            case msg.ScriptRaised(traceback=traceback, progress=progress):
                # The worker leaves it to the leader, so that the terminal shows it once.
                self._write_log(worker, traceback)
                self._failure_shown = True
                self._note_progress_if_further(progress)
                self._tell(ev.ScriptFailed(worker, explain_script_error(traceback) or traceback))
            case msg.Metrics(progress=progress):
                self._note_progress(progress)
                self._emit("metrics", said.event_fields())
            case msg.BatchPlan():
                self._emit("batch_plan", said.event_fields())
            case msg.Shares():
                self._emit("shares", said.event_fields())
            case msg.RescaleFinished():
                self._emit("rescale_finished", said.event_fields())
            case msg.WorkerWarning(message=text):
                self._warn(f"worker {worker_name(*self._workers[worker])}: {text}")
            case msg.Restored():
                path = self._collector.restored_from
                self._emit("restored", {**said.event_fields(), "path": path})
            case msg.Dataset() | msg.Used():
                self._record_reading(said)
            case msg.CheckpointWritten():
                self._on_checkpoint_written(worker, said)
            case msg.CheckpointFailed(message=text):
                self._collector.failed(self._workers[worker][0], text)

    def _record_reading(self, reading: msg.Reading) -> None:
        match reading:
            case msg.Dataset():
                self._append_audit("dataset", reading.event_fields())
            case msg.Used(step=step):
                if self._append_audit("used", reading.event_fields()):
                    self._recorded_step = step

    def _append_audit(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Record what was read; return whether it is on record."""
        if self._audit is None:
            return False
        try:
            self._audit.append(kind, fields)
        except RecordNotWrittenError as error:
            self._warn(str(error))
            return False
        return True

    def _on_checkpoint_written(self, worker: str, said: msg.CheckpointWritten) -> None:
        host, _ = self._workers[worker]
        if self._last is not None:
            self._last.written(said.step)
        self._written = {"step": said.step, "epoch": said.epoch, "examples": said.examples}
        if said.step > self._progress["step"]:
            self._progress = self._written  # metrics come less often than steps
        self._collector.written(host, self._agents[host], said)

    def _note_progress_if_further(self, progress: Position | None) -> None:
        """Metrics come less often than steps."""
        if progress is not None and progress.step > self._progress["step"]:
            self._note_progress(progress)

    def _note_progress(self, progress: Position) -> None:
        self._progress = {
            "step": progress.step,
            "epoch": progress.epoch,
            "examples": progress.examples,
        }

    # -- checkpoints -----------------------------------------------------------------------

    def _checkpoints_idle(self) -> None:
        if self._adoption is None:
            self._tell(ev.StateSaved(self._collector.newest_step))
        if self._finish is not None:
            self._loop.stop()
        if self._last is not None and self._last.is_kept(self._collector.newest_step):
            if self._collector.newest_step == self._written["step"]:
                self._progress = self._written  # what was trained since then is given up
            self._stop_now()

    # -- what the machine wants ------------------------------------------------------------

    def _do(self, command: cmd.Command) -> None:
        match command:
            case cmd.Emit(kind=kind, fields=fields):
                self._emit(kind, fields)
            case cmd.StartAgent(host=host):
                self._start_agent(host, take_over=False)
            case cmd.StopAgent(host=host):
                self._stop_agent(host)
            case cmd.StartWorker(worker=worker, host=host, slot=slot):
                self._workers[worker] = (host, slot)
                slots = self._hosts[host].slots if host in self._hosts else 1
                self._agents[host].send(msg.StartWorker(worker, slot, slots))
            case cmd.KillWorker(worker=worker, reason=reason):
                agent = self._agent_of(worker)
                if agent is not None:
                    agent.send(msg.Kill(worker, reason))
            case cmd.Leave(worker=worker):
                self._say(worker, msg.Leave())
            case cmd.Hold(worker=worker):
                self._say(worker, msg.Hold())
            case cmd.SaveState(worker=worker):
                self._save_state(worker)
            case cmd.Abort(generation=generation):
                for agent in self._agents.values():
                    agent.send(msg.CallOff(generation))
            case cmd.Announce():
                self._form(command)
            case cmd.Finish():
                self._finish = command
                self._finish_deadline = time.monotonic() + _FETCH_PATIENCE_S
                if not self._collector.busy or command.status == "failed":
                    self._loop.stop()  # else the last checkpoint is still on its way

    def _start_agent(self, name: str, *, take_over: bool) -> None:
        host = self._hosts.get(name) or Host(name, slots=1)
        config = self._spec.ssh_config
        options = SshOptions(config_path=None if config is None else Path(config))
        holder: list[AgentConnection] = []
        spec = self._spec
        hello = msg.LeaderHello(
            run_id=self._folder.run_id,
            host=host.name,
            leader=self._id,
            led_by=f"process {os.getpid()} on {socket.gethostname()}",
            led_since=self._led_since,
            take_over=take_over,
            failure_timeout_s=spec.failure_timeout_s,
            leader_grace_s=spec.leader_grace_s,
            env=self._environment,
            cwd=spec.cwd,
            command=spec.command,
            run={**spec.as_dict(), "run_id": self._folder.run_id},
            interface=spec.interface,
            local_address=self._own_address(host, options),
            heartbeat_s=spec.heartbeat_s,
            preemption_command=spec.preemption_command,
            options=msg.WorkerOptions(spec.heartbeat_s, spec.audit, spec.checkpoint_every_s),
        )
        self._started[host.name] = time.monotonic()
        self._taken.discard(host.name)
        agent = AgentConnection(
            host, options, self._spec.python, hello, functools.partial(self._post, holder)
        )
        holder.append(agent)
        self._agents[host.name] = agent

    def _own_address(self, host: Host, options: SshOptions) -> str:
        """By which address the other hosts reach ``host``, when it is this machine."""
        if is_local(host, options):
            for other in self._hosts.values():
                if not is_local(other, options):
                    return own_address_towards(other, options)
        return "127.0.0.1"

    def _stop_agent(self, host: str) -> None:
        agent = self._agents.pop(host, None)
        if agent is not None:
            self._collector.leaving(agent)
            agent.shutdown(_GRACE_S)
            self._ending.append(agent)
            self._forget_workers(host)

    def _save_state(self, worker: str) -> None:
        if self._spec.checkpoint_every_s:
            self._say(worker, msg.SaveState())
        else:
            host, _ = self._workers[worker]
            self._warn(
                f"host {host} will go with the only copy of the state, and this run writes no "
                "checkpoints (--checkpoint-every 0): add another host to the hostfile in time"
            )

    def _form(self, command: cmd.Announce) -> None:
        """Announce a generation; where nobody holds the state, after a checkpoint was brought."""
        self._members = command.members
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
            if self._finish is None:  # called off, which those of its members that wait must hear
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
        # By the leader, and now: what any worker does from here on comes after it.
        restored = {"step": 0, "epoch": 0, "examples": 0}
        if newest is None:
            self._warn("there is no complete checkpoint: training begins anew")
        else:
            restored |= {"step": newest.step, "epoch": newest.epoch, "examples": newest.examples}
        if self._append_audit("restored", restored):
            self._recorded_step = restored["step"]
        by_host = {member.host: member.worker for member in reversed(command.members)}
        path = None if newest is None else str(newest.path)
        rooted = replace(command, root=by_host.get(brought.host))
        self._announce(rooted, brought.manifest or None, path)

    def _announce(
        self, order: cmd.Announce, restore: str | None = None, checkpoint: str | None = None
    ) -> None:
        """Tell the members; see :class:`hvd_elastic.wire.messages.Announcement`."""
        if order.generation != self._machine.generation:
            return  # called off while its checkpoint was on the way
        announcement = msg.Announcement(order, self._id, restore, checkpoint)
        for host in dict.fromkeys(member.host for member in order.members):
            if host in self._agents:
                self._agents[host].send(msg.AnnounceGeneration(announcement))

    # -- sending ---------------------------------------------------------------------------

    def _agent_of(self, worker: str) -> AgentConnection | None:
        host, _ = self._workers.get(worker, ("", 0))
        return self._agents.get(host)

    def _say(self, worker: str, message: msg.Hold | msg.Leave | msg.SaveState) -> None:
        agent = self._agent_of(worker)
        if agent is not None:
            agent.send(msg.Tell(worker, message))

    def _pass_on(self, entry: msg.StoreEntry, *, but: str) -> None:
        """Send it to every host with a member of its generation, except the one it came from."""
        if entry.generation != self._machine.generation:
            return
        for host in {member.host for member in self._members} - {but}:
            if host in self._agents:
                self._agents[host].send(msg.PutEntry(entry))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for who writes it
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_mtime_ns, found.st_size, found.st_ino
