"""The agent: one process per host and run, started by the leader over ssh.

It reads messages of :mod:`hvd_elastic.wire` on stdin and answers on stdout; nothing of it listens
on a network. It starts, warms, signals and reaps the workers of its host, carries their messages,
and serves the rendezvous of each generation on the loopback address. When the leader is done it
ends everything it started and itself.

A first SIGTERM or SIGHUP is a notice that the host will go: the leader is told, and has the workers
leave. When the leader is lost (killed, or its link is gone) training goes on for a grace time:
state and data live in the workers, and nothing but a change of the world needs a leader. Another
leader can take the agent over meanwhile; see :mod:`hvd_elastic.agent.failover`. After that time,
or at such a notice before, the workers write a checkpoint and all ends.

Run by the launcher as ``python -m hvd_elastic.agent.agent``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from hvd_elastic import __version__, config
from hvd_elastic.agent import supervisor
from hvd_elastic.agent.failover import (
    Caller,
    answer_caller,
    call_predecessor,
    listen_for_successors,
)
from hvd_elastic.agent.liveness import Pulse
from hvd_elastic.agent.preemption import NOTICE_S, PreemptionWatch
from hvd_elastic.agent.rendezvous import GenerationStore
from hvd_elastic.agent.scratch import make_scratch, scratch_variables
from hvd_elastic.agent.spool import keep_run
from hvd_elastic.agent.unacknowledged import Ledger
from hvd_elastic.checkpoint.files import drop_shards, find_shards
from hvd_elastic.control.commands import Member
from hvd_elastic.control.progress import Activity
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import (
    MAX_LINE_BYTES,
    MessageDecoder,
    ProtocolError,
    encode,
    peer_uid,
)

__all__ = ["Agent", "interface_of", "main"]

_STRAY_GRACE_S = 2.0
_LOG_CHUNK_BYTES = 1 << 16
_WRITE_PATIENCE_S = 300.0
"""So long nothing may be seen of a checkpoint on its way: a disk may take it all at the end."""
_LOOK_S = 0.1
_PROOF_S = 2.0
"""A leader that lives is heard of within this time; its longest interval is a second."""
_SAME_NOTICE_S = 2.0
"""What is sent to all processes of a host reaches all of them within this time."""
_UNTOLD = "untold.jsonl"


def interface_of(address: str) -> str | None:
    """Name of the network interface that has ``address``; None when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    # 127.0.0.0/8 belongs to the loopback interface as a whole.
    return "lo" if address.startswith("127.") else None


def _interfaces() -> dict[str, str]:
    """Name → address of the network interfaces that the ring can use."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, entry.address)
    return found


def _machine() -> str:
    """What hosts that are parts of one machine (containers, namespaces) have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@dataclass
class Worker:
    """One worker process of this host."""

    name: str
    local_rank: int
    process: subprocess.Popen[bytes]
    log: int
    pulse: Pulse
    activity: Activity = field(default_factory=Activity)
    is_member: bool = False
    """It has joined a generation and is not through with its training."""
    has_answered: bool = True
    """It has written what it was asked for last, or could not."""
    outlived: int = 0
    """SIGTERM or SIGHUP, which it got first and outlived."""
    was_meant: bool = False
    """It was ended because it alone had got that."""
    writer: asyncio.StreamWriter | None = None
    unsent: list[msg.AgentToWorker] = field(default_factory=list)

    def silent_s(self, now: float) -> float:
        """For how long it gave no sign of life [s]."""
        # Before it has connected its interpreter is still starting.
        return 0.0 if self.writer is None else self.pulse.silent_s(now)

    def send(self, message: msg.AgentToWorker) -> None:
        """Send a message, now or as soon as the worker has connected."""
        if self.writer is None:
            self.unsent.append(message)
        elif not self.writer.is_closing():
            self.writer.write(encode(message))


class Agent:
    """What one host does for one run. All of it happens on one event loop, in one thread."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._out: asyncio.StreamWriter | None = None
        self._greeting: msg.LeaderHello | None = None
        self._workers: dict[str, Worker] = {}
        self._stores: dict[int, GenerationStore] = {}
        self._interface: str | None = None
        self._socket_name = ""
        self._scratch: Path | None = None
        self._over = asyncio.Event()
        self._grace_s = 3.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ledger = Ledger()
        self._reader: asyncio.StreamReader | None = None
        self._input: asyncio.ReadTransport | None = None
        self._commands: asyncio.Task[None] | None = None
        self._vigil: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._word = asyncio.Event()
        self._hurry = asyncio.Event()
        self._door: socket.socket | None = None
        self._callers: list[Caller] = []
        self._orders: MessageDecoder[msg.LeaderToAgent] = MessageDecoder(
            msg.LeaderToAgent, "the leader"
        )
        self._recorded: int | None = None
        self._replaced = False
        self._preemption: PreemptionWatch | None = None
        self._notices: list[int] = []

    # -- life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the leader says ``shutdown``, or is gone for longer than the grace time."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGINT, self._over.set)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_notice, number)
        await self._connect(sys.stdin, self._output)
        self._commands = asyncio.create_task(self._read_commands())
        beats = asyncio.create_task(self._beat())
        await self._over.wait()
        for task in (self._commands, self._vigil, beats, *self._tasks):
            if task is not None:
                task.cancel()
        loop.remove_signal_handler(signal.SIGCHLD)
        if self._replaced:
            return
        if self._door is not None:
            self._door.close()
        for store in self._stores.values():
            store.close()
        for worker in self._workers.values():
            worker.send(msg.End())  # those that outlive SIGTERM
        supervisor.end_processes(
            lambda: psutil.Process().children(recursive=True), self._grace_s, self._grace_s + 10
        )
        if self._out is None:
            self._leave_untold()
        self._remove_spool()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    async def _connect(self, commands: IO[Any], output: IO[bytes]) -> None:
        """Talk to a leader through these pipes from now on."""
        loop = asyncio.get_running_loop()
        reader = self._reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self._input, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), commands
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, output
        )
        self._out = asyncio.StreamWriter(transport, protocol, None, loop)
        self._heard = time.monotonic()

    async def _read_commands(self) -> None:
        assert self._reader is not None
        try:
            while line := await _read_line(self._reader, "the leader"):
                self._heard = time.monotonic()
                self._word.set()
                await self._obey(self._orders.decode(line))
            self._lose_leader()
        except OSError:
            self._lose_leader()
        except ProtocolError as error:
            text = f"the agent of hvd_elastic {__version__} (protocol {msg.PROTOCOL}) stopped"
            self._send(msg.AgentWarning(f"{text}: {error}"))
            self._over.set()

    async def _obey(self, message: msg.LeaderToAgent) -> None:
        match message:
            case msg.LeaderHello():
                await self._on_hello(message)
            case msg.Shutdown(grace_s=grace_s):
                self._grace_s = grace_s
                self._over.set()
            case _ if self._greeting is None:
                pass  # what a leader tells all its agents may overtake the hello of a new one
            case msg.LeaderBeat():
                self._on_leader_beat(message)
            case msg.StartWorker():
                self._start_worker(message)
            case msg.AnnounceGeneration(announcement=announcement):
                await self._announce(announcement)
            case msg.PutEntry(entry=entry):
                if entry.generation in self._stores:
                    self._stores[entry.generation].put(entry.scope, entry.key, entry.value)
            case msg.CallOff(generation=generation):
                self._call_off(generation)
            case msg.Tell(worker=name, message=instruction):
                if isinstance(instruction, msg.Leave):
                    self._ledger.told_to_leave(name)
                if name in self._workers:
                    self._workers[name].send(instruction)
            case msg.Kill(worker=name, reason=reason):
                self._ledger.killed(name, reason)
                if name in self._workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._workers[name].process.pid, signal.SIGKILL)
            case msg.Collected(step=step):
                drop_shards(self._spool(), step)

    def _send(self, message: msg.AgentToLeader) -> None:
        if self._out is not None and not self._out.is_closing():
            self._out.write(encode(message))

    def _tell(self, message: msg.AgentToLeader) -> None:
        """Send what the leader, or the next one, must not miss."""
        self._send(self._ledger.number(message))

    async def _beat(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            interval_s = self._greeting.heartbeat_s if self._greeting is not None else 1.0
            if now - before > 2 * interval_s + 0.5:
                # It was this process that stood still, so it cannot judge others by that time.
                self._heard += now - before
                for worker in self._workers.values():
                    worker.pulse.excuse(now - before)
            before = now
            silent_s = now - self._heard
            # One that is only frozen may come back, and is not missed while nothing changes.
            if self._out is not None and silent_s > max(
                self._leader_timeout_s, self._leader_grace_s
            ):
                self._lose_leader(silent_s)
            workers = {
                name: replace(worker.activity, silent_s=round(worker.silent_s(now), 3))
                for name, worker in self._workers.items()
            }
            self._send(msg.AgentBeat(workers))
            await asyncio.sleep(interval_s)

    # -- notices that the host will go -------------------------------------------------------

    def _on_notice(self, number: int) -> None:
        """The machine is shut down, or a spot instance is taken back.

        Then all processes get SIGTERM, and where it was a login SIGHUP as well. The same one for a
        second time is meant to end this process.
        """
        before, self._notices = self._notices, [*self._notices, number]
        if number in before or self._greeting is None:
            self._over.set()
        elif not before and self._is_led:
            self._tell_of_notice()
        elif not before:
            self._leave()

    def _tell_of_notice(self) -> None:
        self._give_notice(f"its agent got {signal.Signals(self._notices[0]).name}", NOTICE_S)
        asyncio.get_running_loop().call_later(NOTICE_S, self._leave)

    def _end_if_meant_alone(self, worker: Worker) -> None:
        """A worker that outlived SIGTERM, if that was no notice to the whole host."""
        if not self._notices:
            worker.was_meant = True
            worker.send(msg.End())

    def _leave(self) -> None:
        """The host goes now: where no leader has seen to the state, it is written first."""
        if self._is_led:
            self._over.set()
        else:
            self._hurry.set()
            self._lose_leader()

    def _give_notice(self, cause: str, leave_in_s: float) -> None:
        self._tell(msg.Notice(cause, round(leave_in_s, 1)))

    def _watch_for_preemption(self, command: str) -> None:
        self._preemption = PreemptionWatch(
            command,
            functools.partial(self._give_notice, "the preemption command says so"),
            lambda trouble: self._tell(msg.AgentWarning(trouble)),
        )
        self._begin(self._preemption.watch())

    # -- without a leader, and the next one ------------------------------------------------

    @property
    def _hello(self) -> msg.LeaderHello:
        assert self._greeting is not None
        return self._greeting

    @property
    def _leader_timeout_s(self) -> float:
        return math.inf if self._greeting is None else self._greeting.failure_timeout_s

    @property
    def _leader_grace_s(self) -> float:
        return 0.0 if self._greeting is None else self._greeting.leader_grace_s

    @property
    def _is_led(self) -> bool:
        silent_s = time.monotonic() - self._heard
        return self._out is not None and silent_s <= self._leader_timeout_s

    def _lose_leader(self, silent_s: float = 0.0) -> None:
        """Nobody leads any more: end, or hold out for another leader."""
        if self._over.is_set() or self._out is None:
            return
        self._hang_up()
        if not self._leader_grace_s or not self._workers:
            self._over.set()
            return
        if self._notices:
            self._hurry.set()  # another leader would come too late
        self._vigil = asyncio.create_task(self._hold_out(max(0.0, self._leader_grace_s - silent_s)))

    def _hang_up(self) -> None:
        self._word.set()
        if self._out is not None:
            self._out.close()
            self._out = None
        if self._input is not None:
            self._input.close()
        if self._commands is not None and self._commands is not asyncio.current_task():
            self._commands.cancel()

    async def _hold_out(self, grace_s: float) -> None:
        """Train on without a leader; in the end write a checkpoint and end."""
        await asyncio.sleep(0)  # the pipes are closed by then
        # Of the lost connection nothing stays open, so that ssh can end it.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        if null > 2:
            os.close(null)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), grace_s)
        if self._hello.options.checkpoint_every_s:
            await self._have_state_written()
        self._over.set()

    async def _have_state_written(self) -> None:
        """Ask for a checkpoint, and wait for the share of every worker here.

        All ranks of all hosts take it at the same step, whoever asked first, and write on when the
        others are gone; so it is whole when each host has waited for its own.
        """
        for worker in self._workers.values():
            if worker.is_member:
                worker.has_answered = False
                worker.send(msg.SaveState())
        seen: list[Any] = []
        since, was_called_off = time.monotonic(), False
        while self._is_awaited():
            signs = self._signs_of_writing()
            if signs != seen:
                seen, since = signs, time.monotonic()
            nothing_s = time.monotonic() - since
            if nothing_s >= _WRITE_PATIENCE_S:
                return
            if nothing_s >= self._step_patience_s() and not was_called_off:
                # They wait for another host, which is gone, say: out of its step each of them
                # writes the whole state.
                was_called_off = True
                self._call_off(max(self._stores, default=0))
            await asyncio.sleep(_LOOK_S)

    def _is_awaited(self) -> bool:
        now = time.monotonic()
        return any(
            worker.is_member
            and not worker.has_answered
            and worker.silent_s(now) <= self._leader_timeout_s
            for worker in self._workers.values()
        )

    def _signs_of_writing(self) -> list[Any]:
        """What changes while steps are finished, or files become longer."""
        said = [(w.name, w.has_answered, w.activity.step) for w in self._workers.values()]
        size = 0
        with contextlib.suppress(OSError), os.scandir(self._spool()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # renamed meanwhile
                    size += entry.stat().st_size
        return [size, *said]

    def _step_patience_s(self) -> float:
        longest_s = [w.activity.longest_step_s for w in self._workers.values()]
        return max(3 * self._leader_timeout_s, 2 * max(longest_s, default=0.0))

    def _leave_untold(self) -> None:
        """Keep what was read, and no leader knows, where the next agent of the run finds it."""
        lines = [encode(message) for message in self._ledger.unacknowledged_readings()]
        if lines:
            with contextlib.suppress(OSError):
                (self._spool() / _UNTOLD).write_bytes(b"".join(lines))

    def _tell_untold(self) -> None:
        path = self._spool() / _UNTOLD
        readings: MessageDecoder[msg.Reading] = MessageDecoder(msg.Reading, f"the file {path}")
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_bytes().splitlines()
            path.unlink()
            for line in lines:
                try:
                    self._tell(msg.PastReading(readings.decode(line)))
                except ProtocolError as error:  # torn, as by a full disk
                    self._tell(msg.AgentWarning(str(error)))

    def _at_the_door(self) -> None:
        """The agent process of another leader, or of the same one once more."""
        assert self._door is not None
        caller = answer_caller(self._door)
        if caller is not None:
            self._begin(self._meet(caller))

    async def _meet(self, caller: Caller) -> None:
        other = caller.hello.leader != self._hello.leader
        if other and await self._is_led_for_sure():
            led = self._hello.identity
            led.heard_s = round(time.monotonic() - self._heard, 1)
            caller.refuse(led)
        elif other and caller.hello.take_over:
            await self._follow(caller)
        else:
            self._callers.append(caller)  # it waits until this process ends
            self._over.set()

    async def _is_led_for_sure(self) -> bool:
        """Whether somebody leads: one that was just killed is not heard of once more."""
        if self._is_led:
            self._word.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._word.wait(), _PROOF_S)
        return self._is_led

    async def _follow(self, caller: Caller) -> None:
        """Take orders from another leader."""
        if self._vigil is not None:
            self._vigil.cancel()
        self._hurry.clear()
        # One that was frozen reads this when it goes on, whatever has become of the run by then.
        self._send(msg.TakenOver(caller.hello.identity))
        self._hang_up()
        self._callers.append(caller)
        caller.accept()
        self._greeting = caller.hello
        keep_run(self._spool(), self._hello.run)
        await self._connect(os.fdopen(caller.input, "rb"), os.fdopen(caller.output, "wb"))
        assert self._reader is not None
        if caller.rest:
            self._reader.feed_data(caller.rest)
        self._introduce(swept=0, held=self._ledger.snapshot())
        for message in self._ledger.unacknowledged():
            self._send(message)
        if self._notices:
            self._tell_of_notice()
        self._commands = asyncio.create_task(self._read_commands())

    # -- commands of the leader ------------------------------------------------------------

    async def _on_hello(self, hello: msg.LeaderHello) -> None:
        self._greeting = hello
        self._settle_with_predecessor(hello)
        if self._over.is_set():
            return
        supervisor.become_subreaper()
        # What an agent of this run that was killed has left on this host.
        marks = {"HVD_ELASTIC_RUN_ID": hello.run_id, "HVD_ELASTIC_HOST": hello.host}
        swept = supervisor.end_processes(lambda: supervisor.marked_processes(marks), 0.5)
        address = os.environ.get("SSH_CONNECTION", "").split(" ")
        own_address = address[2] if len(address) == 4 else hello.local_address
        self._interface = hello.interface or interface_of(own_address)
        self._socket_name = f"hvd_elastic/{hello.run_id}/{secrets.token_hex(8)}"
        await asyncio.start_unix_server(
            self._serve_worker, path="\0" + self._socket_name, limit=MAX_LINE_BYTES
        )
        self._spool().mkdir(parents=True, exist_ok=True)
        keep_run(self._spool(), hello.run)
        self._scratch = make_scratch(hello.run_id, hello.host, hello.env)
        self._door = listen_for_successors(hello.run_id, hello.host)
        asyncio.get_running_loop().add_reader(self._door, self._at_the_door)
        self._introduce(swept)
        self._tell_untold()
        if hello.preemption_command:
            self._watch_for_preemption(hello.preemption_command)

    def _settle_with_predecessor(self, hello: msg.LeaderHello) -> None:
        """An agent of this run may still be here, without a leader or given up by it."""
        assert self._reader is not None
        rest = bytes(self._reader._buffer)  # type: ignore[attr-defined]
        answer = call_predecessor(hello, rest, self._output.fileno())
        if isinstance(answer, msg.Refused):
            self._send(answer)
        if answer is not None:
            self._replaced = True
            self._over.set()

    def _introduce(self, swept: int, held: msg.HeldRun | None = None) -> None:
        """Say who this is; ``held``: what is here of the run under an earlier leader."""
        self._send(
            msg.AgentHello(
                protocol=msg.PROTOCOL,
                version=__version__,
                python=platform.python_version(),
                spool=str(self._spool()),
                spooled=[shard.manifest() for shard in find_shards(self._spool())],
                executable=sys.executable,
                pid=os.getpid(),
                hostname=socket.gethostname(),
                interface=self._interface,
                interfaces=_interfaces(),
                cpus=len(os.sched_getaffinity(0)),
                machine=_machine(),
                swept=swept,
                held=held,
            )
        )

    def _on_leader_beat(self, beat: msg.LeaderBeat) -> None:
        self._ledger.acknowledged(beat.acted_upon)
        if beat.recorded is not None and beat.recorded != self._recorded:
            self._recorded = beat.recorded
            for worker in self._workers.values():
                worker.send(msg.Recorded(beat.recorded))

    def _start_worker(self, order: msg.StartWorker) -> None:
        name, local_rank = order.worker, order.local_rank
        self._ledger.started(name, self._hello.host, local_rank)
        environment = self._worker_environment(name, local_rank, order.slots)
        cwd, command = self._hello.cwd, list(self._hello.command)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            # A command with a slash in it is meant from the folder it runs in.
            named = str(Path(cwd, command[0])) if "/" in command[0] else command[0]
            program = shutil.which(named, path=environment.get("PATH"))
            if not Path(cwd).is_dir():
                raise FileNotFoundError(f"the folder {cwd} does not exist on this host")
            if program is None:
                raise FileNotFoundError(f"there is no command {command[0]!r} on this host")
            command[0] = program
            process = supervisor.spawn(command, cwd=cwd, env=environment, output=write_end)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            os.close(read_end)
            self._tell(msg.WorkerNotStarted(name, str(error)))
            return
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        worker = Worker(name, local_rank, process, read_end, Pulse(process.pid))
        self._workers[name] = worker
        asyncio.get_running_loop().add_reader(read_end, self._forward_log, worker)
        self._reap()  # it may have ended before it was known

    async def _announce(self, announcement: msg.Announcement) -> None:
        generation, members = announcement.generation, announcement.order.members
        here = [member for member in members if member.host == self._hello.host]
        self._ledger.announced(announcement.order, [member.worker for member in here])
        for old in [number for number in self._stores if number < generation - 1]:
            self._stores.pop(old).close()
        store = GenerationStore(functools.partial(self._forward_key, generation))
        await store.open()
        self._stores[generation] = store
        for member in here:
            if member.worker in self._workers:
                env = self._rank_environment(member, len(members), store.port)
                self._workers[member.worker].send(msg.Join(announcement, env))

    def _rank_environment(self, member: Member, size: int, store_port: int) -> dict[str, str]:
        """Return Horovod's variables for one member of a generation of ``size``."""
        hierarchical = any("HIERARCHICAL" in name for name in self._hello.env)
        values = {
            "RANK": member.rank,
            "SIZE": size,
            "LOCAL_RANK": member.local_rank,
            "LOCAL_SIZE": member.local_size,
            "CROSS_RANK": member.cross_rank,
            "CROSS_SIZE": member.cross_size,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            # Only hierarchical operations use a ring for the ranks of a host and one across hosts.
            "GLOO_SINGLE_CONTEXT": 0 if hierarchical else 1,
            # Operations that NCCL has begun are aborted when a rank fails, instead of waited for.
            "NCCL_ELASTIC": 1,
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": store_port,
            "HOSTNAME": self._hello.host,
        }
        if self._interface:
            values["GLOO_IFACE"] = self._interface
        return {f"HOROVOD_{name}": str(value) for name, value in values.items()}

    def _call_off(self, generation: int) -> None:
        if generation in self._stores:
            self._stores[generation].call_off()
        for worker in self._workers.values():
            worker.send(msg.Abort(generation))

    # -- workers ---------------------------------------------------------------------------

    def _spool(self) -> Path:
        """Where workers of this host leave checkpoints for the leader to fetch."""
        configured = self._hello.env.get("HVD_ELASTIC_HOME")
        home = Path(configured) if configured else config.home()
        return home / "spool" / self._hello.run_id / self._hello.host

    def _remove_spool(self) -> None:
        if self._greeting is None:
            return
        spool = self._spool()
        if find_shards(spool) or (spool / _UNTOLD).exists():
            return  # what no leader has: the next one asks for it
        shutil.rmtree(spool, ignore_errors=True)
        for folder in (spool.parent, spool.parent.parent):
            with contextlib.suppress(OSError):  # other hosts and runs may share the disk
                folder.rmdir()

    def _worker_environment(self, name: str, local_rank: int, slots: int) -> dict[str, str]:
        environment = dict(os.environ)
        environment.update(self._hello.env)
        cores = len(os.sched_getaffinity(0))
        # Several workers that each take all cores slow each other down (as torchrun does).
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, slots))))
        # What breaks a ring is said in our own words; Horovod's come once for each rank.
        environment.setdefault("HOROVOD_LOG_LEVEL", "fatal")
        # A worker that dies by a signal leaves its Python stack in its log.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        if self._interface:
            # NCCL looks once in a process, and without it at every interface there is.
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={self._interface}")
        if self._scratch is not None:
            environment = {**scratch_variables(self._scratch), **environment}
            environment["TMPDIR"] = str(self._scratch)
        environment.update(
            PYTHONUNBUFFERED="1",
            HVD_ELASTIC_RUN_ID=self._hello.run_id,
            HVD_ELASTIC_HOST=self._hello.host,
            HVD_ELASTIC_WORKER=name,
            HVD_ELASTIC_LOCAL_RANK=str(local_rank),
            HVD_ELASTIC_AGENT=self._socket_name,
            HVD_ELASTIC_SPOOL=str(self._spool()),
            HVD_ELASTIC_OPTIONS=encode(self._hello.options).decode().strip(),
        )
        return environment

    async def _serve_worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if peer_uid(writer.get_extra_info("socket")) != os.getuid():
                return
            stranger: MessageDecoder[Any] = MessageDecoder(msg.WorkerToAgent, "a process")
            hello = stranger.decode(await _read_line(reader, "a process"))
            worker = self._workers.get(hello.worker) if isinstance(hello, msg.WorkerHello) else None
            if worker is None or worker.writer is not None:
                return
            worker.writer = writer
            for message in worker.unsent:
                worker.send(message)
            worker.unsent.clear()
            await self._listen_to(worker, reader)
        except (ProtocolError, OSError):
            pass  # nobody that is known here; or a worker that dies, which _reap reports
        finally:
            writer.close()

    async def _listen_to(self, worker: Worker, reader: asyncio.StreamReader) -> None:
        name = f"the worker of slot {worker.local_rank}"
        messages: MessageDecoder[Any] = MessageDecoder(msg.WorkerToAgent, name)
        try:
            while line := await _read_line(reader, name):
                worker.pulse.beat()
                self._take_from(worker, messages.decode(line))
        except ProtocolError as error:
            # Its end follows: a worker that loses its agent ends.
            self._tell(msg.AgentWarning(f"{error}. This worker is given up"))

    def _take_from(self, worker: Worker, message: msg.WorkerToAgent) -> None:
        match message:
            case msg.WorkerBeat(activity=activity, outlived=outlived):
                worker.activity = activity
                if outlived and not worker.outlived:
                    worker.outlived = outlived
                    loop = asyncio.get_running_loop()
                    loop.call_later(_SAME_NOTICE_S, self._end_if_meant_alone, worker)
            case msg.CheckpointAnswered():
                worker.has_answered = True
            case msg.WorkerReport():
                if isinstance(message, (msg.Joined, msg.Finished)):
                    worker.is_member = isinstance(message, msg.Joined)
                self._tell(msg.WorkerSaid(worker.name, message))

    def _forward_log(self, worker: Worker) -> None:
        try:
            data = os.read(worker.log, _LOG_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(worker.log)
            return
        text = data.decode(errors="replace")
        self._tell(msg.Log(worker.name, text))

    def _forward_key(self, generation: int, scope: str, key: str, value: bytes) -> None:
        self._send(msg.EntryAdded(msg.StoreEntry(generation, scope, key, value)))

    def _reap(self) -> None:
        """Collect every child that has ended: workers, and orphans adopted from them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._preemption is not None and self._preemption.reaped(pid, code):
                continue
            worker = next((w for w in self._workers.values() if w.process.pid == pid), None)
            if worker is not None:
                worker.process.returncode = code
                self._begin(self._report_end(worker))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else; the loop itself keeps no task alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_end(self, worker: Worker) -> None:
        # What it said last comes before the news of its end.
        for _ in range(64):
            if worker.writer is None or worker.writer.is_closing():
                break
            await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := os.read(worker.log, _LOG_CHUNK_BYTES):
                text = data.decode(errors="replace")
                self._tell(msg.Log(worker.name, text))
        loop.remove_reader(worker.log)
        os.close(worker.log)
        del self._workers[worker.name]
        code = worker.process.returncode
        if worker.was_meant and code == -signal.SIGKILL:
            code = -worker.outlived  # what somebody sent, and not how it was carried out
        self._tell(
            msg.WorkerEnded(
                worker.name,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        )
        find = functools.partial(
            supervisor.strays_of, worker.process.pid, "HVD_ELASTIC_WORKER", worker.name
        )
        if self._out is None and not self._workers and not self._ledger.any_finished:
            self._over.set()  # there is nothing that a next leader could go on with
        for stray in find():
            with contextlib.suppress(psutil.Error):
                stray.terminate()
        await asyncio.sleep(_STRAY_GRACE_S)
        for stray in find():
            with contextlib.suppress(psutil.Error):
                stray.kill()


async def _read_line(reader: asyncio.StreamReader, sender: str) -> bytes:
    """Return the next line; b"" at the end, also where the last line is not whole.

    Raises:
        ProtocolError: the line is too long.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise ProtocolError(f"{sender} sent a line of more than {MAX_LINE_BYTES} bytes") from None
    return line if line.endswith(b"\n") else b""


def main() -> None:
    """Entry point of the agent process."""
    # Only messages may reach the leader on the real stdout; a stray print goes to stderr.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.set_inheritable(output.fileno(), False)

    async def serve() -> None:
        agent = Agent(output)
        await agent.run()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
