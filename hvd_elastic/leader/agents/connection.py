"""The leader's connection to the agent of one host: starts it, and exchanges messages with it.

Everything that may block runs in threads of the connection; results are posted to the leader's
loop.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hvd_elastic import __version__
from hvd_elastic.agent.spool import Spool
from hvd_elastic.control.events import AgentFailed
from hvd_elastic.control.progress import Activity
from hvd_elastic.errors import HostKeyError, HostUnknownError, HvdElasticError, SshError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.agents.process import AgentProcess, Connect
from hvd_elastic.run_events import Metrics
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import LineSplitter, MessageDecoder, ProtocolError, encode

_LATE_S = 1.0
"""Delay from which an event tells how late its metrics are, such as after a takeover [s]."""
_AT_ONCE_BYTES = 4096
"""Longest line that is written at once where there is room: a pipe has room for so much or none."""

FromAgent = msg.AgentToLeader | AgentFailed
Post = Callable[["AgentConnection", FromAgent], None]
PassOn = Callable[[bytes | None], None]
"""Takes a line for an agent, or None for the end; does not block."""


class LedHostError(SshError):
    """The host is led by another leader of the same run."""

    brief = "is led by another leader"


class UnfitHostError(SshError):
    """The host answers but cannot be used as it is, so trying again is useless."""

    brief = "cannot be used as it is"


class Incoming:
    """The messages of an agent, from its output.

    Args:
        told: what the agent was told, by which its hello is checked.

    Attributes:
        hello: the agent's hello, which describes its host; None before it arrived.
    """

    def __init__(self, process: AgentProcess, told: msg.LeaderHello) -> None:
        self._process = process
        self._told = told
        name = f"host {process.host.name}: its agent"
        self._lines = LineSplitter(name)
        self._decoder: MessageDecoder[Any] = MessageDecoder(msg.AgentToLeader, name)
        self._activities: dict[str, Activity] = {}
        self.hello: msg.AgentHello | None = None
        self._apart_s = 0.0  # least difference of the clocks that was seen

    def take_activities(self) -> dict[str, Activity]:
        """Return the workers' activities in the last heartbeat; empty if there is no new one."""
        taken, self._activities = self._activities, {}
        return taken

    def messages(self, data: bytes) -> Iterator[msg.AgentToLeader]:
        """Yield the messages that a piece of output completes, except heartbeats.

        Raises:
            ProtocolError: the agent has sent an invalid message.
            UnfitHostError: its versions differ from the leader's, its host lacks the interface, or
                it names a folder that is not the run's.
            LedHostError: it has refused this leader, with the message before.
        """
        for line in self._lines.feed(data):
            try:
                message = self._decoder.decode(line)
            except ProtocolError:
                if self.hello is None and not self._is_hello_of_another_version(line):
                    continue  # output of a shell start-up file, not of the agent
                raise
            if isinstance(message, msg.AgentBeat):
                self._activities = message.workers
                continue
            if isinstance(message, msg.AgentHello):
                self._check_version(message)
                self._check_network(message)
                self._check_spool(message)
                self.hello = message
            self._note_delay(message)
            yield message
            if isinstance(message, msg.Refused):
                name, by = self._process.host.name, message.led.led_by
                raise LedHostError(f"host {name} is led by another leader, {by}")

    def _note_delay(self, message: msg.AgentToLeader) -> None:
        """Note how long metrics were on their way: after a takeover they come late, all at once."""
        if isinstance(message, msg.AgentHello):
            self._apart_s = time.time() - message.time
        elif isinstance(message, msg.WorkerSaid) and isinstance(message.message, Metrics):
            apart_s = time.time() - message.message.t
            self._apart_s = min(self._apart_s, apart_s)
            late_s = apart_s - self._apart_s
            message.message.late_s = round(late_s, 3) if late_s >= _LATE_S else 0.0

    def _is_hello_of_another_version(self, line: bytes) -> bool:
        """Return whether the line is a hello; raise UnfitHostError if its version differs."""
        try:
            greeting = msgspec.json.decode(line, type=msg.Greeting)
        except (ValueError, RecursionError):
            return False
        if greeting.ev != msg.AgentHello.__struct_config__.tag:
            return False
        self._check_version(greeting)
        return True

    def _check_version(self, hello: msg.Greeting | msg.AgentHello) -> None:
        name = self._process.host.name
        mine = ".".join(platform.python_version_tuple()[:2])
        theirs = ".".join(str(hello.python).split(".")[:2])
        if mine != theirs:
            raise UnfitHostError(
                f"host {name} has Python {hello.python} at {self._process.python}, the leader has "
                f"{platform.python_version()}. Use the same minor version everywhere, or name "
                "the right interpreter with --python."
            )
        if hello.version != __version__ or hello.protocol != msg.PROTOCOL:
            raise UnfitHostError(
                f"host {name} has hvd_elastic {hello.version} (protocol {hello.protocol}), the "
                f"leader has {__version__} (protocol {msg.PROTOCOL}). "
                "Install the same version on every host."
            )

    def _check_network(self, hello: msg.AgentHello) -> None:
        wanted, there = self._told.interface, hello.interfaces
        if wanted and wanted not in there:
            known = ", ".join(f"{each} ({address})" for each, address in there.items()) or "none"
            raise UnfitHostError(
                f"host {self._process.host.name} has no network interface {wanted} with an "
                f"address; it has {known}. "
                "Name one that every host has with --network-interface, or leave it out."
            )

    def _check_spool(self, hello: msg.AgentHello) -> None:
        try:
            Spool.check_path(hello.spool, self._told)
        except ValueError as error:
            raise UnfitHostError(
                f"host {self._process.host.name}: its agent says that it keeps files of the run in "
                f"{error}: that is not an agent of hvd_elastic. Look who has started it there"
            ) from None


class Sender:
    """Sends messages to all agents in one thread, which starts with the first.

    With a thread for each, a message to all would wake hundreds that wait for each other.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[PassOn, bytes | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, pass_on: PassOn, line: bytes | None) -> None:
        """Have ``pass_on`` called with a line, or None for the end, without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="to agents", daemon=True)
            self._thread.start()
        self._lines.put((pass_on, line))

    def _run(self) -> None:
        while True:
            pass_on, line = self._lines.get()
            pass_on(line)


class Outgoing:
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
        connect: returns a connection to the host, or raises SshError; may block.
        hello: first message to the agent, with what it needs to know about the run.
        post: called with this connection and each message of the agent, from other threads.
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
        self.taken_over = False
        """Whether the agent now follows another leader and will close this connection."""
        self.acted_upon = 0
        """Number of the last message that was acted upon; the agent may forget up to it."""
        self._post = post
        self._sender = sender
        self._process = process = AgentProcess(host, connect, python, logins)
        # Of files on the host; see HostFiles of the collector. They block.
        self.receive, self.put, self.discard = process.receive, process.put, process.discard
        self._incoming = Incoming(self._process, hello)
        self._unusable: HvdElasticError | None = None
        """Why nothing more is read from the agent; None: it is read on."""
        self._outgoing = Outgoing()
        self._closing = threading.Event()
        self._gone = threading.Event()
        threading.Thread(
            target=self._live, args=(hello,), name=f"agent of {host.name}", daemon=True
        ).start()

    @property
    def info(self) -> msg.AgentHello | None:
        """Return the agent's hello, which describes its host; None before it arrived."""
        return self._incoming.hello

    @property
    def up(self) -> bool:
        """Return whether the agent has sent its hello and its versions match."""
        return self.info is not None

    @property
    def is_starting(self) -> bool:
        """Return whether its program has been started on the host, and has not said hello yet."""
        return self._process.has_begun and not self.up and not self.is_gone

    @property
    def is_gone(self) -> bool:
        """Return whether the agent has ended, or could not be started."""
        return self._gone.is_set()

    def send(self, message: msg.LeaderToAgent) -> None:
        """Queue a message for the agent; it is dropped if the agent has ended."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Queue an encoded message, as :meth:`send` does."""
        self._sender.put(self._outgoing.pass_on, line)

    def beat(self, recorded_step: int | None) -> None:
        """Send a heartbeat that also says which data the agent may delete.

        Args:
            recorded_step: last step whose examples are in the audit file; None: there is none.
        """
        if self.up:
            self.send(msg.LeaderBeat(self.acted_upon, recorded_step))

    def take_activities(self) -> dict[str, Activity]:
        """Return the workers' activities in the last heartbeat; empty if there is no new one."""
        return self._incoming.take_activities()

    def shutdown(self, grace_s: float) -> None:
        """Ask the agent to end its workers and itself; does not wait."""
        self._closing.set()
        self.send(msg.Shutdown(grace_s))
        self._sender.put(self._outgoing.pass_on, None)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for the agent to end; return whether it did within ``timeout_s``."""
        return self._gone.wait(timeout_s)

    def drop(self) -> None:
        """Close the connection; the agent notices that and cleans up by itself."""
        self._closing.set()
        self._outgoing.put(None)
        threading.Thread(target=self._close, name=f"close {self.host.name}", daemon=True).start()

    # -- threads ---------------------------------------------------------------------------

    def _live(self, hello: msg.LeaderHello) -> None:
        cause, fatal = "the agent ended", False
        unknown, brief = False, "cannot start an agent"
        try:
            stdin = self._process.start(self._take_output)
            self._outgoing.open(stdin, encode(hello), self.host.name)
            self._process.wait_for_end()
            if self._unusable is not None:
                raise self._unusable
            if not self.up and not self._closing.is_set():
                cause, fatal = self._process.why_not_started()
            else:
                cause = self._process.why_ended()
        except HvdElasticError as error:
            cause, fatal = str(error), isinstance(error, (HostKeyError, UnfitHostError))
            unknown = isinstance(error, HostUnknownError)
            brief = error.brief if isinstance(error, SshError) else brief
        except OSError as error:
            cause = f"host {self.host.name}: {error}"
        finally:
            self._close()
            self._gone.set()
            self._post(self, AgentFailed(self.host.name, cause, fatal, unknown, brief))

    def _take_output(self, data: bytes) -> None:
        """Take a piece of the agent's output, in the thread that has read it.

        Raises:
            EOFError: the agent cannot be used, so nothing more need be read.
        """
        self.last_heard = time.monotonic()
        try:
            for message in self._incoming.messages(data):
                self._post(self, message)
        except HvdElasticError as error:
            self._unusable = error
            raise EOFError from error

    def _close(self) -> None:
        self._outgoing.put(None)
        self._process.close()
