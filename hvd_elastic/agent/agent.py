"""The agent: one process per host and run, started by the leader over ssh.

It reads commands as JSON lines on stdin and answers on stdout; nothing of it listens on a network.
It starts, warms, signals and reaps the workers of its host, carries their messages, serves the
rendezvous of each generation on the loopback address. When the leader is done it ends everything
it started and itself. A first SIGTERM or SIGHUP is a notice that the host will go: the leader is
told, and has the workers leave. When the leader is lost (killed, or its link is gone) training goes
on for a grace time: state and data live in the workers, and nothing but a change of the world needs
a leader. Another leader can take the agent over meanwhile; see
:mod:`hvd_elastic.agent.failover`. After that time, or at such a notice before, the workers write
a checkpoint and all ends.

Run by the launcher as ``python -m hvd_elastic.agent.agent``.
"""

from __future__ import annotations

import asyncio
import base64
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
from dataclasses import dataclass, field
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
from hvd_elastic.wire.framing import PROTOCOL, Message, decode, encode, peer_uid

__all__ = ["Agent", "interface_of", "main"]

_LINE_LIMIT = 64 << 20
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


def _leader_of(hello: Message) -> Message:
    """Who said this hello, for another leader."""
    return {name: hello[name] for name in ("run_id", "leader", "led_by", "led_since")}


@dataclass
class Worker:
    """One worker process of this host."""

    name: str
    local_rank: int
    process: subprocess.Popen[bytes]
    log: int
    pulse: Pulse
    activity: Message = field(default_factory=dict)
    is_member: bool = False
    """It has joined a generation and is not through with its training."""
    has_answered: bool = True
    """It has written what it was asked for last, or could not."""
    outlived: int = 0
    """SIGTERM or SIGHUP, which it got first and outlived."""
    was_meant: bool = False
    """It was ended because it alone had got that."""
    writer: asyncio.StreamWriter | None = None
    unsent: list[Message] = field(default_factory=list)

    def silent_s(self, now: float) -> float:
        """For how long it gave no sign of life [s]."""
        # Before it has connected its interpreter is still starting.
        return 0.0 if self.writer is None else self.pulse.silent_s(now)

    def send(self, message: Message) -> None:
        """Pass a message on, now or as soon as the worker has connected."""
        if self.writer is None:
            self.unsent.append(message)
        elif not self.writer.is_closing():
            self.writer.write(encode(message))


class Agent:
    """What one host does for one run. All of it happens on one event loop, in one thread."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._out: asyncio.StreamWriter | None = None
        self._hello: Message = {}
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
            worker.send({"kind": "end"})  # those that outlive SIGTERM
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
        reader = self._reader = asyncio.StreamReader(limit=_LINE_LIMIT)
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
            while line := await self._reader.readline():
                self._heard = time.monotonic()
                self._word.set()
                message = decode(line)
                # What a leader tells all its agents may overtake the hello of a new one.
                if self._hello or message["op"] in ("hello", "shutdown"):
                    await getattr(self, f"_on_{message['op']}")(message)
            self._lose_leader()
        except OSError:
            self._lose_leader()
        except (ValueError, KeyError, AttributeError) as error:
            self._send({"ev": "fatal", "message": f"agent stopped: {error!r}"})
            self._over.set()

    def _send(self, message: Message) -> None:
        if self._out is not None and not self._out.is_closing():
            self._out.write(encode(message))

    def _tell(self, message: Message) -> None:
        """Send what the leader, or the next one, must not miss."""
        self._send(self._ledger.number(message))

    async def _beat(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            interval_s = self._hello.get("heartbeat_s", 1.0)
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
                name: {**worker.activity, "silent_s": round(worker.silent_s(now), 3)}
                for name, worker in self._workers.items()
            }
            self._send({"ev": "beat", "workers": workers})
            await asyncio.sleep(interval_s)

    # -- notices that the host will go -------------------------------------------------------

    def _on_notice(self, number: int) -> None:
        """The machine is shut down, or a spot instance is taken back.

        Then all processes get SIGTERM, and where it was a login SIGHUP as well. The same one for a
        second time is meant to end this process.
        """
        before, self._notices = self._notices, [*self._notices, number]
        if number in before or not self._hello:
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
            worker.send({"kind": "end"})

    def _leave(self) -> None:
        """The host goes now: where no leader has seen to the state, it is written first."""
        if self._is_led:
            self._over.set()
        else:
            self._hurry.set()
            self._lose_leader()

    def _give_notice(self, cause: str, leave_in_s: float) -> None:
        self._tell({"ev": "notice", "cause": cause, "leave_in_s": round(leave_in_s, 1)})

    def _watch_for_preemption(self, command: str) -> None:
        self._preemption = PreemptionWatch(
            command,
            functools.partial(self._give_notice, "the preemption command says so"),
            lambda trouble: self._tell({"ev": "warning", "message": trouble}),
        )
        self._begin(self._preemption.watch())

    # -- without a leader, and the next one ------------------------------------------------

    @property
    def _leader_timeout_s(self) -> float:
        return float(self._hello.get("failure_timeout_s", math.inf))

    @property
    def _leader_grace_s(self) -> float:
        return float(self._hello.get("leader_grace_s", 0.0))

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
        if self._hello["options"].get("checkpoint_every_s"):
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
                worker.send({"kind": "checkpoint"})
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
                await self._on_abort({"generation": max(self._stores, default=0)})
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
        said = [(w.name, w.has_answered, w.activity.get("step")) for w in self._workers.values()]
        size = 0
        with contextlib.suppress(OSError), os.scandir(self._spool()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # renamed meanwhile
                    size += entry.stat().st_size
        return [size, *said]

    def _step_patience_s(self) -> float:
        longest_s = [w.activity.get("longest_step_s", 0.0) for w in self._workers.values()]
        return max(3 * self._leader_timeout_s, 2 * max(longest_s, default=0.0))

    def _leave_untold(self) -> None:
        """Keep what was read, and no leader knows, where the next agent of the run finds it."""
        lines = [encode(message) for message in self._ledger.unacknowledged_readings()]
        if lines:
            with contextlib.suppress(OSError):
                (self._spool() / _UNTOLD).write_bytes(b"".join(lines))

    def _tell_untold(self) -> None:
        path = self._spool() / _UNTOLD
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_bytes().splitlines()
            path.unlink()
            for line in lines:
                self._tell({"ev": "past", "message": decode(line)})

    def _at_the_door(self) -> None:
        """The agent process of another leader, or of the same one once more."""
        assert self._door is not None
        caller = answer_caller(self._door)
        if caller is not None:
            self._begin(self._meet(caller))

    async def _meet(self, caller: Caller) -> None:
        other = caller.hello.get("leader") != self._hello["leader"]
        if other and await self._is_led_for_sure():
            heard_s = time.monotonic() - self._heard
            caller.refuse({**_leader_of(self._hello), "heard_s": round(heard_s, 1)})
        elif other and caller.hello.get("take_over"):
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
        self._send({"ev": "taken_over", **_leader_of(caller.hello), "heard_s": 0.0})
        self._hang_up()
        self._callers.append(caller)
        caller.accept()
        self._hello = {**self._hello, **caller.hello}
        keep_run(self._spool(), self._hello.get("run", {}))
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

    async def _on_hello(self, message: Message) -> None:
        self._hello = message
        self._settle_with_predecessor(message)
        if self._over.is_set():
            return
        supervisor.become_subreaper()
        # What an agent of this run that was killed has left on this host.
        marks = {"HVD_ELASTIC_RUN_ID": message["run_id"], "HVD_ELASTIC_HOST": message["host"]}
        swept = supervisor.end_processes(lambda: supervisor.marked_processes(marks), 0.5)
        address = os.environ.get("SSH_CONNECTION", "").split(" ")
        own_address = address[2] if len(address) == 4 else message.get("local_address", "127.0.0.1")
        self._interface = message.get("interface") or interface_of(own_address)
        self._socket_name = f"hvd_elastic/{message['run_id']}/{secrets.token_hex(8)}"
        await asyncio.start_unix_server(
            self._serve_worker, path="\0" + self._socket_name, limit=_LINE_LIMIT
        )
        self._spool().mkdir(parents=True, exist_ok=True)
        keep_run(self._spool(), message.get("run", {}))
        self._scratch = make_scratch(message["run_id"], message["host"], message["env"])
        self._door = listen_for_successors(message["run_id"], message["host"])
        asyncio.get_running_loop().add_reader(self._door, self._at_the_door)
        self._introduce(swept)
        self._tell_untold()
        if message.get("preemption_command"):
            self._watch_for_preemption(message["preemption_command"])

    def _settle_with_predecessor(self, hello: Message) -> None:
        """An agent of this run may still be here, without a leader or given up by it."""
        assert self._reader is not None
        rest = bytes(self._reader._buffer)  # type: ignore[attr-defined]
        answer, led = call_predecessor(hello, rest, self._output.fileno())
        if answer == "refused":
            self._send({"ev": "refused", **led})
        if answer in ("refused", "taken"):
            self._replaced = True
            self._over.set()

    def _introduce(self, swept: int, held: Message | None = None) -> None:
        """Say who this is; ``held``: what is here of the run under an earlier leader."""
        self._send(
            {
                "ev": "hello",
                "spool": str(self._spool()),
                "spooled": [shard.manifest() for shard in find_shards(self._spool())],
                "protocol": PROTOCOL,
                "version": __version__,
                "python": platform.python_version(),
                "executable": sys.executable,
                "pid": os.getpid(),
                "hostname": socket.gethostname(),
                "interface": self._interface,
                "interfaces": _interfaces(),
                "cpus": len(os.sched_getaffinity(0)),
                "machine": _machine(),
                "swept": swept,
                "held": held,
            }
        )

    async def _on_beat(self, message: Message) -> None:
        self._ledger.acknowledged(message["seq"])
        recorded = message.get("recorded")
        if recorded is not None and recorded != self._recorded:
            self._recorded = recorded
            for worker in self._workers.values():
                worker.send({"kind": "recorded", "step": recorded})

    async def _on_start_worker(self, message: Message) -> None:
        name, local_rank = message["worker"], message["local_rank"]
        self._ledger.started(name, local_rank)
        environment = self._worker_environment(name, local_rank, message["slots"])
        cwd, command = self._hello["cwd"], list(self._hello["command"])
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
        except OSError as error:
            os.close(read_end)
            self._tell({"ev": "worker_not_started", "worker": name, "error": str(error)})
            return
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        worker = Worker(name, local_rank, process, read_end, Pulse(process.pid))
        self._workers[name] = worker
        asyncio.get_running_loop().add_reader(read_end, self._forward_log, worker)
        self._reap()  # it may have ended before it was known

    async def _on_announce(self, message: Message) -> None:
        generation = message["generation"]
        self._ledger.announced(generation, message["members"], message["workers"])
        for old in [number for number in self._stores if number < generation - 1]:
            self._stores.pop(old).close()
        store = GenerationStore(functools.partial(self._forward_key, generation))
        await store.open()
        self._stores[generation] = store
        for name, environment in message["workers"].items():
            if name in self._workers:
                values = {
                    **environment,
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port),
                    "HOROVOD_HOSTNAME": self._hello["host"],
                }
                if self._interface:
                    values["HOROVOD_GLOO_IFACE"] = self._interface
                self._workers[name].send(
                    {
                        "kind": "join",
                        "generation": generation,
                        "env": values,
                        "root_rank": message["root_rank"],
                        "restore": message.get("restore"),
                        "checkpoint": message.get("checkpoint"),
                        "life": message["life"],
                    }
                )

    async def _on_store(self, message: Message) -> None:
        store = self._stores.get(message["generation"])
        if store is not None:
            store.put(message["scope"], message["key"], base64.b64decode(message["value"]))

    async def _on_abort(self, message: Message) -> None:
        store = self._stores.get(message["generation"])
        if store is not None:
            store.call_off()
        for worker in self._workers.values():
            worker.send({"kind": "abort", "generation": message["generation"]})

    async def _on_tell(self, message: Message) -> None:
        self._ledger.told(message["worker"], message["message"]["kind"])
        worker = self._workers.get(message["worker"])
        if worker is not None:
            worker.send(message["message"])

    async def _on_kill(self, message: Message) -> None:
        self._ledger.killed(message["worker"], message.get("reason", ""))
        worker = self._workers.get(message["worker"])
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    async def _on_collected(self, message: Message) -> None:
        drop_shards(self._spool(), message["step"])

    async def _on_shutdown(self, message: Message) -> None:
        self._grace_s = float(message.get("grace_s", self._grace_s))
        self._over.set()

    # -- workers ---------------------------------------------------------------------------

    def _spool(self) -> Path:
        """Where workers of this host leave checkpoints for the leader to fetch."""
        configured = self._hello["env"].get("HVD_ELASTIC_HOME")
        home = Path(configured) if configured else config.home()
        return home / "spool" / self._hello["run_id"] / self._hello["host"]

    def _remove_spool(self) -> None:
        if not self._hello:
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
        environment.update(self._hello["env"])
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
            HVD_ELASTIC_RUN_ID=self._hello["run_id"],
            HVD_ELASTIC_HOST=self._hello["host"],
            HVD_ELASTIC_WORKER=name,
            HVD_ELASTIC_LOCAL_RANK=str(local_rank),
            HVD_ELASTIC_AGENT=self._socket_name,
            HVD_ELASTIC_SPOOL=str(self._spool()),
            HVD_ELASTIC_OPTIONS=encode(self._hello["options"]).decode().strip(),
        )
        return environment

    async def _serve_worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        worker: Worker | None = None
        try:
            if peer_uid(writer.get_extra_info("socket")) != os.getuid():
                return
            worker = self._workers.get(decode(await reader.readline()).get("worker", ""))
            if worker is None or worker.writer is not None:
                return
            worker.writer = writer
            for message in worker.unsent:
                worker.send(message)
            worker.unsent.clear()
            while line := await reader.readline():
                worker.pulse.beat()
                message = decode(line)
                kind = message["kind"]
                if kind == "beat":
                    outlived = message.pop("outlived", 0)
                    worker.activity = {name: message[name] for name in message if name != "kind"}
                    if outlived and not worker.outlived:
                        worker.outlived = outlived
                        loop = asyncio.get_running_loop()
                        loop.call_later(_SAME_NOTICE_S, self._end_if_meant_alone, worker)
                elif kind == "checkpoint_answered":
                    worker.has_answered = True
                else:
                    if kind in ("joined", "finished"):
                        worker.is_member = kind == "joined"
                    self._tell({"ev": "worker", "worker": worker.name, "message": message})
        except (ValueError, KeyError, OSError):
            pass  # a worker that dies in the middle of a line; its exit is reported by _reap
        finally:
            writer.close()

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
        self._tell({"ev": "log", "worker": worker.name, "data": text})

    def _forward_key(self, generation: int, scope: str, key: str, value: bytes) -> None:
        encoded = base64.b64encode(value).decode()
        self._send(
            {"ev": "store", "generation": generation, "scope": scope, "key": key, "value": encoded}
        )

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
                self._tell({"ev": "log", "worker": worker.name, "data": text})
        loop.remove_reader(worker.log)
        os.close(worker.log)
        del self._workers[worker.name]
        code = worker.process.returncode
        if worker.was_meant and code == -signal.SIGKILL:
            code = -worker.outlived  # what somebody sent, and not how it was carried out
        self._tell(
            {
                "ev": "worker_exited",
                "worker": worker.name,
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
            }
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
