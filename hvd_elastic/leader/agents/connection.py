"""The leader's connection to the agent of one host: starts it, and exchanges messages with it.

Everything that may block runs in threads of the connection; results are posted to the leader's
loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvd_elastic.control.events import AgentFailed
from hvd_elastic.control.progress import Activity
from hvd_elastic.errors import HostKeyError, HostUnknownError, HvdElasticError, SshError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.agents.incoming import Incoming, UnfitHostError
from hvd_elastic.leader.agents.process import AgentProcess, Connect
from hvd_elastic.leader.agents.sending import Outgoing, Sender
from hvd_elastic.wire import messages as msg
from hvd_elastic.wire.framing import encode

FromAgent = msg.AgentToLeader | AgentFailed
Post = Callable[["AgentConnection", FromAgent], None]


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
        self.taken_over = False
        """Whether the agent now follows another leader and will close this connection."""
        self.acted_upon = 0
        """Number of the last message that was acted upon; the agent may forget up to it."""
        self._post = post
        self._sender = sender
        self._process = AgentProcess(host, connect, python, logins)
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
    def is_gone(self) -> bool:
        """Return whether the agent has ended, or could not be started."""
        return self._gone.is_set()

    def send(self, message: msg.LeaderToAgent) -> None:
        """Queue a message for the agent; it is dropped if the agent has ended."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Queue an encoded message, as :meth:`send` does."""
        self._sender.put(self._outgoing.pass_on, line)

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Read a file of the host and pass its content to ``write`` in pieces; blocks.

        Raises:
            SshError: the file cannot be read.
        """
        self._process.receive(remote, write)

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host; blocks.

        Raises:
            SshError: the file could not be copied.
        """
        self._process.put(local, remote)

    def discard(self, remote: str) -> None:
        """Remove a folder of the host; blocks.

        Raises:
            SshError: the command could not be run on the host.
        """
        self._process.discard(remote)

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
            stdin = self._process.start(self._take)
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

    def _take(self, data: bytes) -> None:
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
