"""The agent: one process per host and run, started by the leader over ssh.

It reads messages of :mod:`hvd_elastic.wire` on stdin and answers on stdout; it does not listen on
any network. It starts, signals and reaps the workers of its host, forwards their messages, and
serves the rendezvous of each generation on the loopback address. When the run is over it ends
everything it started, and itself.

The first SIGTERM or SIGHUP is a notice that the host will go away: the agent reports it, and the
leader lets the host's workers leave. If the leader is lost (killed, or its connection broken),
training continues for a grace time: state and data are in the workers, and only a change of the
world needs a leader. Another leader can take the agent over meanwhile; see
:mod:`hvd_elastic.agent.failover`. After the grace time, or at a notice before that, the workers
write a checkpoint and the agent ends.

The launcher runs it as ``python -m hvd_elastic.agent.agent``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hvd_elastic import __version__
from hvd_elastic.agent.failover import (
    Caller,
    call_predecessor,
    listen_for_successors,
    read_caller,
    write_last_checkpoint,
)
from hvd_elastic.agent.hardware import HardwareWatch
from hvd_elastic.agent.host_sampler import HostSampler
from hvd_elastic.agent.leader_link import LeaderLink, UnacknowledgedLog
from hvd_elastic.agent.preemption.clouds import CloudWatch
from hvd_elastic.agent.preemption.notice import CommandWatch, after_sigterm_s
from hvd_elastic.agent.rendezvous import GenerationStore
from hvd_elastic.agent.spool import Spool
from hvd_elastic.agent.worker_start import die_with_parent
from hvd_elastic.agent.workers import Workers
from hvd_elastic.control.progress import Activity
from hvd_elastic.errors import RunError, StrangerError
from hvd_elastic.hosts.interfaces import interface_of, interfaces, own_address
from hvd_elastic.programs.dial_back import PARENT_VARIABLE
from hvd_elastic.programs.hold_command import become_subreaper
from hvd_elastic.programs.processes import (
    Process,
    all_processes,
    descendants,
    end_processes,
    environment,
    own_ancestors,
)
from hvd_elastic.programs.usable import usable_cores
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import ProtocolError, compress, decompress

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit statuses of a process that SIGKILL has ended, and of a shell after one."""
_PROOF_S = 2.0
"""Least wait for a message of a leader that may live [s]; two of its heartbeats if longer."""


def _machine() -> str:
    """Return an id of all hosts (containers, namespaces) that share the cores of one machine.

    Returns:
        "" if it is unknown, or if a quota gives this host cores of its own.
    """
    if usable_cores() < len(os.sched_getaffinity(0)):
        return ""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class Agent:
    """The agent of one host and run; all of its work is done by one event loop in one thread.

    Args:
        output: pipe to the leader, whose messages arrive on standard input.

    Attributes:
        exit_status: status with which the process is to end.
    """

    _hello: msg.LeaderHello
    _spool: Spool
    _interface: str | None
    _sampler: HostSampler

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._link = LeaderLink()
        self._log = UnacknowledgedLog()
        self._workers: Workers | None = None
        """None until the leader's hello."""
        self._stores: dict[int, GenerationStore] = {}
        self._over = asyncio.Event()
        self._grace_s = 3.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._vigil: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._door: socket.socket | None = None
        self._callers: list[Caller] = []
        self._deciding = asyncio.Lock()
        """Held while it is decided about a caller, and until its leader can be heard."""
        self._recorded: int | None = None
        self._replaced = False
        self._preemption: CommandWatch | None = None
        self._notices: list[int] = []
        self.exit_status = 0

    # -- main loop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the leader sends ``shutdown``, or is lost for longer than the grace time."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGINT, self._over.set)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_notice, number)
        await self._link.open(sys.stdin, self._output)
        self._reading = self._start_task(self._read_commands())
        self._start_task(self._beat())
        await self._over.wait()
        for task in self._tasks:
            task.cancel()
        loop.remove_signal_handler(signal.SIGCHLD)
        if self._replaced:
            return
        for store in self._stores.values():
            store.close()
        if self._workers is not None:
            self._workers.send_all(msg.End())  # for workers that survive SIGTERM
        end_processes(descendants, self._grace_s)
        if self._workers is not None:
            if not self._link.is_open:
                self._spool.keep_untold(self._log.unacknowledged_readings())
            self._spool.remove()
            self._workers.close()

    async def _read_commands(self) -> None:
        try:
            async for message in self._link.messages():
                try:
                    await self._obey(message)
                except OSError as error:  # not of the link, which only sends here
                    self._fail(error)
                    return
        except OSError:
            pass  # the leader is gone
        except ProtocolError as error:
            text = f"the agent of hvd_elastic {__version__} (protocol {msg.PROTOCOL}) stopped"
            self._link.send(msg.AgentWarning(f"{text}: {error}"))
            self._over.set()
        self._lose_leader()

    async def _obey(self, message: msg.LeaderToAgent) -> None:
        workers = self._workers
        match message:
            case msg.LeaderHello():
                await self._on_hello(message)
            case msg.Shutdown(grace_s=grace_s):
                self._grace_s = grace_s
                self._over.set()
            case _ if workers is None:
                pass  # a message to all agents may arrive before the hello to a new one
            case msg.LeaderBeat():
                self._log.acknowledged(message.acted_upon)
                if message.recorded not in (None, self._recorded):
                    self._recorded = message.recorded
                    workers.send_all(msg.Recorded(message.recorded))
            case msg.StartWorker():
                self._log.started(message.worker, self._hello.host, message.local_rank)
                workers.start(message)
                self._reap()  # it may have ended before it was registered
            case msg.AnnounceGeneration():
                await self._announce(message.announcement, workers)
            case msg.PutEntry(entry=entry):
                if entry.generation in self._stores:
                    value = decompress(entry.value)
                    self._stores[entry.generation].put(entry.scope, entry.key, value)
            case msg.PutAddresses(generation=generation):
                if generation in self._stores:
                    self._stores[generation].put_addresses(message)
            case msg.CallOff(generation=generation):
                self._call_off(generation)
            case msg.Tell(worker=name, message=instruction):
                worker, leaves = workers.get(name), isinstance(instruction, msg.Leave)
                if leaves:
                    self._log.told_to_leave(name)
                if leaves and worker and not worker.is_ready:
                    workers.kill(name)  # it would leave only after its imports
                elif worker:
                    worker.send(instruction)
            case msg.Kill(worker=name, reason=reason):
                self._log.killed(name, reason)
                workers.kill(name)
            case msg.Release():
                self._spool.release(message)

    async def _announce(self, announcement: msg.Announcement, workers: Workers) -> None:
        generation = announcement.generation
        members = announcement.order.members
        here = [member for member in members if member.host == self._hello.host]
        self._sampler.hosts = len({member.host for member in members})
        self._log.announced(announcement.order, [member.worker for member in here])
        for old in [number for number in self._stores if number < generation - 1]:
            self._stores.pop(old).close()
        for left in self._spool.sent_checkpoints(before=generation):
            # In a thread, as it may take seconds to remove large files.
            self._start_task(asyncio.to_thread(shutil.rmtree, left, ignore_errors=True))

        def forward(scope: str, key: str, value: bytes) -> None:
            entry = msg.StoreEntry(generation, scope, key, compress(value))
            self._link.send(msg.EntryAdded(entry))

        store = GenerationStore(forward)
        await store.open()
        self._stores[generation] = store
        workers.join(announcement, here, store.port)

    def _call_off(self, generation: int) -> None:
        if generation in self._stores:
            self._stores[generation].call_off()
        if self._workers is not None:
            self._workers.send_all(msg.Abort(generation))

    def _tell(self, message: msg.AgentToLeader) -> None:
        """Send a message that must reach this leader or the next one."""
        self._link.send(self._log.number(message))
        if isinstance(message, msg.WorkerEnded) and not self._link.is_open:
            if not self._workers and not self._log.any_finished:
                self._over.set()  # a next leader would find nothing to continue

    def _has_room_for_output(self) -> bool:
        """Return whether the workers' output is read on; a leader that lives is waited for."""
        return self._log.has_room or not self._is_led

    async def _beat(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            workers = self._workers
            interval_s = 1.0 if workers is None else self._hello.heartbeat_s
            if now - before > 2 * interval_s + 0.5:
                # This process itself was suspended, so that is no silence of the others.
                self._link.discount(now - before)
                for worker in workers or ():
                    worker.liveness.discount(now - before)
            before = now
            silent_s = self._link.silent_s()
            # A leader that is only frozen may continue, and is not needed while nothing changes.
            if self._link.is_open and silent_s > max(self._leader_timeout_s, self._leader_grace_s):
                self._lose_leader(silent_s)
            activities = self._activities(now)
            self._link.send(msg.AgentBeat(activities))
            # A worker whose silence reaches the failure timeout does not wait for the next one.
            left = [self._leader_timeout_s - each.silent_s for each in activities.values()]
            await asyncio.sleep(min([interval_s, *(left_s for left_s in left if left_s > 0)]))

    def _activities(self, now: float) -> dict[str, Activity]:
        return {
            worker.name: replace(worker.activity, silent_s=round(worker.silent_s(now), 3))
            for worker in self._workers or ()
        }

    def _reap(self) -> None:
        """Reap all children that have ended: workers, and orphans of theirs."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                code = os.waitstatus_to_exitcode(status)
                if self._preemption is not None and self._preemption.reaped(pid, code):
                    continue
                if self._workers is not None and (worker := self._workers.with_pid(pid)):
                    killed = code in _KILLED and self._sampler.memory_kills.any_new()
                    ending = self._workers.report_end(worker, code, out_of_memory=killed)
                    self._start_task(ending)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task and keep a reference, since the event loop keeps none."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End, since a part of this agent has ended: it would only seem to obey its leader."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        print(text, file=sys.stderr)
        self._warn(f"the agent ends after an error: {error!r}")
        self.exit_status = 1
        self._over.set()

    # -- notices that the host will go away --------------------------------------------------

    def _on_notice(self, number: int) -> None:
        """Handle the notice that the machine is shut down or a spot instance taken back.

        Then all processes get SIGTERM, and in a login session SIGHUP as well. The same signal for a
        second time is meant to end this process.
        """
        before, self._notices = self._notices, [*self._notices, number]
        if number in before or self._workers is None:
            again = " again" if number in before else ""
            print(f"it got {signal.Signals(number).name}{again}", file=sys.stderr)
            self._over.set()
        elif not before:
            self._workers.host_goes = True
            if self._is_led:
                self._tell_of_notice()
            else:
                self._leave()

    def _tell_of_notice(self) -> None:
        left_s = after_sigterm_s()
        self._give_notice(f"its agent got {signal.Signals(self._notices[0]).name}", left_s)
        asyncio.get_running_loop().call_later(left_s, self._leave)

    def _leave(self) -> None:
        """Leave, because the host goes away now; without a leader a checkpoint is written first."""
        if self._is_led:
            self._over.set()
        else:
            self._hurry.set()
            self._lose_leader()

    def _warn(self, text: str, at_risk: bool = False) -> None:
        self._tell(msg.AgentWarning(text, at_risk))

    def _give_notice(self, cause: str, leave_in_s: float) -> None:
        self._tell(msg.Notice(cause, round(leave_in_s, 1)))

    # -- takeover by the next leader -------------------------------------------------------

    @property
    def _leader_timeout_s(self) -> float:
        return math.inf if self._workers is None else self._hello.failure_timeout_s

    @property
    def _leader_grace_s(self) -> float:
        return 0.0 if self._workers is None else self._hello.leader_grace_s

    @property
    def _is_led(self) -> bool:
        return self._link.is_open and self._link.silent_s() <= self._leader_timeout_s

    def _lose_leader(self, silent_s: float = 0.0) -> None:
        """Handle the loss of the leader: end, or wait for another leader."""
        if self._over.is_set() or not self._link.is_open:
            return
        self._hang_up()
        if not self._leader_grace_s or not self._workers:
            self._over.set()
            return
        if self._notices:
            self._hurry.set()  # another leader would come too late
        grace_s = max(0.0, self._leader_grace_s - silent_s)
        self._vigil = self._start_task(self._hold_out(grace_s, self._workers))

    def _hang_up(self) -> None:
        self._link.close()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()

    async def _hold_out(self, grace_s: float, workers: Workers) -> None:
        """Train on without a leader; after the grace time write a checkpoint and end."""
        await asyncio.sleep(0)  # let the transports close their pipes first
        # Close the descriptors of the lost connection, or ssh would not end it.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if null > 2:
            os.close(null)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), grace_s)
        if self._hello.options.checkpoint_every_s:
            await write_last_checkpoint(
                workers,
                self._spool,
                self._leader_timeout_s,
                lambda: self._call_off(max(self._stores, default=0)),
            )
        self._over.set()

    def _at_the_door(self) -> None:
        """Accept a new agent process, started by another leader or by the same one again."""
        assert self._door is not None
        with contextlib.suppress(OSError):  # it is gone again
            connection, _ = self._door.accept()
            # A number, since the socket of a task that is cancelled before it begins would be
            # closed, and the caller would kill this process, whose end it waits for.
            self._start_task(self._hear_out(connection.detach()))

    async def _hear_out(self, descriptor: int) -> None:
        caller = await read_caller(socket.socket(fileno=descriptor))
        if caller is None:
            return
        try:
            await self._meet(caller)
        except asyncio.CancelledError:
            self._callers.append(caller)  # it waits until this process ends
            raise

    async def _meet(self, caller: Caller) -> None:
        other = caller.hello.leader != self._hello.leader
        if other and self._is_led:
            # A leader that was just killed sends nothing more within this time. Several callers
            # wait together, since each of them kills this process if it gets no answer.
            await self._link.wait_for_word(max(_PROOF_S, 2 * self._hello.heartbeat_s))
        async with self._deciding:
            other = caller.hello.leader != self._hello.leader
            if other and self._is_led:
                led = self._hello.identity
                led.heard_s = round(self._link.silent_s(), 1)
                caller.refuse(led)
            elif other and caller.hello.take_over:
                await self._follow(caller)
            else:
                self._callers.append(caller)  # it waits until this process ends
                self._over.set()

    async def _follow(self, caller: Caller) -> None:
        """Switch to another leader."""
        assert self._workers is not None
        if self._vigil is not None:
            self._vigil.cancel()
        self._hurry.clear()
        # If the old leader was only frozen, it reads this when it continues.
        self._link.send(msg.TakenOver(caller.hello.identity))
        self._hang_up()
        self._callers.append(caller)
        caller.accept()
        self._hello = self._workers.hello = caller.hello
        self._spool.keep_run(caller.hello.run)
        pipes = os.fdopen(caller.input, "rb"), os.fdopen(caller.output, "wb")
        await self._link.open(*pipes, unread=caller.rest)
        self._log.changed_leader()
        # The hello lists the spool.
        untold = [each for each in self._log.unacknowledged() if not _is_of_saved_file(each)]
        self._introduce(swept=0, held=self._log.snapshot(len(untold)))
        for message in untold:
            self._link.send(message)
        if self._notices:
            self._tell_of_notice()
        self._reading = self._start_task(self._read_commands())

    # -- hello -----------------------------------------------------------------------------

    async def _on_hello(self, hello: msg.LeaderHello) -> None:
        self._spool = Spool.of_run(hello)
        # An agent of this run may still be running here, without a leader or given up by it.
        rest, output = self._link.unread(), self._output.fileno()
        try:
            answer = call_predecessor(self._spool.path, hello, rest, output)
        except StrangerError as error:
            self._end_unused(str(error), os.EX_NOPERM)
            return
        if isinstance(answer, msg.Refused):
            self._link.send(answer)
        if answer is not None:
            self._replaced = True
            self._over.set()
            return
        become_subreaper()
        left = functools.partial(_left_by_predecessor, hello, str(self._spool.path))
        swept = len(end_processes(left, 0.5))
        self._spool.remove_sent_checkpoints()
        self._interface = hello.interface or interface_of(own_address(hello.local_address))
        try:
            self._spool.keep_run(hello.run)
            workers = Workers(
                hello, self._spool.path, self._interface, self._tell, self._has_room_for_output
            )
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            self._end_unused(
                f"a folder of the run cannot be made: {place}{error.strerror}. Free space or fix "
                "the permissions there, or set HVD_ELASTIC_HOME, or TMPDIR for temporary files, to "
                "folders that every host can write"
            )
            return
        except StrangerError as error:
            self._end_unused(str(error), os.EX_NOPERM)
            return
        no_door = ""
        try:
            self._door = listen_for_successors(self._spool.path)
        except RunError as error:
            workers.close()
            self._end_unused(str(error))
            return
        except OSError as error:
            no_door = f"{self._spool.path}: {error.strerror or error}"
        await workers.listen()
        self._hello, self._workers = hello, workers
        self._introduce(swept)
        if self._door is not None:
            asyncio.get_running_loop().add_reader(self._door, self._at_the_door)
        else:
            self._warn(
                f"no other leader can take this host over: no socket can be made in {no_door}"
            )
        self._sampler = HostSampler(self._interface, hello.host)
        self._start_task(
            self._sampler.watch(
                lambda: self._activities(time.monotonic()),
                lambda sample: self._link.send(msg.HostSampled(sample=sample)),
            )
        )
        hardware = HardwareWatch(
            lambda faults: self._link.send(msg.HardwareJudged(faults)), self._warn
        )
        self._start_task(hardware.watch())
        for message in self._spool.take_untold():
            self._tell(message)
        if hello.preemption_command:
            said = functools.partial(self._give_notice, "the preemption command says so")
            self._preemption = CommandWatch(hello.preemption_command, said, self._warn)
            self._start_task(self._preemption.watch())
        if hello.preemption:
            variables = {**os.environ, **hello.env}
            told = (self._give_notice, self._warn, functools.partial(self._warn, at_risk=True))
            cloud = CloudWatch(hello.preemption, variables, *told)
            self._start_task(cloud.watch())

    def _end_unused(self, why: str, status: int = 1) -> None:
        """End before anything was begun; ``status`` EX_NOPERM: trying again is of no use."""
        print(why, file=sys.stderr)
        self.exit_status = status
        self._over.set()

    def _introduce(self, swept: int, held: msg.HeldRun | None = None) -> None:
        """Send this agent's hello; ``held``: what an earlier leader left here of the run."""
        self._link.send(
            msg.AgentHello(
                protocol=msg.PROTOCOL,
                version=__version__,
                python=platform.python_version(),
                spool=str(self._spool.path),
                spooled=[shard.manifest() for shard in self._spool.shards()],
                saved=self._spool.saved_files(),
                executable=sys.executable,
                pid=os.getpid(),
                hostname=socket.gethostname(),
                interface=self._interface,
                interfaces=interfaces(),
                cpus=usable_cores(),
                machine=_machine(),
                swept=swept,
                held=held,
                time=time.time(),
            )
        )


def _is_of_saved_file(message: msg.AgentToLeader) -> bool:
    return isinstance(message, msg.WorkerSaid) and isinstance(message.message, msg.FileSaved)


def _left_by_predecessor(hello: msg.LeaderHello, spool: str) -> list[Process]:
    """Return processes on this host that a killed agent of this run left behind.

    A run of the same name in another HVD_ELASTIC_HOME is another run.
    """
    marks = {("HVD_ELASTIC_RUN_ID", hello.run_id), ("HVD_ELASTIC_HOST", hello.host)}
    spared = own_ancestors()
    return [
        process
        for pid, process in all_processes().items()
        if pid not in spared
        and marks <= (variables := environment(pid)).items()
        and variables.get("HVD_ELASTIC_SPOOL", spool) == spool
    ]


def main() -> None:
    """Entry point of the agent process."""
    if PARENT_VARIABLE in os.environ:  # the engine may take the host away with that process alone
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    # Only messages may reach the leader on the real stdout; output of print goes to stderr.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.set_inheritable(output.fileno(), False)

    async def serve() -> int:
        agent = Agent(output)
        await agent.run()
        return agent.exit_status

    sys.exit(asyncio.run(serve()))


if __name__ == "__main__":
    main()
