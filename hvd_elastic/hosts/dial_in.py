"""Connections to hosts that cannot be logged in to, and that dial back to the leader instead.

An engine starts :mod:`hvd_elastic.programs.dial_back` on each host that it gives, with an
invitation of :class:`DialIn`. The link is TLS, on which both sides show the certificate of the run;
the engine hands it over in the way in which it hands over secrets. Whoever connects without it gets
no further than the handshake.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_elastic.errors import HostUnreachableError, SshError
from hvd_elastic.hosts.certificate import make_certificate
from hvd_elastic.hosts.connection import Connection
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import (
    ByteStream,
    Command,
    RemoteProcess,
    Sink,
    as_command,
    has_room,
)
from hvd_elastic.json_text import parse_json
from hvd_elastic.programs.accept_peers import accept_peers
from hvd_elastic.programs.dial_back import CONTROL_PATIENCE_S
from hvd_elastic.programs.secure_stream import PATIENCE_S, Kind, SecureStream

_START_S = 40.0
"""How long a host may take to open the connection of a command [s]."""
_LOOK_S = 1.0
"""Time between two looks whether it is still connected meanwhile [s]."""
_UNREAD_BYTES = 1 << 20
"""Output of a command that is taken from the network before its reader asks for it."""


@dataclass(frozen=True)
class DialInHost:
    """A host that has dialled in.

    Attributes:
        host: its name, unique among those that are connected, and slots.
        identity: tells its process from others.
        python: path of its interpreter.
        folder: folder on the host for files that are sent to it; it ends with the host process.
        control: control connection.
    """

    host: Host
    identity: str
    python: str
    python_version: str
    folder: str
    control: SecureStream

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the host process.

        Raises:
            OSError: it is gone.
        """
        self.control.send(Kind.MESSAGE, json.dumps(message).encode())


class DialIn:
    """Listens for hosts that dial in.

    Args:
        address: address of this machine by which the hosts reach it; only this one is listened on.
        changed: called in other threads when a host has come or gone. If it raises an OSError, the
            host has to dial in again.
        warn: called with the reason when a connection is refused, once for each address, and when
            ``changed`` has failed.
        grace_s: how long hosts try to dial in again when the link breaks [s].
        port: where to listen; 0: a free port.
        certificate: key and certificate of the run, if an earlier leader has made them.

    Raises:
        OSError: the address is not one of this machine, or the port is in use.
    """

    def __init__(
        self,
        address: str,
        changed: Callable[[], None],
        warn: Callable[[str], None],
        grace_s: float = 60.0,
        port: int = 0,
        certificate: str = "",
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=128)
        self._certificate = certificate or make_certificate()
        self._address, self._grace_s = address, grace_s
        self._changed, self._warn = changed, warn
        self._lock = threading.Lock()
        self._by_name: dict[str, DialInHost] = {}
        self._awaited: dict[str, queue.SimpleQueue[SecureStream | OSError]] = {}
        self._warned: set[str] = set()
        self._closed = False
        accepting = (self._listener, self._admit, self._meet, self._refuse)
        threading.Thread(
            target=accept_peers, args=accepting, name="hosts dial in", daemon=True
        ).start()

    @property
    def invitation(self) -> dict[str, Any]:
        """Return what a host process needs to dial in; secret, since the key is part of it."""
        return {
            "address": self._address,
            "port": self._listener.getsockname()[1],
            "certificate": self._certificate,
            "grace_s": self._grace_s,
        }

    @property
    def hosts(self) -> list[DialInHost]:
        """Return the hosts that are connected, in the order in which they have dialled in."""
        with self._lock:
            return [*self._by_name.values()]

    def connect(self, host: Host) -> DialInConnection:
        """Return a connection to a host.

        Raises:
            HostUnreachableError: it is not connected.
        """
        with self._lock:
            remote = self._by_name.get(host.name)
        if remote is None:
            raise HostUnreachableError(
                f"host {host.name}: its link is lost; it is used again when it dials in"
            )
        return DialInConnection(self, host, remote)

    def close(self) -> None:
        """Tell all hosts that there is nothing more to do, and stop listening."""
        with self._lock:
            self._closed = True
            remotes = [*self._by_name.values()]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for remote in remotes:
            with contextlib.suppress(OSError):
                remote.send({"end": True})

    def open_command(self, remote: DialInHost, number: str, command: str) -> SecureStream:
        """Start a command on a host; return the connection that the host has opened for it.

        Raises:
            SshError: the host does not answer.
        """
        opened: queue.SimpleQueue[SecureStream | OSError] = queue.SimpleQueue()
        self._awaited[number] = opened
        failed = f"host {remote.host.name}: no command can be started"
        try:
            remote.send({"start": number, "command": command})
            deadline = time.monotonic() + _START_S
            found: SecureStream | OSError | None = None
            while found is None:
                with contextlib.suppress(queue.Empty):
                    found = opened.get(timeout=_LOOK_S)
                late = time.monotonic() > deadline
                if found is None and (late or remote not in self.hosts):
                    if self._awaited.pop(number, None) is not None:
                        why = f"no answer for {_START_S:g} s" if late else "its link is lost"
                        raise SshError(f"{failed}: {why}")
                    found = opened.get()  # it has come at this moment
            if isinstance(found, OSError):
                raise found
        except OSError as error:
            raise SshError(f"{failed}: {error}") from error
        finally:
            self._awaited.pop(number, None)
        return found

    # -- threads -------------------------------------------------------------------------------

    def _admit(self, plain: socket.socket) -> tuple[SecureStream, dict[str, Any]]:
        stream = SecureStream(plain, self._certificate, client=False)
        kind, data = stream.receive()
        if kind is not Kind.MESSAGE:
            raise ConnectionError("it did not say what it is")
        return stream, parse_json(data)

    def _meet(self, peer: tuple[SecureStream, dict[str, Any]]) -> None:
        stream, first = peer
        try:
            if "command" in first:
                self._take_command(stream, first["command"])
            else:
                self._attend(self._register(stream, first))
        except OSError:
            stream.close()

    def _refuse(self, address: tuple[Any, ...], error: Exception) -> None:
        what, why = "has not shown", str(error)
        if isinstance(error, ssl.SSLError):
            what, why = "does not have", error.reason or why
        peer = str(address[0])
        self._warn_once(
            peer,
            f"a connection from {peer} to the port for hosts was refused: it {what} the key of "
            f"this run ({why})",
        )

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned and not self._closed:
            self._warned.add(about)
            self._warn(text)

    def _take_command(self, stream: SecureStream, number: str) -> None:
        opened = self._awaited.pop(number, None)
        if opened is None:
            stream.send(Kind.MESSAGE, b'{"refused": "nobody waits for this command"}')
            stream.close()
            return
        try:
            stream.send(Kind.MESSAGE, b"{}")
            stream.has_begun(PATIENCE_S)
        except OSError as error:  # gone again: whoever waits for it need not wait for longer
            stream.close()
            opened.put(error)
        else:
            opened.put(stream)

    def _register(self, stream: SecureStream, hello: dict[str, Any]) -> DialInHost:
        identity = hello["control"]
        # Before others see the host: it takes the first message for its answer.
        stream.send(Kind.MESSAGE, b"{}")
        stream.has_begun(CONTROL_PATIENCE_S)
        with self._lock:
            before = next((h for h in self._by_name.values() if h.identity == identity), None)
            name = before.host.name if before else _unique(hello["name"], self._by_name)
            host = Host(name, slots=hello["slots"])
            told = {field: hello[field] for field in ("python", "python_version", "folder")}
            remote = DialInHost(host, identity, **told, control=stream)
            is_late = self._closed
            if not is_late:
                self._by_name[name] = remote
        if before is not None:
            before.control.cut()
        if is_late:
            remote.send({"end": True})
        return remote

    def _attend(self, remote: DialInHost) -> None:
        """Have a host used until it has gone."""
        self._tell_changed(remote)
        with contextlib.suppress(OSError):
            while True:
                remote.control.receive()
        remote.control.close()
        name = remote.host.name
        with self._lock:
            is_known = self._by_name.get(name) is remote
            if is_known:
                del self._by_name[name]
        if is_known:
            self._tell_changed(remote)

    def _tell_changed(self, remote: DialInHost) -> None:
        """Call ``changed``; where that fails, the host has to dial in again."""
        if self._closed:
            return
        try:
            self._changed()
        except OSError as error:  # such as a full disk
            text = f"host {remote.host.name} has come or gone, which cannot be recorded: {error}"
            self._warn_once(text, text)
            remote.control.cut()


def _unique(name: str, taken: dict[str, DialInHost]) -> str:
    """Return the name, with a number if another host has it: several may share a machine."""
    number = 1
    unique = name
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique


class DialInConnection(Connection):
    """A host that has dialled in.

    Args:
        dial_in: where it has dialled in.
        host: the host, as in the hostfile.
        remote: what has dialled in.
    """

    def __init__(self, dial_in: DialIn, host: Host, remote: DialInHost) -> None:
        self.host = host
        self.peer_address = remote.control.peer_address
        self.python = remote.python
        self._dial_in = dial_in
        self.remote = remote
        self._streams: list[SecureStream] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and self.remote in self._dial_in.hosts

    def start(
        self, command: Command, on_stderr: Sink = None, on_stdout: Sink = None
    ) -> RemoteProcess:
        if self._closed:
            raise SshError(f"host {self.host.name}: the connection is closed")
        command = as_command(command)
        number = secrets.token_hex(8)
        stream = self._dial_in.open_command(self.remote, number, command)
        self._streams = [known for known in self._streams if known.fileno() >= 0] + [stream]
        ends = _StreamEnds(stream, self.remote, number)
        return RemoteProcess(ends, command, self.host.name, on_stderr, on_stdout)

    def close(self) -> None:
        self._closed = True
        for stream in self._streams:
            stream.cut()


class _StreamEnds:
    """Pipes of a command on a host that has dialled in."""

    def __init__(self, stream: SecureStream, remote: DialInHost, number: str) -> None:
        self._stream = stream
        self._remote, self._number = remote, number
        self._output = {
            Kind.STDOUT: ByteStream(_UNREAD_BYTES),
            Kind.STDERR: ByteStream(_UNREAD_BYTES),
        }
        self._status = -1
        """Exit status; as over ssh -1 if the connection was lost before it came."""
        self._ended = threading.Event()
        name = f"from {remote.host.name}"
        threading.Thread(target=self._receive, name=name, daemon=True).start()

    def read_stdout(self, size: int) -> bytes:
        return self._output[Kind.STDOUT].read(size)

    def read_stderr(self, size: int) -> bytes:
        return self._output[Kind.STDERR].read(size)

    def write(self, data: bytes) -> None:
        if not data:
            return  # an empty frame would be the end
        try:
            self._stream.send(Kind.STDIN, data)
        except OSError as error:
            raise BrokenPipeError(f"the command or its connection is gone ({error})") from error

    def is_ready(self) -> bool:
        descriptor = self._stream.fileno()
        return descriptor >= 0 and has_room(descriptor)

    def close_stdin(self) -> None:
        self._stream.send(Kind.STDIN)

    def wait(self, timeout: float | None) -> int | None:
        return self._status if self._ended.wait(timeout) else None

    def signal(self, name: str) -> None:
        self._remote.send({"signal": self._number, "name": name})

    def close(self) -> None:
        self._stream.cut()

    def _receive(self) -> None:
        try:
            while True:
                kind, data = self._stream.receive()
                if kind is Kind.EXIT:
                    self._status = int(data)
                    self._ended.set()
                elif data:
                    self._output[kind].put(data)
                else:
                    self._output[kind].mark_end()
        except OSError:
            pass  # it has ended, or the connection is lost
        finally:
            for output in self._output.values():
                output.mark_end()
            self._ended.set()
            self._stream.close()
