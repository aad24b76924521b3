"""Leads a run from its start to its end: makes the parts of a leader, and runs their loop.

:class:`hvd_elastic.control.state_machine.RunMachine` decides, and the other modules of this package
act. Everything runs in one loop; the threads of the agents' connections and of file transfers only
post calls to it.

The way of an event: the thread of a connection decodes what its agent sends, and posts it. In the
loop :meth:`Leader._heard` gives it to ``Failover`` while a takeover is under way, else to
``Reports``. They pass on what concerns files, logs and input hosts, and tell the ``Executor`` the
rest as an event of the machine. The executor executes the commands that the machine returns: it
records events in the journal, and sends messages to the agents. What no agent sends (a saved
hostfile, requests, decisions of the policy, silence) is found by :meth:`Leader._tick`, and goes the
same way from the executor on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvd_elastic.checkpoint.place import CheckpointStore
from hvd_elastic.control import commands as cmd
from hvd_elastic.control import events as ev
from hvd_elastic.control.state_machine import Phase
from hvd_elastic.errors import CheckpointError
from hvd_elastic.formatting import hosts_named
from hvd_elastic.leader.agents.agents import LOOK_S, Agents
from hvd_elastic.leader.agents.connection import AgentConnection, FromAgent
from hvd_elastic.leader.executor import Executor
from hvd_elastic.leader.failover.failover import TAKEOVER_S, Failover, Takeover
from hvd_elastic.leader.failover.fencing import Fence
from hvd_elastic.leader.fetching import Fetching
from hvd_elastic.leader.hostfile_watch import HostfileWatch
from hvd_elastic.leader.input_hosts import InputHosts
from hvd_elastic.leader.led_run import Journal, LedRun, Loop, Show, ShowOutput
from hvd_elastic.leader.liveness import LivenessWatch
from hvd_elastic.leader.reports import Reports
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.leader.steering import Steering, Stopping
from hvd_elastic.leader.workers import Workers
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.secret_digests import digests_of
from hvd_elastic.records.summary import summarize
from hvd_elastic.records.tensorboard import TensorBoardWriter
from hvd_elastic.run_events import (
    Event,
    HostReturned,
    LeaderCutOff,
    RunFinished,
    RunStarted,
    Warned,
)
from hvd_elastic.wire import messages as msg

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from io import FileIO

    from hvd_elastic.hosts.connection import Engine


def lead(
    spec: RunSpec,
    folder: RunFolder,
    environment: Mapping[str, str],
    show: Show,
    show_output: ShowOutput,
    *,
    resumed: bool = False,
    lock: FileIO | None = None,
    engine: AbstractContextManager[Engine] | None = None,
) -> tuple[cmd.Finish, bool]:
    """Lead a run to its end, as the only leader on this machine.

    Args:
        spec, folder, environment, show, show_output, resumed: see :class:`Leader`.
        lock: of the run, which this process holds already; None: it is taken.
        engine: entered when this process has the lock of the run, since an engine writes the hosts
            of a run, which are those of the other leader if there is one; see :class:`Leader`.

    Returns:
        How the run ended, and whether this leader gave way to another one without having started
        anything.

    Raises:
        RunError: another process leads the run, or the folder cannot be written.
        HostfileError, CheckpointError: see :meth:`Leader.run`.
    """

    def warn(message: str) -> None:
        show(Warned(message, t=time.time()))

    with (
        lock or folder.take_lead(),
        engine or contextlib.nullcontext() as hosts,
        TensorBoardWriter(folder.tensorboard, warn) as board,
    ):

        def show_and_draw(event: Event) -> None:
            show(event)
            if spec.tensorboard:
                board.write_metrics(event)

        leader = Leader(
            spec, folder, environment, show_and_draw, show_output, resumed=resumed, engine=hosts
        )
        return leader.run(), leader.gave_way


class Leader:
    """Leads one run from its start, or from where its last leader left it, to its end.

    Args:
        folder: run folder, whose lock the caller holds.
        environment: variables for the workers, passed on through the agents' stdin.
        show_output: called with (host, local rank, line) for each line that rank 0 prints.
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
        self._resumed = resumed
        self._next_tick = time.monotonic()
        environment = spec.environment(environment, folder.run_id)
        self._secrets = digests_of(environment, os.urandom(16))
        store = CheckpointStore(
            folder.run_id,
            folder.checkpoints,
            spec.checkpoint_folder,
            keep=spec.keep_checkpoints,
            resumed=resumed,
        )
        fence = Fence(folder.run_id, store.place, spec.failure_timeout_s)
        loop = Loop(self._next_deadline, self._tick)
        journal = Journal(folder, show, show_output, audit=spec.audit)
        readers = InputHosts(
            spec,
            folder,
            environment,
            led=lambda: fence.identity,
            post=loop.post,
            emit=journal.emit,
            changed=lambda use: self._executor.say_to_all(use),  # noqa: PLW0108  (made below)
            engine=engine,
        )
        run = self._run = LedRun(
            spec=spec,
            folder=folder,
            fence=fence,
            loop=loop,
            journal=journal,
            hostfile=HostfileWatch.of_run(spec, journal.warn),
            agents=Agents(spec, environment, self._post, engine),
            workers=Workers(folder),
            readers=readers,
        )
        fetching = self._fetching = Fetching(
            run, store, on_checkpoint=self._checkpoints_idle, resumed=resumed
        )
        executor = self._executor = Executor(run, fetching, has_checkpoint=resumed)
        liveness = self._liveness = LivenessWatch(run, executor)
        failover = self._failover = Failover(run, executor, lead=self._lead_found)
        stopping = self._stopping = Stopping(run, executor, failover, fetching, liveness)
        self._steering = Steering(run, executor, stopping, fetching)
        self._reports = Reports(run, executor, fetching, liveness, stopping)

    # -- from start to end -----------------------------------------------------------------

    @property
    def gave_way(self) -> bool:
        """Return whether this leader ended in favour of another one and had started nothing."""
        return self._run.fence.gave_way and not self._run.fence.has_led

    def run(self) -> cmd.Finish:
        """Lead the run until it ends; return how it ended.

        Raises:
            HostfileError: the hostfile cannot be read at the start.
            CheckpointError: the checkpoint folder cannot be written and no worker is running.
        """
        run, spec = self._run, self._run.spec
        unwritable: CheckpointError | None = None
        try:
            self._fetching.checkpoints.check()
        except CheckpointError as error:
            if not self._resumed:
                raise
            unwritable = error  # running workers can train on without checkpoints
        run.hostfile.read()
        self._secrets.write(run.folder.secrets)
        past = summarize(run.folder.iter_events() if self._resumed else ())
        run.progress.stopped = past.stopped_for
        self._fetching.expect_checkpoint(past)
        self._steering.start_policy(run.folder.iter_events() if self._resumed else ())
        run.journal.emit(
            RunStarted(
                run_id=run.folder.run_id,
                hosts=run.hostfile.event().hosts,
                min_np=spec.min_np,
                max_np=spec.max_np,
                np=spec.np,
                pinned=list(spec.pin_hosts),
                command=list(spec.command),
                resumed=self._resumed,
                plain=spec.plain,
            )
        )
        with self._stopping.signals(), self._failover.lease():
            try:
                if self._resumed:
                    self._failover.ask_hosts(past, unwritable=unwritable)
                else:
                    run.fence.has_led = True
                    self._hosts_changed()
                run.loop.run()
            except BaseException as error:
                if self._executor.machine.members:
                    self._let_go(error)
                else:
                    self._end_agents(succeeded=False)
                raise
            finish = self._executor.finish
            assert finish is not None
            if not run.fence.gave_way:
                finish = self._fetching.with_missing(finish)
            self._end_agents(succeeded=finish.status == "succeeded")
        resumes, reached = self._fetching.checkpoints.resume_step, run.progress.reached
        run.journal.emit(
            RunFinished(
                status=finish.status,
                message=self._outcome(finish),
                run_id=run.folder.run_id,
                steps=reached.step,
                examples=reached.examples,
                epochs=reached.epoch,
                exact=run.progress.is_exact,
                checkpoint_step=resumes if resumes >= 0 else None,
                led_elsewhere=run.fence.led_elsewhere,
                resume=run.folder.resume_command,
            )
        )
        run.workers.close()
        run.journal.close()
        return finish

    def _outcome(self, finish: cmd.Finish) -> str:
        """Return why the run has ended, in words."""
        ended_itself = finish.status == "succeeded" and self._run.progress.stopped
        if ended_itself:
            return f"training was stopped by the script: {ended_itself}"
        error = self._run.workers.error if finish.status == "failed" else ""
        known = not error or error in finish.message
        return finish.message if known else f"{finish.message}: {error}"

    def _end_agents(self, *, succeeded: bool) -> None:
        """End all agents and their workers, and wait until they have ended."""
        if self._run.fence.gave_way:
            self._run.agents.drop()  # the workers belong to the other leader
            self._run.readers.drop()
            return
        self._fetching.empty_spools(succeeded=succeeded)
        for host in self._run.agents.end_agents():
            self._run.journal.warn(f"host {host}: the agent did not answer the end of the run")
        self._run.readers.end_agents()

    def _let_go(self, error: BaseException) -> None:
        """Leave the workers running after an internal error of this process."""
        self._run.agents.drop()
        self._run.readers.drop()
        with contextlib.suppress(Exception):  # the journal itself may be what failed
            self._run.journal.warn(
                f"the leader fails ({type(error).__name__}: {error}). The hosts continue without "
                f"it for {self._run.spec.leader_grace_s:g} s (--leader-grace), and then leave a "
                f"checkpoint: {self._run.folder.resume_command} leads on"
            )

    # -- the loop --------------------------------------------------------------------------

    def _next_deadline(self) -> float:
        machine = self._executor.machine
        due = machine.deadline() if self._failover.leads else self._failover.deadline
        return self._next_tick if due is None else min(due, self._next_tick)

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + LOOK_S
            if self._failover.leads:
                self._look_for_changes(now)
            else:
                # Other requests depend on the state of the run, which is not known yet.
                self._steering.look_for_requests(only="stop")
                if self._stopping.cause is not None:
                    self._failover.hasten()
                self._failover.retry_unreachable_hosts(now)
            self._run.agents.beat(now, self._run.journal.recorded_step)
            if self._failover.leads:
                self._stopping.ask_for_last_checkpoint(now)
            self._fetching.release_fetched_hosts()
        due = self._executor.machine.deadline()
        if self._failover.leads and due is not None and now >= due:
            self._executor.tell(ev.Tick())

    def _look_for_changes(self, now: float) -> None:
        """Look whether anything has changed, while this leader leads."""
        if self._run.hostfile.changed(now):
            self._hosts_changed()
        self._steering.look_for_requests()
        cut_off_s = self._liveness.give_up_silent(now)
        if cut_off_s is not None:
            self._lead_again(cut_off_s)
        self._reports.drain_noticed_hosts(now)
        self._steering.let_policy_decide(now)
        self._run.readers.tend_hosts(now)

    def _hosts_changed(self) -> None:
        self._run.journal.emit(self._run.hostfile.event())
        self._run.readers.update(self._run.hostfile.input_hosts, self._run.hostfile.hosts)
        self._executor.tell(ev.HostsChanged(self._run.hostfile.slots))

    def _checkpoints_idle(self) -> None:
        newest_step = self._fetching.checkpoints.newest_step
        if self._failover.leads:
            self._executor.tell(ev.StateSaved(newest_step))
        self._fetching.end_loop_if_complete()
        self._stopping.checkpoint_kept(newest_step)

    def _post(self, agent: AgentConnection, message: FromAgent) -> None:
        self._run.loop.post(lambda: self._heard(agent, message))

    def _heard(self, agent: AgentConnection, message: FromAgent) -> None:
        if self._run.agents.by_host.get(agent.host.name) is not agent:
            return  # from an agent that was dropped or asked to end
        match message:
            case msg.Refused(led=led):
                self._failover.refused(agent.host.name, led)
            case _ if not self._failover.leads:
                if isinstance(message, msg.AgentHello):
                    # The spool has to be known before any worker reports newer shards.
                    self._fetching.offered(agent, message)
                    message.spooled, message.saved = [], []
                self._failover.hear(agent, message)
            case msg.TakenOver(led=led):
                self._failover.taken_over(agent, led)
            case _:
                self._reports.take_message(agent, message)

    # -- taking over from an earlier leader --------------------------------------------------

    def _lead_again(self, silent_s: float) -> None:
        """Return to the run after this machine was cut off from all hosts.

        The workers have continued without a leader, so this is a takeover of its own run.
        """
        grace_s = self._run.spec.leader_grace_s
        tries_s = max(TAKEOVER_S, grace_s - silent_s)
        self._run.journal.emit(LeaderCutOff(round(silent_s, 3), grace_s, round(tries_s, 3)))
        self._run.agents.drop()
        self._run.readers.drop()
        self._liveness.begin_anew()
        self._run.fence.lead_anew()
        self._executor.begin_anew()
        past = summarize(self._run.folder.iter_events())
        self._failover.ask_hosts(past, tries_s, patient=True)

    def _lead_found(self, takeover: Takeover) -> None:
        """Lead what the hosts hold of the run, now that they have answered."""
        self._run.journal.emit(self._run.hostfile.event())
        for host in takeover.came_back:
            self._run.journal.emit(HostReturned(host))
        event, workers = takeover.event(self._run.hostfile.slots), takeover.workers
        if takeover.unwritable is not None:
            if not workers:
                raise takeover.unwritable
            self._run.journal.warn(f"training continues without checkpoints: {takeover.unwritable}")
        if event.awaited and not workers:
            names = hosts_named(event.awaited)
            self._run.journal.warn(
                f"{names} could not be asked whether another leader leads this run; if one does, "
                "the one that began later ends when they meet"
            )
        self._run.fence.has_led = True
        hosts = self._run.hostfile
        self._run.readers.update(hosts.input_hosts, hosts.hosts, takeover.input_hosts)
        self._run.progress.is_known = not workers
        for found in event.workers:
            if found.finished:
                self._liveness.finished(found.worker)
        self._executor.take_over(event, workers)
        for agent, message in takeover.postponed:
            self._heard(agent, message)
        machine = self._executor.machine
        if machine.phase is Phase.FORMING:
            # Rendezvous entries on their way to other hosts were lost with the earlier leader.
            cause = "the leader was lost while the world changed"
            self._executor.tell(ev.GenerationStuck(machine.generation, cause))
        self._stopping.begin_if_asked()
