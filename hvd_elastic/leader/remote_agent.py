"""The leader's connection to the agent of one host: starts it, and exchanges messages with it.

Everything that may block runs in threads of the connection; results are posted to the leader's
loop.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic import __version__
from hvd_elastic.control.events import AgentFailed
from hvd_elastic.control.progress import Activity
from hvd_elastic.errors import HostKeyError, HostUnknownError, HvdElasticError, SshError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import Connection
from hvd_elastic.hosts.transfer import receive_file, send_file
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError, encode

_DISCARD_TIMEOUT_S = 10.0
"""Time limit for removing a folder of a host [s]; deleting many files may take seconds."""

_AT_ONCE_BYTES = 4096
"""Longest line that is written at once where there is room: a pipe has room for so much or none."""
# The last line of Python's traceback when a host lacks a package.
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: .*'(?P<name>[\w.]+)'")


FromAgent = msg.AgentToLeader | AgentFailed
Post = Callable[["AgentConnection", FromAgent], None]
Connect = Callable[[Host], Connection]


class Sender:
    """Sends messages to all agents in one thread, which starts with the first.

    With a thread for each, a message to all would wake hundreds that wait for each other.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[AgentConnection, bytes | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, agent: AgentConnection, line: bytes | None) -> None:
        """Send a line to an agent; None: it is the end. Does not wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="to agents", daemon=True)
            self._thread.start()
        self._lines.put((agent, line))

    def _run(self) -> None:
        while True:
            agent, line = self._lines.get()
            agent.pass_on(line)


class _Input:
    """The input of an agent: takes lines in order, those that have to wait with a thread."""

    def __init__(self) -> None:
        self._stdin: Any = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self.waiting = 0
        """Number of lines that are left to the thread and not written yet."""

    def open(self, stdin: Any, first: bytes, host: str) -> None:
        """Begin to write to the process, after lines that came before with ``first``."""
        self._stdin = stdin
        self.put(first)
        threading.Thread(target=self._run, name=f"to agent of {host}", daemon=True).start()

    def pass_on(self, line: bytes | None) -> None:
        """Write a line if that cannot block, else leave it to the thread; called by one thread."""
        is_short = line is not None and len(line) <= _AT_ONCE_BYTES
        if line and is_short and self._stdin and not self.waiting and self._stdin.is_ready():
            self._write(line)
        else:
            self.put(line)

    def put(self, line: bytes | None) -> None:
        """Leave a line to the thread; None: it ends."""
        with self._counting:
            self.waiting += 1
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            with self._counting:
                self.waiting -= 1

    def _write(self, line: bytes) -> None:
        # If it fails, the thread that reads fails as well, and the connection reports it.
        with contextlib.suppress(OSError, HvdElasticError):
            self._stdin.write(line)


class AgentConnection:
    """One attempt to start the agent of one host, and the connection to it.

    Every message of the agent is posted, except heartbeats, which would wake the leader's loop some
    hundred times a second; its hello only if its versions match the leader's.
    ``AgentFailed`` is posted once, when the agent could not be started or has ended. An agent that
    sends an invalid message counts as ended.

    Args:
        host: host of the agent.
        connect: returns a connection to the host, or raises SshError; may block.
        python: path of the interpreter on that host.
        hello: first message to the agent, with what it needs to know about the run.
        post: called with this connection and each message of the agent, from other threads.
        logins: held while this connection logs in.
        sender: sends what does not have to wait.
    """

    def __init__(
        self,
        host: Host,
        connect: Connect,
        python: str,
        hello: msg.LeaderHello,
        post: Post,
        logins: threading.Semaphore,
        sender: Sender,
    ) -> None:
        self.host = host
        self.started_at = time.monotonic()
        self.last_heard = self.started_at
        """When silence began [monotonic s]; moved forward by the time this process was paused."""
        self.last_read = self.last_heard
        """When bytes from the agent were last read [monotonic s]."""
        self.taken_over = False
        """Whether the agent now follows another leader and will close this connection."""
        self.info: msg.AgentHello | None = None
        """The agent's hello, which describes its host; None before it arrived."""
        self.acted_upon = 0
        """Number of the last message that was acted upon; the agent may forget up to it."""
        self._connect = connect
        self._python = python
        self._hello = hello
        self._post = post
        self._logins = logins
        self._sender = sender
        name = f"host {host.name}: its agent"
        self._lines = LineSplitter(name)
        self._messages: MessageDecoder[Any] = MessageDecoder(msg.AgentToLeader, name)
        self._unusable: HvdElasticError | None = None
        """Why nothing more is read from the agent; None: it is read on."""
        self._activities: dict[str, Activity] = {}
        self._input = _Input()
        self._connection: Connection | None = None
        self._process: Any = None
        self._closing = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._live, name=f"agent of {host.name}", daemon=True).start()

    @property
    def up(self) -> bool:
        """Return whether the agent has sent its hello and its versions match."""
        return self.info is not None

    @property
    def is_gone(self) -> bool:
        """Return whether the agent has ended, or could not be started."""
        return self._gone.is_set()

    def send(self, message: msg.LeaderToAgent) -> None:
        """Queue a message for the agent; it is dropped if the agent has ended."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Queue an encoded message, as :meth:`send` does."""
        self._sender.put(self, line)

    def pass_on(self, line: bytes | None) -> None:
        """Write a line if that cannot block, else leave it to a thread; called by the sender."""
        self._input.pass_on(line)

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Read a file of the host and pass its content to ``write`` in pieces; blocks.

        Raises:
            SshError: the file cannot be read.
        """
        receive_file(self._connected().files, remote, write)

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host; blocks.

        Raises:
            SshError: the file could not be copied.
        """
        send_file(self._connected().files, local, remote)

    def discard(self, remote: str) -> None:
        """Remove a folder of the host; blocks.

        Raises:
            SshError: the command could not be run on the host.
        """
        self._connected().files.run(["rm", "-rf", "--", remote], timeout_s=_DISCARD_TIMEOUT_S)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise SshError(f"host {self.host.name}: no connection")
        return self._connection

    def beat(self, recorded_step: int | None) -> None:
        """Send a heartbeat that also says which data the agent may delete.

        Args:
            recorded_step: last step whose examples are in the audit file; None: there is none.
        """
        if self.up:
            self.send(msg.LeaderBeat(self.acted_upon, recorded_step))

    def take_activities(self) -> dict[str, Activity]:
        """Return the workers' activities in the last heartbeat; empty if there is no new one."""
        taken, self._activities = self._activities, {}
        return taken

    def shutdown(self, grace_s: float) -> None:
        """Ask the agent to end its workers and itself; does not wait."""
        self._closing.set()
        self.send(msg.Shutdown(grace_s))
        self._sender.put(self, None)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for the agent to end; return whether it did within ``timeout_s``."""
        return self._gone.wait(timeout_s)

    def drop(self) -> None:
        """Close the connection; the agent notices that and cleans up by itself."""
        self._closing.set()
        self._input.put(None)
        threading.Thread(target=self._close, name=f"close {self.host.name}", daemon=True).start()

    # -- threads ---------------------------------------------------------------------------

    def _live(self) -> None:
        cause, fatal = "the agent ended", False
        unknown, brief = False, "cannot start an agent"
        try:
            self._start()
            self._process.stdout.read()  # all of it is taken, so this waits for the end
            if self._unusable is not None:
                raise self._unusable
            if not self.up and not self._closing.is_set():
                cause, fatal = self._why_not_started()
            elif self._process is not None:
                tail = self._process.stderr_tail.decode(errors="replace").strip()
                cause = f"the agent ended{': ' + tail.splitlines()[-1] if tail else ''}"
        except HvdElasticError as error:
            cause, fatal = str(error), isinstance(error, (HostKeyError, _UnfitHostError))
            unknown = isinstance(error, HostUnknownError)
            brief = error.brief if isinstance(error, SshError) else brief
        except OSError as error:
            cause = f"host {self.host.name}: {error}"
        finally:
            self._close()
            self._gone.set()
            self._post(self, AgentFailed(self.host.name, cause, fatal, unknown, brief))

    def _start(self) -> None:
        with self._logins:
            self._connection = self._connect(self.host)
        # Every user of the host can read this command line, so the training command and the
        # environment are sent through stdin instead.
        self._python = self._connection.python or self._python
        command = f"exec {shlex.quote(self._python)} -m hvd_elastic.agent.agent"
        self._process = self._connection.start(command, on_stdout=self._take)
        self._input.open(self._process.stdin, encode(self._hello), self.host.name)

    def _take(self, data: bytes) -> None:
        """Take a piece of the agent's output, in the thread that has read it.

        Raises:
            EOFError: the agent cannot be used, so nothing more need be read.
        """
        self.last_heard = self.last_read = time.monotonic()
        try:
            for line in self._lines.feed(data):
                self._take_line(line)
        except HvdElasticError as error:
            self._unusable = error
            raise EOFError from error

    def _take_line(self, line: bytes) -> None:
        try:
            message = self._messages.decode(line)
        except ProtocolError:
            if not self.up and not self._is_hello_of_another_version(line):
                return  # output of a shell start-up file, not of the agent
            raise
        if isinstance(message, msg.AgentHello):
            unfit = self._unfit_version(message) or self._unfit_network(message)
            if unfit:
                raise _UnfitHostError(unfit)
            self.info = message
        if isinstance(message, msg.AgentBeat):
            self._activities = message.workers
            return
        self._post(self, message)
        if isinstance(message, msg.Refused):
            by = message.led.led_by
            raise _LedHostError(f"host {self.host.name} is led by another leader, {by}")

    def _is_hello_of_another_version(self, line: bytes) -> bool:
        """Return whether the line is a hello; raise _UnfitHostError if its version differs."""
        try:
            greeting = msgspec.json.decode(line, type=msg.Greeting)
        except ValueError:
            return False
        if greeting.ev != msg.AgentHello.__struct_config__.tag:
            return False
        unfit = self._unfit_version(greeting)
        if unfit:
            raise _UnfitHostError(unfit)
        return True

    def _unfit_version(self, hello: msg.Greeting | msg.AgentHello) -> str | None:
        name = self.host.name
        mine = ".".join(platform.python_version_tuple()[:2])
        theirs = ".".join(str(hello.python).split(".")[:2])
        if mine != theirs:
            return (
                f"host {name} has Python {hello.python} at {self._python}, the leader has "
                f"{platform.python_version()}. Use the same minor version everywhere, or name "
                "the right interpreter with --python."
            )
        if hello.version != __version__ or hello.protocol != msg.PROTOCOL:
            return (
                f"host {name} has hvd_elastic {hello.version} (protocol {hello.protocol}), the "
                f"leader has {__version__} (protocol {msg.PROTOCOL}). "
                "Install the same version on every host."
            )
        return None

    def _unfit_network(self, hello: msg.AgentHello) -> str | None:
        name, wanted, there = self.host.name, self._hello.interface, hello.interfaces
        if wanted and wanted not in there:
            known = ", ".join(f"{each} ({address})" for each, address in there.items()) or "none"
            return (
                f"host {name} has no network interface {wanted} with an address; it has {known}. "
                "Name one that every host has with --network-interface, or leave it out."
            )
        return None

    def _why_not_started(self) -> tuple[str, bool]:
        """Return why the agent ended without a hello, and whether another attempt is useless."""
        name = self.host.name
        try:
            status = self._process.wait(5.0)
            self._process.wait_drained(1.0)
        except TimeoutError:
            status = None
        tail = self._process.stderr_tail.decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else f"exit status {status}"
        missing = _MISSING_MODULE.search(tail)
        if missing is not None and missing["name"].startswith("hvd_elastic"):
            cause = (
                f"host {name}: {self._python} has no package hvd_elastic. Install it there "
                "(the same version as on the leader), or name another interpreter with --python."
            )
            return cause, True
        if status in (126, 127):
            cause = (
                f"host {name} has no Python at {self._python} ({last}). Install it there, or "
                "name the interpreter that every host has with --python."
            )
            return cause, True
        if missing is not None:
            return f"host {name}: the agent cannot start: {last}. Install it there.", True
        return f"host {name}: the agent did not start: {last}", False

    def _close(self) -> None:
        self._input.put(None)
        if self._process is not None:
            self._process.close()
        if self._connection is not None:
            self._connection.close()


class _LedHostError(SshError):
    """The host is led by another leader of the same run."""

    brief = "is led by another leader"


class _UnfitHostError(SshError):
    """The host answers but cannot be used as it is, so trying again is useless."""

    brief = "cannot be used as it is"
