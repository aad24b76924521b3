"""One worker process of a host: messages, first output, signs of life, and temporary files."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from hvd_elastic.agent.worker_start import WorkerStart
from hvd_elastic.control.progress import Activity
from hvd_elastic.own_files import make_private, who_else_writes
from hvd_elastic.programs.clear_left import alone_in, scratch_prefix
from hvd_elastic.programs.processes import read_process
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode

_BEAT_DUE_S = 1.5  # a little more than the longest interval of heartbeats
# Interval at which the processor time is read.
_LOOK_EVERY_S = 1.0
# Threads that wait with a timeout keep waking up: a deadlocked process uses up to 0.5 %.
_BUSY_SHARE = 0.02
# States of a process that is stopped by a signal or a debugger.
_STOPPED = ("T", "t")
_DECODER = codecs.getincrementaldecoder("utf-8")
_KINDS = "IWE"
"""First letters of messages with information, warnings and errors, in the order of the levels."""
_MESSAGE = (
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\) .*"
    r"|[%s]0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] .*)\n"
)


class Liveness:
    """Signs of life of one process.

    Code that holds Python's global interpreter lock prevents heartbeats, but it uses the processor.
    A process that is frozen, or whose threads wait for each other, does not.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._beat = time.monotonic()
        self._busy = self._beat
        self._used_s = 0.0
        self._looked = self._beat

    def beat(self) -> None:
        """Record a message of the process."""
        self._beat = time.monotonic()

    def discount(self, seconds: float) -> None:
        """Subtract a time in which the agent itself was suspended [s]."""
        self._beat += seconds

    def silent_s(self, now: float) -> float:
        """Return the time without a heartbeat and, once one is due, without real work [s]."""
        if now - self._looked >= _LOOK_EVERY_S:
            self._check_silence(now)
        if now - self._beat < _BEAT_DUE_S:
            return 0.0
        return now - max(self._beat, self._busy)

    def _check_silence(self, now: float) -> None:
        process = read_process(self._pid)
        if process is not None:
            share = (process.cpu_s - self._used_s) / (now - self._looked)
            if share >= _BUSY_SHARE and process.state not in _STOPPED:
                self._busy = now
            self._used_s, self._looked = process.cpu_s, now


@dataclass
class Worker:
    """One worker process of this host."""

    order: msg.StartWorker
    start: WorkerStart
    pid: int
    is_fork: bool
    log: int
    liveness: Liveness
    activity: Activity = field(default_factory=Activity)
    started_at: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    """Whether it has reached the training function."""
    is_member: bool = False
    """Whether it has joined a generation and has not finished its training."""
    has_answered: bool = True
    """Whether it has answered the last request for a checkpoint."""
    outlived: int = 0
    """First SIGTERM or SIGHUP that it received and survived; 0 for none."""
    was_meant: bool = False
    """Whether it was ended because the signal was for it alone."""
    connection: asyncio.Task[None] | None = None
    """Receives its messages until its end; None: it has not connected."""
    text: codecs.IncrementalDecoder = field(default_factory=lambda: _DECODER("replace"))
    """Decodes its output; keeps the begin of a character that two reads divide."""
    to_it: socket.socket | None = None
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        """Its name in the run."""
        return self.order.worker

    def silent_s(self, now: float) -> float:
        """Return the time without a sign of life [s]."""
        # Until it connects, its interpreter is still starting.
        return 0.0 if self.connection is None else self.liveness.silent_s(now)

    def send(self, message: msg.AgentToWorker) -> None:
        """Send a message, now or as soon as the worker has connected."""
        self.unsent += encode(message)
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send as much as the worker takes now, and the rest when it takes more.

        A stream that could not be written to would not be read any more either: a message to a
        worker that has just ended would cost its last words. So this does not use the stream.
        """
        if self.to_it is None:
            return
        try:
            del self.unsent[: self.to_it.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()
        loop = asyncio.get_running_loop()
        if self.unsent:
            loop.add_writer(self.to_it, self.send_unsent)
        else:
            loop.remove_writer(self.to_it)


def without_early_messages(data: bytes, level: str) -> bytes:
    r"""Return the output of a worker that starts, without messages of TensorFlow below a level.

    ``TF_CPP_MIN_LOG_LEVEL`` is read while a library of TensorFlow is loaded, after other parts of
    the same library (oneDNN's) have printed messages: no value of the variable keeps these back.

    Args:
        data: some of the output. A message is whole in it, since it is written at once.
        level: value of ``TF_CPP_MIN_LOG_LEVEL``: number of kinds that are not wanted.

    >>> early = b"I0000 00:00:17956.49  22540 port.cc:153] oneDNN custom operations are on.\n"
    >>> without_early_messages(early + b"step 1\n", "2")
    b'step 1\n'
    >>> without_early_messages(early, "0") == early
    True
    """
    unwanted = _KINDS[: int(level)] if level.isdecimal() else ""
    if not unwanted:
        return data
    return re.sub((_MESSAGE % unwanted).encode(), b"", data, flags=re.MULTILINE)


def make_scratch(run_id: str, host: str, environment: Mapping[str, str]) -> tuple[Path, int]:
    """Create the folder inside ``TMPDIR`` of ``environment`` if that is writable, or else of ours.

    Folders that killed agents of the same run and host left are removed; not those of agents that
    live: their run may have the same name and another home, or another leader machine.

    Returns:
        The folder, and an open file that keeps it locked until it is closed or this process ends.
    """
    base = _base(environment)
    prefix = scratch_prefix(run_id, host)
    for old in base.glob(f"{prefix}*"):
        with alone_in(old) as unused:
            if unused:
                shutil.rmtree(old, ignore_errors=True)
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if made.exists():  # else another agent has removed it before it was locked
                return made, lock
            os.close(lock)


def compiler_cache(scratch: Path) -> tuple[Path, str]:
    """Return the folder in which PyTorch keeps compiled code, and why it is not that of later runs.

    It runs what it finds there, so it is a folder below the user's cache that nobody else can write
    to; where that is not so (then the reason is not ""), or cannot be, it is inside ``scratch``.
    """
    # One for each host, since compiled code is for one kind of processor and hosts may share it.
    name = f"torchinductor-{socket.gethostname()}"
    cache = Path(platformdirs.user_cache_dir("hvd_elastic"))
    try:
        if not cache.is_absolute():  # a user without a home folder, as in some containers
            return scratch / name, ""
        folder = make_private(cache / name)
        why = who_else_writes(folder)
    except OSError:  # such as a home folder that is read-only
        return scratch / name, ""
    return (scratch / name, why) if why else (folder, "")


def _base(environment: Mapping[str, str]) -> Path:
    wanted = environment.get("TMPDIR")
    if wanted and os.access(wanted, os.W_OK | os.X_OK):
        return Path(wanted)
    return Path(tempfile.gettempdir())
