"""Gives the machine the events of a run, and executes the commands that it returns."""

from __future__ import annotations

import functools
import time

from msgspec.structs import replace

from hvd_elastic.agent.spool import SENT_CHECKPOINT
from hvd_elastic.checkpoint.sender import Brought
from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.state_machine import MachineConfig, Phase, RunMachine
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.fetching import Fetching
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.wire import messages as msg


class Executor:
    """Executes what the machine decides.

    Attributes:
        finish: how the run ends; None: it has not ended.
    """

    def __init__(self, run: LedRun, fetching: Fetching, *, has_checkpoint: bool) -> None:
        self._run = run
        self._fetching = fetching
        self.machine = self._new_machine(has_checkpoint=has_checkpoint)
        self.finish: cmd.Finish | None = None

    def _new_machine(self, *, has_checkpoint: bool) -> RunMachine:
        spec, hostfile = self._run.spec, self._run.hostfile
        np = spec.np
        if np is None and spec.policy != "fixed":
            # A policy starts small: its first measurements show what more slots would gain.
            if not hostfile.hosts:
                hostfile.read()
            hosts = hostfile.hosts.values()
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

    def begin_anew(self) -> None:
        """Forget what was known of the workers; they are to be taken over."""
        self._run.workers.places.clear()
        self.machine = self._new_machine(has_checkpoint=True)

    def take_over(self, event: ev.RunTakenOver, workers: dict[str, tuple[str, int]]) -> None:
        """Continue with what was found of the run; ``workers``: their hosts and slots."""
        self._run.workers.places = workers
        self.tell(event)

    def tell(self, event: ev.Event) -> None:
        """Give the machine an event and execute the commands that it returns."""
        if self.finish is None:
            for command in self.machine.handle(event, time.monotonic()):
                self.execute(command)

    def agent_lost(self, host: str, cause: str, silent_s: float | None) -> None:
        """Note that a host has been lost with its workers.

        Args:
            silent_s: how long it was silent before [s]; None: its connection has ended.
        """
        self._run.workers.forget_host(host)
        self.tell(ev.AgentLost(host, cause, silent_s))

    def execute(self, command: cmd.Command) -> None:
        match command:
            case cmd.Emit(event=event):
                self._run.journal.emit(event)
            case cmd.StartAgent(host=host):
                self.start_agent(host, take_over=False)
            case cmd.StopAgent(host=host):
                self._stop_agent(host)
            case cmd.StartWorker(worker=worker, host=host, slot=slot):
                self._start_worker(worker, host, slot)
            case cmd.KillWorker(worker=worker, reason=reason):
                self._send_to_host_of(worker, msg.Kill(worker, reason))
            case cmd.Leave(worker=worker):
                self.say(worker, msg.Leave())
            case cmd.Hold(worker=worker):
                self.say(worker, msg.Hold())
            case cmd.SaveState(worker=worker):
                self._save_state(worker)
            case cmd.Abort(generation=generation):
                self._run.agents.send_all(self._run.agents.by_host, msg.CallOff(generation))
            case cmd.Announce():
                self._form(command)
            case cmd.Finish():
                self.finish = command
                self._fetching.training_ended(command)

    # -- agents and workers ----------------------------------------------------------------

    def start_agent(self, host: str, *, take_over: bool) -> None:
        """Start the agent of a host; ``take_over``: keep workers of an earlier leader."""
        self._run.agents.start(
            host, self._run.hostfile.hosts, self._run.fence.identity, take_over=take_over
        )

    def _stop_agent(self, host: str) -> None:
        agent = self._run.agents.by_host.get(host)
        if agent is not None:
            self._fetching.checkpoints.leaving(agent)
            self._run.agents.leave(host)
            self._run.agents.release(self._fetching.saved.holds)
            self._run.workers.forget_host(host)

    def _start_worker(self, worker: str, host: str, slot: int) -> None:
        self._run.workers.places[worker] = (host, slot)
        known = self._run.hostfile.hosts.get(host, Host(host))
        # Other jobs may use the rest of the slots that the host may ever hold.
        slots = max(known.slots, known.max_slots or 0)
        order = msg.StartWorker(worker, slot, slots, devices=list(known.devices))
        self._run.agents.send(host, order)
        if self._run.readers.use is not None:
            self.say(worker, self._run.readers.use)

    def _save_state(self, worker: str) -> None:
        if self._run.spec.checkpoint_every_s:
            self.say(worker, msg.SaveState())
        else:
            host, _ = self._run.workers.places[worker]
            self._run.journal.warn(
                f"host {host} will go with the only copy of the state, and this run writes no "
                "checkpoints (--checkpoint-every 0): add another host to the hostfile in time"
            )

    def say(
        self, worker: str, message: msg.Hold | msg.Leave | msg.SaveState | msg.UseInput
    ) -> None:
        """Send a message to a worker, through the agent of its host."""
        self._send_to_host_of(worker, msg.Tell(worker, message))

    def say_to_all(self, use: msg.UseInput) -> None:
        """Tell all workers which processes of input hosts read for them now."""
        for worker in self._run.workers.places:
            self.say(worker, use)

    def _send_to_host_of(self, worker: str, message: msg.Kill | msg.Tell) -> None:
        host, _ = self._run.workers.places.get(worker, ("", 0))
        self._run.agents.send(host, message)

    # -- generations -----------------------------------------------------------------------

    def pass_on(self, entry: msg.StoreEntry, origin: str) -> None:
        """Send a rendezvous entry to all hosts of its generation except ``origin``."""
        if entry.generation == self.machine.generation:
            self._run.agents.pass_on(entry, origin, self.machine.members)

    def _form(self, command: cmd.Announce) -> None:
        """Announce a generation; if no worker holds the state, send a checkpoint to it first."""
        if command.root is None and command.restore:
            hosts = list(dict.fromkeys(member.host for member in command.members))
            folder = f"{SENT_CHECKPOINT}{command.generation}"
            wanted = functools.partial(self._is_forming, command.generation)
            done = functools.partial(self._restore, command)
            self._fetching.sender.bring(hosts, folder, wanted, done)
        else:
            self._announce(command)

    def _is_forming(self, generation: int) -> bool:
        machine = self.machine
        return machine.generation == generation and machine.phase is Phase.FORMING

    def _restore(self, command: cmd.Announce, brought: Brought) -> None:
        if not self._is_forming(command.generation):
            if self.finish is None:  # aborted; members that wait must still hear of it
                self._announce(command)
            return
        if brought.error:
            go_on = (
                "Nothing was removed or started again: fix that and resume with: "
                f"{self._run.folder.resume_command}, or start a new run"
            )
            self.tell(ev.StopRequested(f"{brought.error}. {go_on}", "failed"))
            return
        newest = brought.checkpoint
        # Recorded by the leader before the announcement, so it precedes all that workers record.
        restored = {"step": 0, "epoch": 0, "examples": 0}
        if newest is None:
            self._run.journal.warn("there is no complete checkpoint: training starts from scratch")
        else:
            restored = {"step": newest.step, "epoch": newest.epoch, "examples": newest.examples}
        self._run.journal.read("restored", {**restored, "generation": command.generation})
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
        if order.generation != self.machine.generation:
            return  # a newer generation was announced while the checkpoint was transferred
        announcement = msg.Announcement(order, self._run.fence.identity.leader, restore, checkpoint)
        hosts = dict.fromkeys(member.host for member in order.members)
        self._run.agents.send_all(hosts, msg.AnnounceGeneration.of(announcement))
