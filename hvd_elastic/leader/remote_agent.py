"""The leader's end of one agent: connect, start it, read what it says, write to it.

Everything slow happens in threads of this object; what they learn is posted to the leader's loop.
"""

from __future__ import annotations

import platform
import queue
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_elastic import __version__
from hvd_elastic.errors import HostKeyError, HostUnknownError, HvdElasticError, SshError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.ssh import Connection, SshOptions, connect
from hvd_elastic.hosts.transfer import receive_file, send_file
from hvd_elastic.wire.framing import PROTOCOL, Message, decode, encode

__all__ = ["AgentConnection"]

_HELLO_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 12.0
_DISCARD_TIMEOUT_S = 10.0

Post = Callable[[str, Message], None]


class AgentConnection:
    """One try at having an agent on one host.

    What is posted, always with the host's name first: every message of the agent, among them
    ``refused`` with who leads this run there already; ``up`` once it has said hello and fits;
    ``down {cause, brief, fatal, unknown}`` once, when it could not be started, or when it is gone.

    Args:
        host: where.
        options: how to get there.
        python: interpreter on that host.
        hello: the first message, with what the agent needs to know of the run.
        post: takes ``(host name, message)``; called from other threads.
    """

    def __init__(
        self, host: Host, options: SshOptions, python: str, hello: Message, post: Post
    ) -> None:
        self.host = host
        self.last_heard = time.monotonic()
        """Silence is counted from then; it does not count where this process stood still."""
        self.last_read = self.last_heard
        """When anything of it was last read."""
        self.info: Message = {}
        self.acted_upon = 0
        """Number of the last message that has been acted upon, for the agent to forget."""
        self._options = options
        self._python = python
        self._hello = hello
        self._post = post
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._process: Any = None
        self._closing = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._live, name=f"agent of {host.name}", daemon=True).start()

    @property
    def up(self) -> bool:
        """Whether the agent has said hello and fits."""
        return bool(self.info)

    def send(self, message: Message) -> None:
        """Queue a message; one to an agent that is gone is dropped."""
        self._outbox.put(encode(message))

    def receive(self, remote: str, write: Callable[[bytes | memoryview], object]) -> None:
        """Give ``write`` the content of a file of the host; blocks.

        Raises:
            SshError: it cannot be read.
        """
        receive_file(self._connected(), remote, write)

    def put(self, local: Path, remote: str) -> None:
        """Copy a file to the host; blocks.

        Raises:
            SshError: it could not be copied.
        """
        send_file(self._connected(), local, remote)

    def discard(self, remote: str) -> None:
        """Remove a folder of the host; blocks.

        Raises:
            SshError: that could not be asked for.
        """
        self._connected().run(["rm", "-rf", "--", remote], timeout_s=_DISCARD_TIMEOUT_S)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise SshError(f"host {self.host.name}: no connection")
        return self._connection

    def beat(self, recorded_step: int | None) -> None:
        """Tell the agent that its leader lives, and what need not be kept any longer.

        Args:
            recorded_step: up to this step it is on record what was read; None: no such record.
        """
        if self.up:
            self.send({"op": "beat", "seq": self.acted_upon, "recorded": recorded_step})

    def shutdown(self, grace_s: float) -> None:
        """Ask the agent to end its workers and itself; does not wait."""
        self._closing.set()
        self.send({"op": "shutdown", "grace_s": grace_s})
        self._outbox.put(None)

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether the agent has ended within the time."""
        return self._gone.wait(timeout_s)

    def drop(self) -> None:
        """Cut the connection; the agent notices and cleans up on its own."""
        self._closing.set()
        self._outbox.put(None)
        threading.Thread(target=self._close, name=f"close {self.host.name}", daemon=True).start()

    # -- threads ---------------------------------------------------------------------------

    def _live(self) -> None:
        cause, fatal = "the agent ended", False
        unknown, brief = False, "cannot start an agent"
        try:
            self._start()
            self._read()
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
            down = {"cause": cause, "brief": brief, "fatal": fatal, "unknown": unknown}
            self._post(self.host.name, {"ev": "down", **down})

    def _start(self) -> None:
        self._connection = connect(self.host, self._options)
        # Nothing of the environment or the command goes on this command line: anyone on the
        # host can read it.
        command = f"exec {shlex.quote(self._python)} -m hvd_elastic.agent.agent"
        self._process = self._connection.start(command)
        self.send({"op": "hello", **self._hello})
        threading.Thread(
            target=self._write, name=f"to agent of {self.host.name}", daemon=True
        ).start()

    def _write(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except (OSError, HvdElasticError):
            return  # the reading thread learns of it as well, and reports it

    def _read(self) -> None:
        for line in self._process.stdout:
            self.last_heard = self.last_read = time.monotonic()
            try:
                message = decode(line)
            except ValueError:
                continue  # a shell start-up file that prints; not from the agent
            if message.get("ev") == "refused":
                self._post(self.host.name, message)
                raise _LedHostError(
                    f"host {self.host.name} is led by another leader, {message['led_by']}"
                )
            if message.get("ev") == "hello":
                unfit = self._unfit(message)
                if unfit:
                    raise _UnfitHostError(unfit)
                self.info = message
                self._post(self.host.name, {**message, "ev": "up"})
            elif "ev" in message:
                self._post(self.host.name, message)

    def _unfit(self, hello: Message) -> str | None:
        name = self.host.name
        mine = ".".join(platform.python_version_tuple()[:2])
        theirs = ".".join(str(hello.get("python")).split(".")[:2])
        if mine != theirs:
            return (
                f"host {name} has Python {hello.get('python')} at {self._python}, the leader has "
                f"{platform.python_version()}. Use the same minor version everywhere, or name "
                "the right interpreter with --python."
            )
        if hello.get("version") != __version__ or hello.get("protocol") != PROTOCOL:
            return (
                f"host {name} has hvd_elastic {hello.get('version')} (protocol "
                f"{hello.get('protocol')}), the leader has {__version__} (protocol {PROTOCOL}). "
                "Install the same version on every host."
            )
        wanted, there = self._hello.get("interface"), hello["interfaces"]
        if wanted and wanted not in there:
            known = ", ".join(f"{each} ({address})" for each, address in there.items()) or "none"
            return (
                f"host {name} has no network interface {wanted} with an address; it has {known}. "
                "Name one that every host has with --network-interface, or leave it out."
            )
        return None

    def _why_not_started(self) -> tuple[str, bool]:
        """Cause and whether another try is useless, after the agent ended without a hello."""
        name = self.host.name
        try:
            status = self._process.wait(5.0)
            self._process.wait_drained(1.0)
        except TimeoutError:
            status = None
        tail = self._process.stderr_tail.decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else f"exit status {status}"
        if "No module named" in tail and "hvd_elastic" in tail:
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
        if "No module named" in tail:
            return f"host {name}: the agent cannot start: {last}. Install it there.", True
        return f"host {name}: the agent did not start: {last}", False

    def _close(self) -> None:
        self._outbox.put(None)
        if self._process is not None:
            self._process.close()
        if self._connection is not None:
            self._connection.close()


class _LedHostError(SshError):
    """Another leader of this run was there first, and will give way."""

    brief = "is led by another leader"


class _UnfitHostError(SshError):
    """The host answers, but cannot be used as it is: trying again is useless."""

    brief = "cannot be used as it is"
