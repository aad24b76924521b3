"""The worker's connection to its agent; shared by every training framework.

One thread reads instructions and another sends heartbeats; the training thread asks what is pending
and waits for the next instruction when it needs one. When the agent is gone the worker ends itself:
nobody is left who could tell it what to do.

A machine that is shut down sends SIGTERM and SIGHUP to all its processes. The agent takes that as a
notice and has the state saved, for which the worker has to outlive these signals, unless its script
handles them. The worker tells the agent, which ends a worker that was the only one to get them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from hvd_elastic.control.progress import Activity
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError, encode

__all__ = ["AgentLink", "worker_options"]

log = logging.getLogger(__name__)

_GETENT_UNKNOWN = 2  # its exit status where a name is not known
_NOTICES = (signal.SIGTERM, signal.SIGHUP)


def worker_options() -> msg.WorkerOptions:
    """Return what the leader decided for all workers; the defaults where there is no leader."""
    text = os.environ.get("HVD_ELASTIC_OPTIONS", "{}")
    return msgspec.json.decode(text, type=msg.WorkerOptions)


class AgentLink:
    """Connection of one worker to its agent.

    Args:
        socket_name: of the agent's socket, in the abstract namespace.
        worker: name of this worker.
        on_abort: called from the reading thread when a generation is called off; it must make
            the collectives of that generation fail.
        activity: called from the heartbeat's thread: what the training thread is doing.
    """

    def __init__(
        self,
        socket_name: str,
        worker: str,
        on_abort: Callable[[int], None],
        activity: Callable[[], Activity] = Activity,
    ) -> None:
        self.worker = worker
        self._on_abort = on_abort
        self._activity = activity
        self._beat_s = worker_options().heartbeat_s
        self._pending: msg.Instruction | None = None
        self._checkpoint_wanted = False
        self.recorded_step = -1
        """Up to this step the leader has what was read; for an audited run."""
        self._aborted = 0
        self._change = threading.Condition()
        self._send_lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + socket_name)
        self._owner_pid = os.getpid()
        self._outlived = 0
        self._handler = self._note_signal
        self._outlive_notices()
        self.send(msg.WorkerHello(worker, os.getpid()))
        threading.Thread(target=self._read, name="hvd_elastic-agent", daemon=True).start()
        threading.Thread(target=self._beat, name="hvd_elastic-beat", daemon=True).start()
        if os.environ.get("HVD_ELASTIC_LOCAL_RANK") == "0":
            threading.Thread(
                target=self._check_own_name, name="hvd_elastic-name", daemon=True
            ).start()

    @classmethod
    def from_environment(
        cls, on_abort: Callable[[int], None], activity: Callable[[], Activity] = Activity
    ) -> AgentLink:
        """The link of the worker that the agent started."""
        name, worker = os.environ["HVD_ELASTIC_AGENT"], os.environ["HVD_ELASTIC_WORKER"]
        return cls(name, worker, on_abort, activity)

    def send(self, message: msg.WorkerToAgent) -> None:
        """Send to the agent; does nothing in a forked child, such as a data loader's worker."""
        if os.getpid() != self._owner_pid:
            return
        with self._send_lock:
            self._socket.sendall(encode(message))

    def pending(self, generation: int) -> bool:
        """Whether the leader wants something else than staying in ``generation``."""
        instruction = self._pending
        return instruction is not None and not (
            isinstance(instruction, msg.Join) and instruction.announcement.generation <= generation
        )

    def aborted(self, generation: int) -> bool:
        """Whether ``generation`` was called off."""
        return generation <= self._aborted

    def wait(self, generation: int) -> msg.Instruction | None:
        """Block until there is an instruction beyond ``generation``, and return it.

        None: a checkpoint is asked for meanwhile; see :meth:`take_checkpoint_request`.
        """
        with self._change:
            self._change.wait_for(lambda: self._checkpoint_wanted or self.pending(generation))
            if self._checkpoint_wanted:
                return None
            instruction, self._pending = self._pending, None
            assert instruction is not None
            return instruction

    def take_checkpoint_request(self) -> bool:
        """Whether the leader asked for a checkpoint since the last call."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def give_back_checkpoint_request(self) -> None:
        """It was taken, and nothing came of it."""
        self._checkpoint_wanted = True

    def _outlive_notices(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NOTICES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handler)
        # A forked child (a data loader's worker) is ended with SIGTERM, perhaps while it begins.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICES),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOTICES),
            after_in_child=self._heed_notices,
        )

    def _heed_notices(self) -> None:
        for number in _NOTICES:
            if signal.getsignal(number) is self._handler:
                with contextlib.suppress(ValueError):
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOTICES)

    def _note_signal(self, number: int, frame: object) -> None:
        self._outlived = (
            self._outlived or number
        )  # the next beat says so: the lock may be held right here

    def _beat(self) -> None:
        stop = threading.Event()
        while not stop.wait(self._beat_s):
            try:
                self.send(msg.WorkerBeat(self._activity(), self._outlived))
            except OSError:
                return

    def _check_own_name(self) -> None:
        """Warn, once for each host, if it does not know its own name; that may take seconds."""
        name = socket.gethostname()
        # In a process of its own: a fork of this one during a look-up would leave its child locks.
        # By a path and with close_fds off it is spawned without a pipe, which a data loader that
        # forks meanwhile would hold open.
        command = [shutil.which("getent") or "getent", "ahosts", name]
        null = subprocess.DEVNULL
        try:
            done = subprocess.run(command, stdout=null, stderr=null, timeout=60, close_fds=False)
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode == _GETENT_UNKNOWN:
            message = (
                f"this host does not know its own name {name!r}, as Gloo and MPI may need it; add "
                f"a line with its address and {name} to /etc/hosts there"
            )
            with contextlib.suppress(OSError):
                self.send(msg.WorkerWarning(message))

    def _read(self) -> None:
        lines = LineSplitter("the agent")
        messages: MessageDecoder[Any] = MessageDecoder(msg.AgentToWorker, "the agent")
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                os._exit(1)  # the agent is gone; it would have ended this process
            try:
                for line in lines.feed(data):
                    self._take(messages.decode(line))
            except ProtocolError as error:
                log.error("%s. This worker ends", error)
                os._exit(1)

    def _take(self, message: msg.AgentToWorker) -> None:
        match message:
            case msg.Abort(generation=generation):
                with self._change:
                    self._aborted = max(self._aborted, generation)
                self._on_abort(generation)
            case msg.SaveState():
                with self._change:
                    self._checkpoint_wanted = True
                    self._change.notify_all()
            case msg.End():
                if signal.getsignal(signal.SIGTERM) is self._handler:
                    os.kill(os.getpid(), signal.SIGKILL)
            case msg.Recorded(step=step):
                self.recorded_step = step
            case msg.Join() | msg.Hold() | msg.Leave():
                with self._change:
                    self._pending = message
                    self._change.notify_all()
