"""Connect a worker to its agent, for every training framework.

One thread reads instructions and another sends heartbeats. The training thread checks whether an
instruction is pending and waits for the next one when it needs it. If the agent is gone, the worker
ends itself.

A machine that shuts down sends SIGTERM and SIGHUP to all processes. The agent takes them as a
preemption notice and has the state saved, so workers ignore these signals unless their script
handles them. A worker reports an ignored signal to its agent, which ends the worker if the agent
itself got no signal.
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
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hvd_elastic.control.progress import Activity
from hvd_elastic.programs.peers import connect_own
from hvd_elastic.run_events import Warned
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError, encode

log = logging.getLogger(__name__)

_GETENT_UNKNOWN = 2
"""Exit status of ``getent`` for an unknown name."""
_NOTICES = (signal.SIGTERM, signal.SIGHUP)
_THREADS_END_S = 10.0
"""Time after the end of the script from which threads that continue are told of [s]."""
_ASK_AGAIN_S = 60.0
"""Time without an answer after which a saved file is asked for again [s]."""
_SIGNALS_S = 1.0
"""Time between two looks for signals while the main thread waits [s]. One that another thread got,
or that came just before the wait, does not end it, and is handled by the main thread alone."""


def worker_options() -> msg.WorkerOptions:
    """Return the leader's options for all workers; the defaults if there is no leader."""
    text = os.environ.get("HVD_ELASTIC_OPTIONS", "{}")
    return msgspec.json.decode(text, type=msg.WorkerOptions)


class AgentLink:
    """Connection of one worker to its agent.

    Args:
        socket_name: name of the agent's socket in the abstract namespace.
        worker: name of this worker.
        on_abort: function that makes the collectives of a generation fail; called by the reading
            thread when the generation is aborted.
        activity: function that returns what the training thread is doing; called by the thread
            that sends heartbeats.

    Attributes:
        recorded_step: last step whose examples the leader has recorded, for an audited run.
        input: processes of input hosts that read for the ranks; None: never heard of any.

    Raises:
        StrangerError: the agent is gone, and another user's process holds its name.
        OSError: the agent is gone.
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
        self.input: msg.UseInput | None = None
        self.task: msg.ServeInput | None = None
        self._brought: msg.SavedBrought | None = None
        self._aborted = 0
        self._change = threading.Condition()
        self._send_lock = threading.Lock()
        self._socket = connect_own("\0" + socket_name)
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
        """Connect to the agent that started this process."""
        name, worker = os.environ["HVD_ELASTIC_AGENT"], os.environ["HVD_ELASTIC_WORKER"]
        return cls(name, worker, on_abort, activity)

    def send(self, message: msg.WorkerToAgent) -> None:
        """Send a message to the agent; a forked child, such as a data loader's worker, does not."""
        if os.getpid() != self._owner_pid:
            return
        with self._send_lock:
            self._socket.sendall(encode(message))

    def pending(self, generation: int) -> bool:
        """Return whether there is an instruction beyond ``generation``."""
        instruction = self._pending
        return instruction is not None and not (
            isinstance(instruction, msg.Join) and instruction.announcement.generation <= generation
        )

    @property
    def is_to_leave(self) -> bool:
        """Return whether the instruction that waits is to leave the run."""
        return isinstance(self._pending, msg.Leave)

    def aborted(self, generation: int) -> bool:
        return generation <= self._aborted

    def wait(self, generation: int) -> msg.Instruction | None:
        """Block until there is an instruction beyond ``generation``, and return it.

        Returns:
            The instruction; None if a checkpoint is requested, see :meth:`take_checkpoint_request`.
        """
        with self._change:
            while not self._change.wait_for(
                lambda: self._checkpoint_wanted or self.pending(generation), _SIGNALS_S
            ):
                pass
            if self._checkpoint_wanted:
                return None
            instruction, self._pending = self._pending, None
            assert instruction is not None
            return instruction

    def wait_for_task(self) -> msg.ServeInput | None:
        """Block until this worker is told how to read for the ranks; None: it is to leave."""
        with self._change:
            while not self._change.wait_for(
                lambda: self.task is not None or self.pending(0), _SIGNALS_S
            ):
                pass
            return None if self.pending(0) else self.task

    def bring_saved(self, name: str) -> msg.SavedBrought:
        """Have the leader bring the newest saved file of this name to this host; blocks."""
        with self._change:
            while True:
                self._brought = None
                self.send(msg.SavedWanted(name))  # again, as the next leader may not know of it
                ended = time.monotonic() + _ASK_AGAIN_S
                while time.monotonic() < ended:
                    self._change.wait(_SIGNALS_S)
                    if (brought := self._brought) is not None and brought.name == name:
                        return brought

    def take_checkpoint_request(self) -> bool:
        """Return whether a checkpoint was requested since the last call, and clear the request."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def give_back_checkpoint_request(self) -> None:
        """Restore a request that was taken and not fulfilled."""
        self._checkpoint_wanted = True

    def _outlive_notices(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NOTICES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handler)
        # A forked child (a data loader's worker) must end by SIGTERM, even while it starts.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICES),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOTICES),
            after_in_child=self._restore_signals,
        )

    def _restore_signals(self) -> None:
        for number in _NOTICES:
            if signal.getsignal(number) is self._handler:
                with contextlib.suppress(ValueError):
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOTICES)

    def _note_signal(self, number: int, frame: object) -> None:
        # Reported by the next heartbeat; sending here could deadlock on the lock.
        self._outlived = self._outlived or number

    def _beat(self) -> None:
        stop = threading.Event()
        main, ended = threading.main_thread(), 0.0
        while not stop.wait(self._beat_s):
            try:
                self.send(msg.WorkerBeat(self._activity(), self._outlived))
                before, ended = ended, 0.0 if main.is_alive() else ended + self._beat_s
                if before < _THREADS_END_S <= ended:
                    self._warn_of_threads()
            except OSError:
                return

    def _warn_of_threads(self) -> None:
        """Tell which threads keep this process from ending, although the script has."""
        others = [each for each in threading.enumerate() if each.is_alive() and not each.daemon]
        names = ", ".join(each.name for each in others)
        if names:
            self.send(
                Warned(
                    f"the script has ended, and Python waits for its threads ({names}): "
                    "have them end, or start them with daemon=True"
                )
            )

    def _check_own_name(self) -> None:
        """Warn if the host cannot look up its own name; the look-up may take seconds."""
        name = socket.gethostname()
        # The look-up runs in another process: if this one forked during it, the child would inherit
        # held locks. With a path and without close_fds, Popen uses posix_spawn and no pipe, which a
        # child forked meanwhile would hold open.
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
                self.send(Warned(message))

    def _read(self) -> None:
        try:
            self._read_all()
        except Exception:  # else this worker would wait forever for what the agent says
            log.exception("messages of the agent cannot be read. This worker ends")
            os._exit(1)

    def _read_all(self) -> None:
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
                    self._take_message(messages.decode(line))
            except ProtocolError as error:
                log.error("%s. This worker ends", error)
                os._exit(1)

    def _take_message(self, message: msg.AgentToWorker) -> None:
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
            case msg.ServeInput():
                with self._change:
                    self.task = message
                    self._change.notify_all()
            case msg.UseInput():
                self.input = message
            case msg.SavedBrought():
                with self._change:
                    self._brought = message
                    self._change.notify_all()
            case msg.Recorded(step=step):
                self.recorded_step = step
            case msg.Join() | msg.Hold() | msg.Leave():
                with self._change:
                    self._pending = message
                    self._change.notify_all()
