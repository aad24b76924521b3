"""Handles what agents and workers report."""

from __future__ import annotations

import time

from hvd_elastic.control import events as ev
from hvd_elastic.control.endings import explain_script_error
from hvd_elastic.control.progress import Position
from hvd_elastic.formatting import count
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.fetching import Fetching
from hvd_elastic.leader.led_run import LedRun
from hvd_elastic.leader.liveness import LivenessWatch
from hvd_elastic.leader.steering import Stopping, host_draining
from hvd_elastic.run_events import (
    AgentStarted,
    BatchPlan,
    ExampleSkipped,
    HostFaults,
    Metrics,
    RescaleFinished,
    Restored,
    RunEvent,
    Shares,
    TrainingGoesOn,
    TrainingStopped,
    Warned,
)
from hvd_elastic.wire import messages as msg

_OTHER_CODE = (
    "worker {name} runs another {files} than the workers before it: it was changed after they "
    "started, or hosts have different copies. Ranks with different code may train wrongly, or end "
    "the run. Bring the same file to all hosts (copyclust HOSTFILE PATH PATH), or have all run "
    "the new one: hvd-elastic stop, then hvd-elastic run --resume"
)

_NOT_STARTED = 127
"""Exit status of a worker that could not be started, as shells have it."""
_SIGNALLED_S = 0.5
"""Age of a host's notice at which it is acted upon [s]: where one signal reaches host, leader and
all that belongs to a job, they have heard of it by then, in any order. Zero where the leader does
not stop at that signal."""


class Reports:
    """Passes on what agents and workers report to whom it concerns.

    Args:
        liveness: is told whose training has ended.
    """

    def __init__(
        self,
        run: LedRun,
        executor: Executor,
        fetching: Fetching,
        liveness: LivenessWatch,
        stopping: Stopping,
    ) -> None:
        self._run = run
        self._executor = executor
        self._fetching = fetching
        self._liveness = liveness
        self._stopping = stopping
        self._notices: list[tuple[float, str, msg.Notice]] = []

    def drain_noticed_hosts(self, now: float) -> None:
        """Drain the hosts that have given notice, unless the run stops; called often."""
        age_s = _SIGNALLED_S if self._stopping.hears_sigterm else 0.0
        due = [each for each in self._notices if now >= each[0] + age_s]
        del self._notices[: len(due)]
        if self._stopping.cause is not None:
            return  # with a checkpoint of all that train, which must not leave before
        for since, host, notice in due:
            if host in self._run.hostfile.hosts:
                reserve_s = self._fetching.reserve_s + now - since
                event = host_draining(host, notice.cause, notice.leave_in_s, reserve_s)
                self._executor.tell(event)

    def take_message(self, agent: AgentConnection, message: FromAgent) -> None:
        """Handle a message of an agent of this leader."""
        host = agent.host.name
        if not isinstance(message, ev.AgentFailed) and message.seq:
            agent.acted_upon = message.seq
        match message:
            case msg.AgentHello():
                self._on_hello(agent, message)
            case ev.AgentFailed():
                del self._run.agents.by_host[host]
                if agent.up:
                    self._executor.agent_lost(host, message.cause, None)
                else:
                    self._executor.tell(message)
            case msg.EntryAdded(entry=entry):
                self._executor.pass_on(entry, host)
            case msg.Notice():
                self._notices.append((time.monotonic(), host, message))
            case msg.AgentWarning(message=text, at_risk=at_risk):
                risk = host if at_risk else ""
                self._run.journal.emit(Warned(f"host {host}: {text}", host_at_risk=risk))
            case msg.HostSampled(sample=sample):
                self._run.journal.emit(sample)
            case msg.HardwareJudged(faults=faults):
                self._run.journal.emit(HostFaults(host=host, faults=faults))
            case msg.PastReading(message=reading):
                self._run.journal.read(*reading.as_record(), late=True)
            case msg.Log() | msg.WorkerEnded() | msg.WorkerNotStarted() | msg.WorkerSaid():
                if message.worker in self._run.workers.places:
                    self._on_worker(message)

    def _on_hello(self, agent: AgentConnection, hello: msg.AgentHello) -> None:
        host = agent.host.name
        self._run.journal.emit(
            AgentStarted(
                host=host,
                seconds=round(time.monotonic() - agent.started_at, 3),
                python=hello.python,
                hostname=hello.hostname,
                interface=hello.interface,
                cpus=hello.cpus,
                machine=hello.machine,
            )
        )
        self._run.readers.watch.machines[host] = (hello.machine or host, hello.cpus)
        if hello.swept:
            strays = count(hello.swept, "stray process")
            self._run.journal.warn(f"host {host}: ended {strays} of this run")
        for found in hello.held.workers if hello.held is not None else ():
            # Of an agent that answered after the takeover.
            if found.worker not in self._run.workers.places:
                agent.send(msg.Kill(found.worker))
        self._fetching.offered(agent, hello)
        self._executor.tell(ev.AgentReady(host))

    def _on_worker(
        self, message: msg.Log | msg.WorkerEnded | msg.WorkerNotStarted | msg.WorkerSaid
    ) -> None:
        worker = message.worker
        match message:
            case msg.Log(data=data):
                host, slot = self._run.workers.places[worker]
                lines = self._run.workers.log(worker, data)
                members = self._executor.machine.members
                # A plain command has one worker, which is never a member.
                if self._run.spec.plain or (members and members[0].worker == worker):
                    for line in lines:
                        self._run.journal.output(host, slot, line)
            case msg.WorkerEnded():
                exited = message.event()
                match self._run.workers.ended(exited):
                    case ev.ScriptFailed() as failed:
                        self._executor.tell(failed)
                    case RunEvent() as event:
                        self._run.journal.emit(event)
                self._executor.tell(exited)
            case msg.WorkerNotStarted(error=error):
                host, _ = self._run.workers.places.pop(worker)
                command = " ".join(self._run.spec.command)
                text = f"the command {command!r} cannot be started on host {host}: {error}"
                self._executor.tell(ev.ScriptFailed(worker, text))
                # A newcomer's failure ends no run, and its slot is tried again.
                self._executor.tell(ev.WorkerExited(worker, code=_NOT_STARTED))
            case msg.WorkerSaid(message=said):
                self.take_of_worker(worker, said)

    def take_of_worker(self, worker: str, said: msg.Report) -> None:
        """Handle a message of a worker."""
        tell, progress = self._executor.tell, self._run.progress
        match said:
            case msg.Ready(warm_s=warm_s, code=code):
                if other := self._run.workers.other_code(code):
                    name, files = self._run.workers.name(worker), ", ".join(other)
                    self._run.journal.warn(_OTHER_CODE.format(name=name, files=files))
                tell(ev.WorkerReady(worker, round(warm_s, 3)))
            case msg.Joined(generation=generation, stopped=stopped):
                if progress.stopped and not stopped:
                    # The rank that reported it was lost before another one had agreed.
                    progress.stopped = ""
                    self._run.journal.emit(TrainingGoesOn(said.step))
                tell(ev.WorkerJoined(worker, generation))
            case msg.Broken(generation=generation, step=step, error=error, state=state):
                progress.ended_at(said.progress)
                tell(ev.WorkerBroken(worker, generation, step, error, state))
            case msg.Held(generation=generation, step=step, state=state):
                tell(ev.WorkerHeld(worker, generation, step, state))
            case msg.Finished(progress=reached):
                progress.reached, progress.is_exact = reached, True
                self._liveness.finished(worker)
                tell(ev.WorkerFinished(worker))
            case msg.ScriptRaised(traceback=traceback, progress=reached):
                # Workers do not print it themselves, so that the terminal shows it once.
                self._run.workers.write(worker, traceback)
                self._run.workers.failure_told = True
                progress.ended_at(reached)
                tell(ev.ScriptFailed(worker, explain_script_error(traceback) or traceback))
            case Metrics(step=step, epoch=epoch, position=place, examples=examples):
                progress.passed(Position(step, epoch, place, examples))
                self._run.journal.emit(said)
            case TrainingStopped(reason=reason):
                progress.stopped = reason
                self._run.journal.emit(said)
            case BatchPlan() | Shares() | RescaleFinished() | ExampleSkipped():
                self._run.journal.emit(said)
            case Warned(message=text):
                self._run.journal.warn(f"worker {self._run.workers.name(worker)}: {text}")
            case msg.Dataset() | msg.Used():
                self._run.journal.read(*said.as_record())
            case Restored():
                progress.stopped = ""
                said.path = self._fetching.sender.restored_from
                self._run.journal.emit(said)
            case (
                msg.CheckpointWritten()
                | msg.CheckpointFailed()
                | msg.FileSaved()
                | msg.SavedWanted()
            ):
                self._on_file(worker, said)

    def _on_file(
        self,
        worker: str,
        said: msg.CheckpointWritten | msg.CheckpointFailed | msg.FileSaved | msg.SavedWanted,
    ) -> None:
        host, _ = self._run.workers.places[worker]
        checkpoints = self._fetching.checkpoints
        match said:
            case msg.CheckpointWritten(step=step):
                self._stopping.shard_written(step)
                progress = self._run.progress
                progress.written = Position(step, said.epoch, 0, said.examples)
                if not self._executor.machine.training[0]:
                    progress.ended_at(progress.written)  # of a worker that waits
                elif step > progress.reached.step:
                    progress.passed(progress.written)
                checkpoints.written(host, self._run.agents.by_host[host], said)
            case msg.CheckpointFailed(message=text):
                self._stopping.shard_failed()
                checkpoints.failed(host, text)
            case msg.FileSaved(file=saved, seconds=seconds):
                self._fetching.saved.saved(host, self._run.agents.by_host[host], saved, seconds)
            case msg.SavedWanted(name=name):
                self._fetching.saved.bring(name, worker, self._run.agents.by_host[host])
