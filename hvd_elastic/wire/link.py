"""A worker's side of the talk with its agent; shared by every training framework.

One thread reads instructions and another sends a heartbeat; the training thread asks what is
pending and waits for the next instruction when it needs one. When the agent is gone the worker
ends itself: nobody is left who could tell it what to do.

A machine that is shut down sends SIGTERM and SIGHUP to all its processes. The agent takes that for
a notice and has the state brought to safety, for which the worker has to outlive it; so does one
whose script does not handle these signals. The agent is told, and ends a worker that was meant
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvd_elastic.wire.framing import Message, decode, encode, split_lines

__all__ = ["AgentLink", "Instruction"]

_BEAT_S = 1.0
_GETENT_UNKNOWN = 2  # its exit status where a name is not known
_NOTICES = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Instruction:
    """What the leader wants of this worker next.

    Attributes:
        action: ``join`` a generation, ``hold`` (stop and wait, keeping the state) or ``leave``.
        generation: number of the generation to join; 0 otherwise.
        env: Horovod's rank variables for it.
        root_rank: whose state everybody takes.
        restore: checkpoint that the root loads first; None for none.
        checkpoint: path of the checkpoint that ``restore`` is a copy of, for messages.
        life: tells the generations that one leader counts from those of another.
    """

    action: Literal["join", "hold", "leave"]
    generation: int = 0
    env: Mapping[str, str] | None = None
    root_rank: int = 0
    restore: str | None = None
    checkpoint: str | None = None
    life: str = ""


class AgentLink:
    """Connection of one worker to its agent.

    Args:
        on_abort: called from the reading thread when a generation is called off; it must make
            the collectives of that generation fail.
        activity: called from the heartbeat's thread: what the training thread is at, see
            :class:`hvd_elastic.control.progress.Activity`.
    """

    def __init__(
        self,
        socket_name: str,
        worker: str,
        on_abort: Callable[[int], None],
        activity: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.worker = worker
        self._on_abort = on_abort
        self._activity = activity
        self._beat_s = float(self.options().get("heartbeat_s", _BEAT_S))
        self._pending: Instruction | None = None
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
        self.send({"kind": "hello", "worker": worker, "pid": os.getpid()})
        threading.Thread(target=self._read, name="hvd_elastic-agent", daemon=True).start()
        threading.Thread(target=self._beat, name="hvd_elastic-beat", daemon=True).start()
        if os.environ.get("HVD_ELASTIC_LOCAL_RANK") == "0":
            threading.Thread(
                target=self._check_own_name, name="hvd_elastic-name", daemon=True
            ).start()

    @classmethod
    def from_environment(
        cls, on_abort: Callable[[int], None], activity: Callable[[], Mapping[str, Any]] = dict
    ) -> AgentLink:
        """The link of the worker that the agent started."""
        name, worker = os.environ["HVD_ELASTIC_AGENT"], os.environ["HVD_ELASTIC_WORKER"]
        return cls(name, worker, on_abort, activity)

    @staticmethod
    def options() -> dict[str, Any]:
        """What the leader decided for all workers: audit, checkpoint interval and so on."""
        options: dict[str, Any] = json.loads(os.environ.get("HVD_ELASTIC_OPTIONS", "{}"))
        return options

    def send(self, message: Message) -> None:
        """Send to the agent; silently nothing in a forked child (a data loader's worker)."""
        if os.getpid() != self._owner_pid:
            return
        with self._send_lock:
            self._socket.sendall(encode(message))

    def pending(self, generation: int) -> bool:
        """Whether the leader wants something else than staying in ``generation``."""
        instruction = self._pending
        return instruction is not None and not (
            instruction.action == "join" and instruction.generation <= generation
        )

    def aborted(self, generation: int) -> bool:
        """Whether ``generation`` was called off."""
        return generation <= self._aborted

    def wait(self, generation: int) -> Instruction | None:
        """Block until there is an instruction beyond ``generation``, and take it.

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
            said = {"outlived": self._outlived} if self._outlived else {}
            try:
                self.send({"kind": "beat", **self._activity(), **said})
            except OSError:
                return

    def _check_own_name(self) -> None:
        """Warn, once for each host, if it does not know its own name; that may take seconds."""
        name = socket.gethostname()
        # In a process of its own: a fork of this one during a look-up would leave its child locks.
        try:
            done = subprocess.run(["getent", "ahosts", name], capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode == _GETENT_UNKNOWN:
            message = (
                f"this host does not know its own name {name!r}, as Gloo and MPI may need it; add "
                f"a line with its address and {name} to /etc/hosts there"
            )
            with contextlib.suppress(OSError):
                self.send({"kind": "warning", "message": message})

    def _read(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                os._exit(1)  # the agent is gone; it would have ended this process
            for line in split_lines(buffer, data):
                self._take(decode(line))

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "abort":
            with self._change:
                self._aborted = max(self._aborted, message["generation"])
            self._on_abort(message["generation"])
            return
        if kind == "checkpoint":
            with self._change:
                self._checkpoint_wanted = True
                self._change.notify_all()
            return
        if kind == "end":
            if signal.getsignal(signal.SIGTERM) is self._handler:
                os.kill(os.getpid(), signal.SIGKILL)
            return
        if kind == "recorded":
            self.recorded_step = message["step"]
            return
        fields = {name: value for name, value in message.items() if name != "kind"}
        with self._change:
            self._pending = Instruction(action=kind, **fields)
            self._change.notify_all()
