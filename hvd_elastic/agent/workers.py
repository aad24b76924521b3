"""Start the worker processes of a host, receive their messages, and report their end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_elastic.agent.leader_link import read_line
from hvd_elastic.agent.template.template import Template
from hvd_elastic.agent.worker import (
    Liveness,
    Worker,
    compiler_cache,
    make_scratch,
    without_early_messages,
)
from hvd_elastic.agent.worker_start import WorkerStart
from hvd_elastic.control.commands import Member
from hvd_elastic.programs.peers import peer_uid
from hvd_elastic.programs.processes import Process, descendants, environment, send
from hvd_elastic.programs.usable import usable_cores
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import MAX_LINE_BYTES, MessageDecoder, ProtocolError, encode

# Time between SIGTERM and SIGKILL for processes that a worker left behind.
_STRAY_GRACE_S = 2.0
_LOG_CHUNK_BYTES = 1 << 16
_OUTPUT_PAUSE_S = 0.05
_SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that somebody sends to a process, which does not send them to itself."""
_CALM_S = 5.0
"""Time from a worker's joining, or its end, until the template may start, so that it delays no
joining."""
_ACCEPT_TURNS = 20
"""Turns of the event loop in which a connection that waits is accepted and its first message read;
it takes some six."""
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_TENSORFLOW_LEVEL, _TENSORFLOW_ERRORS = "TF_CPP_MIN_LOG_LEVEL", "2"
"""Level of TensorFlow's messages; at 2 it prints errors, and neither warnings nor information."""
_MAPPED_BYTES, _KEPT_BYTES = 128 << 20, 256 << 20
"""Least size of a block of memory that is mapped by itself, and most memory at the end of the heap
that a worker keeps while it is free; see mallopt(3)."""
_HEAP_BYTES = 64 << 20
"""Size of the heaps of glibc for threads other than the main one. It gives one that is empty back
to the kernel unless so much has to stay free: the tensors of TensorFlow, whose threads allocate,
would cost 20,000 page faults in each step."""
_FUSED_BYTES = 4 << 20
"""Most bytes of small tensors that Horovod sums up together."""
_VISIBLE, _NVIDIA = "CUDA_VISIBLE_DEVICES", Path("/proc/driver/nvidia")
_SAME_NOTICE_S = 2.0
"""Time within which a signal that is sent to all processes of a host reaches all of them."""

_SECOND = (
    "a second process of slot {} has called init() of this package, and ends (exit status 1): the "
    "first one that does so trains, and a slot trains in one process. Leave init() out of other "
    "programs that the command or the script starts, and train in one"
)


class Workers:
    """Workers of one run on this host.

    Args:
        hello: first message of the leader; a new leader replaces it.
        interface: network interface for the ring; None lets Gloo and NCCL choose.
        tell: called with messages that must reach the leader.
        has_room: returns whether output is read on. Else workers wait where they print, so that
            one that prints without end fills no memory.

    Attributes:
        host_goes: whether the whole host, not just one worker, received a notice.
    """

    def __init__(
        self,
        hello: msg.LeaderHello,
        spool: Path,
        interface: str | None,
        tell: Callable[[msg.AgentToLeader], None],
        has_room: Callable[[], bool],
    ) -> None:
        self.hello = hello
        self._has_room = has_room
        self.host_goes = False
        self._spool = spool
        self._interface = interface
        self._tell = tell
        self._by_name: dict[str, Worker] = {}
        self._socket_name = f"hvd_elastic/{hello.run_id}/{secrets.token_hex(8)}"
        self._scratch, self._scratch_lock = make_scratch(hello.run_id, hello.host, hello.env)
        self._template = Template()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the socket that workers connect to."""
        self._server = await asyncio.start_unix_server(
            self._serve, path="\0" + self._socket_name, limit=MAX_LINE_BYTES
        )

    def close(self) -> None:
        """Remove the workers' temporary folder; all workers have ended."""
        self._template.close()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.close(self._scratch_lock)
        if made := self.__dict__.get("_compiler_cache"):
            with contextlib.suppress(OSError):  # there is compiled code in it
                Path(made).rmdir()

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Worker | None:
        """Return the living worker of that name, or None."""
        return self._by_name.get(name)

    def send_all(self, message: msg.AgentToWorker) -> None:
        for worker in self:
            worker.send(message)

    # -- start ------------------------------------------------------------------------------

    def start(self, order: msg.StartWorker) -> None:
        """Start a worker; if that fails, report it to the leader."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            start = WorkerStart.of(self.hello.command, self.hello.cwd, self._environment(order))
            fork = self._template.fork(start, write_end, self.hello.failure_timeout_s)
            pid = start.run(write_end) if fork is None else fork
        except (OSError, ValueError) as error:  # ValueError: a null byte
            os.close(read_end)
            self._tell(msg.WorkerNotStarted(order.worker, str(error)))
            return
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        worker = Worker(order, start, pid, fork is not None, read_end, Liveness(pid))
        self._by_name[order.worker] = worker
        loop = asyncio.get_running_loop()
        loop.add_reader(read_end, self._read_log, worker)
        if worker.is_fork:
            loop.call_later(self._template.start_limit_s, self._end_if_stuck, worker)

    def _end_if_stuck(self, worker: Worker) -> None:
        """Kill a fork that takes far longer to start than a worker that was started directly."""
        if self.get(worker.name) is worker and not worker.is_ready:
            self._template.failed("a worker that was forked from it did not become ready")
            self.kill(worker.name)

    def _warm_template_later(self) -> None:
        asyncio.get_running_loop().call_later(_CALM_S, self._warm_template)

    def _warm_template(self) -> None:
        """Start the template if all workers of this host train or are ready to."""
        if all(worker.is_ready for worker in self) and any(worker.is_member for worker in self):
            self._template.warm()

    def _visible_devices(self, devices: list[int]) -> dict[str, str]:
        """Return the variable that lets a worker's slot find its GPU, if the host has any."""
        if not devices or not _NVIDIA.exists():
            return {}
        offered = (self.hello.env.get(_VISIBLE) or os.environ.get(_VISIBLE, "")).split(",")
        # Numbers count the GPUs that the user has made visible.
        named = (
            offered if len(offered) > max(devices) else [str(n) for n in range(max(devices) + 1)]
        )
        return {_VISIBLE: ",".join(named[number] for number in devices)}

    @functools.cached_property
    def _compiler_cache(self) -> str:
        if _COMPILED in self.hello.env or _COMPILED in os.environ:
            return ""  # the user's choice holds
        folder, why = compiler_cache(self._scratch)
        if why:
            self._tell(
                msg.AgentWarning(
                    f"code compiled by torch.compile is not kept for later runs: {why}, and could "
                    f"replace it. Remove that folder, or set {_COMPILED} to one of your own"
                )
            )
        return str(folder)

    def _environment(self, order: msg.StartWorker) -> dict[str, str]:
        cores = str(max(1, usable_cores() // max(1, order.slots)))
        defaults = {
            # As torchrun does: if each worker used all cores, they would slow each other down.
            "OMP_NUM_THREADS": cores,
            "TF_NUM_INTRAOP_THREADS": cores,
            # Else memory that a step frees goes back to the kernel, and is cleared for the next.
            "MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
            "MALLOC_TOP_PAD_": str(_HEAP_BYTES),
            # Else Horovod copies buckets of gradients that wait for the ring into a larger one.
            "HOROVOD_FUSION_THRESHOLD": str(_FUSED_BYTES),
            # TensorFlow would print what it was compiled for, for every rank.
            _TENSORFLOW_LEVEL: _TENSORFLOW_ERRORS,
            # The leader reports why a ring broke; Horovod would print errors for every rank.
            "HOROVOD_LOG_LEVEL": "fatal",
            # A worker that is killed by a signal then prints its Python stack.
            "PYTHONFAULTHANDLER": "1",
            _COMPILED: self._compiler_cache,
        }
        if self._interface:
            # NCCL reads this only once in a process; without it, it tries every interface.
            defaults["NCCL_SOCKET_IFNAME"] = f"={self._interface}"
        return {
            **defaults,
            **os.environ,
            **self.hello.env,
            "PWD": self.hello.cwd,
            "TMPDIR": str(self._scratch),
            "PYTHONUNBUFFERED": "1",
            "HVD_ELASTIC_RUN_ID": self.hello.run_id,
            "HVD_ELASTIC_HOST": self.hello.host,
            "HVD_ELASTIC_AGENT": self._socket_name,
            "HVD_ELASTIC_SPOOL": str(self._spool),
            "HVD_ELASTIC_OPTIONS": encode(self.hello.options).decode().strip(),
            **({"HVD_ELASTIC_READS": "1"} if order.reads else {}),
            **self._visible_devices(order.devices),
            # Those that differ between the workers of a host; see WorkerStart.
            "HVD_ELASTIC_LOCAL_RANK": str(order.local_rank),
            "HVD_ELASTIC_WORKER": order.worker,
        }

    def join(self, announcement: msg.Announcement, here: Sequence[Member], store_port: int) -> None:
        """Send the announcement to the members of a generation on this host."""
        for member in here:
            if worker := self.get(member.worker):
                size = len(announcement.order.members)
                variables = self._ring_variables(member, size, store_port)
                worker.send(msg.Join(announcement, variables))

    def _ring_variables(self, member: Member, size: int, store_port: int) -> dict[str, str]:
        """Return Horovod's environment variables for one member of a generation of ``size``."""
        hierarchical = any("HIERARCHICAL" in name for name in self.hello.env)
        values = {
            "RANK": member.rank,
            "SIZE": size,
            "LOCAL_RANK": member.local_rank,
            "LOCAL_SIZE": member.local_size,
            "CROSS_RANK": member.cross_rank,
            "CROSS_SIZE": member.cross_size,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            # Only hierarchical operations need separate rings within a host and across hosts.
            "GLOO_SINGLE_CONTEXT": 0 if hierarchical else 1,
            # When a rank fails, NCCL operations in progress are aborted instead of waited for.
            "NCCL_ELASTIC": 1,
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": store_port,
            "HOSTNAME": self.hello.host,
        }
        if self._interface:
            values["GLOO_IFACE"] = self._interface
        return {f"HOROVOD_{name}": str(value) for name, value in values.items()}

    # -- messages ---------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if peer_uid(writer.get_extra_info("socket")) != os.getuid():
                return
            stranger: MessageDecoder[Any] = MessageDecoder(msg.WorkerToAgent, "a process")
            hello = stranger.decode(await read_line(reader, "a process"))
            worker = self.get(hello.worker) if isinstance(hello, msg.WorkerHello) else None
            if worker is None:
                return
            if worker.connection is not None:
                self._tell(msg.AgentWarning(_SECOND.format(worker.order.local_rank)))
                return
            worker.connection = asyncio.current_task()
            with writer.get_extra_info("socket").dup() as worker.to_it:
                worker.send_unsent()
                try:
                    await self._listen_to(worker, reader)
                finally:
                    asyncio.get_running_loop().remove_writer(worker.to_it)
                    worker.to_it = None
        except (ProtocolError, OSError):
            pass  # an unknown process, or a dying worker, whose end is reported anyway
        except asyncio.CancelledError:
            pass  # this agent ends; Python 3.11 and older would print a traceback
        finally:
            writer.close()

    async def _listen_to(self, worker: Worker, reader: asyncio.StreamReader) -> None:
        name = f"the worker of slot {worker.order.local_rank}"
        messages: MessageDecoder[Any] = MessageDecoder(msg.WorkerToAgent, name)
        try:
            while line := await read_line(reader, name):
                worker.liveness.beat()
                self._take_from(worker, messages.decode(line))
        except ProtocolError as error:
            # The worker ends because it loses its agent.
            self._tell(msg.AgentWarning(f"{error}. This worker is given up"))

    def _take_from(self, worker: Worker, message: msg.WorkerToAgent) -> None:
        match message:
            case msg.WorkerBeat(activity=activity, outlived=outlived):
                worker.activity = activity
                if outlived and not worker.outlived:
                    worker.outlived = outlived
                    loop = asyncio.get_running_loop()
                    loop.call_later(_SAME_NOTICE_S, self._end_if_meant_alone, worker)
            case msg.WorkerHello():
                pass  # it has connected before
            case msg.CheckpointAnswered():
                worker.has_answered = True
            case msg.Imported(modules=modules):
                took_s = time.monotonic() - worker.started_at
                self._template.learn(worker.start, modules, took_s, is_fork=worker.is_fork)
            case msg.ScriptRaised() if worker.is_fork and not worker.is_ready:
                pass  # it is started again, without the template
            case _:
                if isinstance(message, msg.Ready):
                    worker.is_ready = True
                if isinstance(message, (msg.Joined, msg.Finished)):
                    worker.is_member = isinstance(message, msg.Joined)
                    self._warm_template_later()
                self._tell(msg.WorkerSaid(worker.name, message))

    def _end_if_meant_alone(self, worker: Worker) -> None:
        """End a worker that survived SIGTERM, unless the whole host received that notice."""
        if not self.host_goes:
            worker.was_meant = True
            worker.send(msg.End())

    def _read_log(self, worker: Worker) -> None:
        if self._has_room():
            self._forward_log(worker)
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.log)
        loop.call_later(_OUTPUT_PAUSE_S, self._read_on, worker)

    def _read_on(self, worker: Worker) -> None:
        if self.get(worker.name) is worker:
            asyncio.get_running_loop().add_reader(worker.log, self._read_log, worker)

    def _forward_log(self, worker: Worker) -> bool:
        """Send the worker's output to the leader; return whether there was any."""
        try:
            data = os.read(worker.log, _LOG_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(worker.log)
            return False
        if not worker.is_ready:
            data = without_early_messages(data, worker.start.variables[_TENSORFLOW_LEVEL])
        self._tell_log(worker, worker.text.decode(data))
        return True

    def _tell_log(self, worker: Worker, text: str) -> None:
        if text:
            self._tell(msg.Log(worker.name, text))

    # -- end --------------------------------------------------------------------------------

    def with_pid(self, pid: int) -> Worker | None:
        """Return the worker with this process id."""
        return next((worker for worker in self if worker.pid == pid), None)

    async def report_end(self, worker: Worker, code: int, *, out_of_memory: bool) -> None:
        """Report a worker's end to the leader, then end the processes that it left behind.

        Args:
            code: its exit status; below 0: the signal that ended it.
        """
        # Its last messages and output must be sent before the report of its end. All that it said
        # has arrived, but on a busy host its connection may not be accepted yet; the next worker
        # of that name would be taken for it then.
        for _ in range(_ACCEPT_TURNS):
            if worker.connection is not None:
                break
            await asyncio.sleep(0)
        for _ in range(64):
            if worker.connection is None or worker.connection.done():
                break
            await asyncio.sleep(0.005)
        while self._forward_log(worker):
            pass
        self._tell_log(worker, worker.text.decode(b"", final=True))
        asyncio.get_running_loop().remove_reader(worker.log)
        os.close(worker.log)
        del self._by_name[worker.name]
        if worker.is_fork and not worker.is_ready and code and -code not in _SENT_SIGNALS:
            self._template.failed("a worker that was forked from it failed before it was ready")
            self.start(worker.order)
            return
        if worker.was_meant and code == -signal.SIGKILL:
            # Report the signal that somebody sent, not the kill that followed.
            code = -worker.outlived
        status, number = (code, None) if code >= 0 else (None, -code)
        self._tell(msg.WorkerEnded(worker.name, status, number, out_of_memory))
        self._warm_template_later()  # this one may have been all that it waited for
        for stray in _strays_of(worker):
            send(stray, signal.SIGTERM)
        await asyncio.sleep(_STRAY_GRACE_S)
        for stray in _strays_of(worker):
            send(stray, signal.SIGKILL)

    def kill(self, name: str) -> None:
        """Kill a worker and its process group."""
        if worker := self.get(name):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def _strays_of(worker: Worker) -> list[Process]:
    """Return processes that an ended worker left behind: in its session, or with its variables."""
    return [
        process
        for process in descendants()
        if process.session == worker.pid
        or environment(process.pid).get("HVD_ELASTIC_WORKER") == worker.name
    ]
