"""A call's way to the hosts whose connections a keeper holds.

:class:`KeptHosts` stands where :func:`hvd_elastic.hosts.ssh.connect` does: a host that is kept is
there at once, others are connected to, by the keeper if they are to be kept as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import marshal
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_elastic.closing import Closing
from hvd_elastic.errors import (
    HostKeyError,
    HostUnknownError,
    HostUnreachableError,
    LoginRefusedError,
    SshError,
)
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import CHUNK_BYTES
from hvd_elastic.hosts.programs import keep_wire
from hvd_elastic.hosts.programs.keep_wire import WINDOW_BYTES, frame, pack_number, unpack_number
from hvd_elastic.hosts.ssh import connect, is_local
from hvd_elastic.hosts.ssh_config import read_config_text

__all__ = ["KEY_BYTES", "MARSHAL_VERSION", "KeptGoneError", "KeptHost", "KeptHosts", "KeptProcess"]

log = logging.getLogger(__name__)

KEY_BYTES = 16
STOP_S = 6.0
# What every Python 3 reads.
MARSHAL_VERSION = 2
_ERRORS = {
    error.__name__: error
    for error in (
        HostKeyError, HostUnknownError, HostUnreachableError, LoginRefusedError, SshError,
    )
}  # fmt: skip


class KeptGoneError(SshError):
    """A kept connection was gone before anything was sent through it."""


class KeptHosts(Closing):
    """The hosts that one keeper holds, as one call sees them.

    Args:
        sock: to the keeper, which it closes.
        options: how the call connects.
        keep_s: how long hosts shall be kept after this call; None: as they were, and no others.

    Raises:
        EOFError: the keeper is about to end.
    """

    def __init__(self, sock: socket.socket, options: SshOptions, keep_s: float | None) -> None:
        self._sock = sock
        self._options = options
        self.keep_s = keep_s
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._processes: dict[int, KeptProcess] = {}
        self._answers: dict[int, queue.SimpleQueue[tuple[int, bytes]]] = {}
        self._outputs: queue.SimpleQueue[tuple[KeptProcess, int, bytes]] = queue.SimpleQueue()
        self._frames = keep_wire.Frames()
        self._surroundings = _fingerprint(_describe(options))
        self._live = self._read_live()
        for name, target in (("keeper", self._read), ("kept output", self._give_out)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def connect(self, host: Host, options: SshOptions) -> Connection | KeptHost:
        """As :func:`hvd_elastic.hosts.ssh.connect`."""
        if is_local(host, options):
            return connect(host, options)
        key = self._key(host)
        if key not in self._live:
            if self.keep_s is None or not self._open(host, key, options):
                return connect(host, options)
            self._live.add(key)
        return KeptHost(self, host, key)

    def close(self) -> None:
        """What still runs is ended by the keeper."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def forget(self, key: bytes) -> None:
        """That host is not there any more."""
        self._live.discard(key)

    def begin(self, process: KeptProcess, start: dict[str, Any]) -> None:
        """Gives a command its number and sends it on its way."""
        process.number = next(self._numbers)
        self._processes[process.number] = process
        payload = marshal.dumps({"keep_s": self.keep_s, **start}, MARSHAL_VERSION)
        self.send(keep_wire.START, process.number, process.key + payload)

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Sends a frame.

        Raises:
            OSError: the keeper is gone.
        """
        data = frame(kind, number, payload)
        with self._sending:
            self._sock.sendall(data)

    def _open(self, host: Host, key: bytes, options: SshOptions) -> bool:
        """Has the keeper connect; False: that host cannot be kept."""
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        request = {
            "key": key.hex(),
            "host": [host.name, host.user, host.port],
            "config_path": _absolute(options.config_path),
            "identity": _absolute(options.identity),
            "connect_timeout_s": options.connect_timeout_s,
            "keep_s": self.keep_s,
        }
        try:
            self.send(keep_wire.OPEN, number, json.dumps(request).encode("ascii"))
        except OSError:
            return False
        kind, payload = answers.get()
        if kind == keep_wire.OPENED:
            return True
        name, _, message = payload.decode("utf-8", "replace").partition(" ")
        if name in _ERRORS:
            raise _ERRORS[name](message)
        log.debug("host %s cannot be kept", host.name)
        return False

    def _key(self, host: Host) -> bytes:
        """What a connection is found by: the host and all that says how it was made."""
        return _fingerprint((host.name.lower(), host.user, host.port, self._surroundings))

    def _read_live(self) -> set[bytes]:
        while True:
            data = self._sock.recv(CHUNK_BYTES)
            if not data:
                raise EOFError
            for _, _, payload in self._frames.feed(data):
                keys = range(0, len(payload), KEY_BYTES)
                return {payload[at : at + KEY_BYTES] for at in keys}

    def _read(self) -> None:
        """Never waits for anybody but the keeper: whoever takes output may take its time."""
        try:
            while data := self._sock.recv(CHUNK_BYTES):
                for kind, number, payload in self._frames.feed(data):
                    self._take(kind, number, payload)
        except OSError:
            pass
        finally:
            self._end()

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind in (keep_wire.OPENED, keep_wire.FAILED):
            self._answers.pop(number).put((kind, payload))
        elif kind == keep_wire.OVER:
            self._processes.pop(number, None)
        elif (process := self._processes.get(number)) is not None:
            if kind in (keep_wire.OUT, keep_wire.ERR, keep_wire.DRAINED):
                self._outputs.put((process, kind, payload))
            else:
                process.hear(kind, payload)

    def _end(self) -> None:
        """Nothing more will come: nobody waits on."""
        # First, so that whoever sends from now on hears of it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for answers in list(self._answers.values()):
            answers.put((keep_wire.FAILED, b""))
        for process in list(self._processes.values()):
            process.hear(keep_wire.EXIT, pack_number(-1))
            self._outputs.put((process, keep_wire.DRAINED, b""))

    def _give_out(self) -> None:
        while True:
            process, kind, payload = self._outputs.get()
            process.take(kind, payload)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def _describe(options: SshOptions) -> tuple[object, ...]:
    """What the connections of a call have in common; the keeper's own part is in its name."""
    text = read_config_text(options.config_path)
    return (text, _absolute(options.config_path), _absolute(options.identity))


def _fingerprint(parts: tuple[object, ...]) -> bytes:
    text = repr(parts).encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class _Stdin:
    """The way in."""

    process: KeptProcess

    def write(self, data: bytes) -> int:
        """As that of a :class:`hvd_elastic.hosts.process.RemoteProcess`."""
        self.process.write(data)
        return len(data)

    def close(self) -> None:
        """The process reads the end of its input."""
        self.process.send(keep_wire.CLOSE)


class KeptProcess:
    """A process that an agent on a kept host has started; used as a ``RemoteProcess``."""

    def __init__(
        self,
        hosts: KeptHosts,
        host: KeptHost,
        start: dict[str, Any],
        on_stderr: Callable[[bytes], None],
        on_stdout: Callable[[bytes], None],
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        self.key = host.key
        self.number = 0
        self.stdin = _Stdin(self)
        self._hosts = hosts
        self._name = host.host.name
        self._takers = {keep_wire.OUT: on_stdout, keep_wire.ERR: on_stderr}
        self._on_refused = on_refused
        self._room = WINDOW_BYTES
        self._used = 0
        self._status: int | None = None
        self._gone = False
        self._changed = threading.Condition()
        self._drained = threading.Event()
        try:
            hosts.begin(self, {"hold": (), "argv": [], **start})
        except OSError as error:
            hosts.forget(self.key)
            raise KeptGoneError(f"host {self._name}: the keeper is gone") from error

    def write(self, data: bytes) -> None:
        """Sends all of it, waiting while the process does not read.

        Raises:
            BrokenPipeError: the process or the connection is gone.
        """
        view = memoryview(data)
        while view:
            with self._changed:
                self._changed.wait_for(lambda: self._room > 0 or self._status is not None)
                if self._status is not None:
                    raise BrokenPipeError("the command or its connection is gone")
                size = min(self._room, len(view))
                self._room -= size
            self._hosts.send(keep_wire.INPUT, self.number, bytes(view[:size]))
            view = view[size:]

    def send(self, kind: int) -> None:
        """Tells the agent about this process."""
        # A keeper that is gone has ended the process.
        with contextlib.suppress(OSError):
            self._hosts.send(kind, self.number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; -1 when the connection was lost.

        Raises:
            TimeoutError: it still runs.
            KeptGoneError: it never began.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._status is not None, timeout):
                raise TimeoutError(f"still runs on {self._name} after {timeout} s")
            if self._gone:
                self._hosts.forget(self.key)
                raise KeptGoneError(f"host {self._name}: its kept connection is gone")
            assert self._status is not None, "waited for"
            return self._status

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Whether all output has arrived."""
        return self._drained.wait(timeout)

    def stop(self) -> bool:
        """Ends it, by the end of its input; whether it is known to have ended."""
        self.stdin.close()
        ended = True
        try:
            self.wait(STOP_S)
        except (TimeoutError, KeptGoneError):  # its time is over: it is not begun anew
            ended = False
        self.close()
        return ended

    def close(self) -> None:
        """Lets go of it."""
        if not self._drained.is_set() or self._status is None:
            self.send(keep_wire.FORGET)

    def hear(self, kind: int, payload: bytes) -> None:
        """Something else than output has come from the agent."""
        with self._changed:
            if kind == keep_wire.ROOM:
                self._room += unpack_number(payload)
            elif kind == keep_wire.REFUSED:
                if self._on_refused is not None:
                    self._on_refused(payload.decode("utf-8", "replace"))
            elif self._status is None:
                self._gone = kind == keep_wire.GONE
                self._status = -1 if self._gone else unpack_number(payload)
            self._changed.notify_all()

    def take(self, kind: int, payload: bytes) -> None:
        """Output, or its end."""
        if kind == keep_wire.DRAINED:
            self._drained.set()
            return
        self._takers[kind](payload)
        self._used += len(payload)
        if self._used >= WINDOW_BYTES // 4:
            used, self._used = self._used, 0
            with contextlib.suppress(OSError):
                self._hosts.send(keep_wire.ROOM, self.number, pack_number(used))


class KeptHost(Closing):
    """A host that a keeper holds a connection to: only held commands can be started there."""

    def __init__(self, hosts: KeptHosts, host: Host, key: bytes) -> None:
        self._hosts = hosts
        self.host = host
        self.key = key

    def hold(
        self,
        arguments: Sequence[object],
        on_stderr: Callable[[bytes], None],
        on_stdout: Callable[[bytes], None],
        on_refused: Callable[[str], None],
    ) -> KeptProcess:
        """A command that the agent's holder holds, without a Python having to start.

        Args:
            arguments: of ``main`` of ``remote/hold_command.py``.
            on_stderr, on_stdout: take what it writes.
            on_refused: told why the command could not be started, before it ends.
        """
        start = {"hold": tuple(arguments)}
        return KeptProcess(self._hosts, self, start, on_stderr, on_stdout, on_refused)

    def launch(
        self,
        argv: Sequence[str],
        on_stderr: Callable[[bytes], None],
        on_stdout: Callable[[bytes], None],
    ) -> KeptProcess:
        """A program that holds a command."""
        return KeptProcess(self._hosts, self, {"argv": list(argv)}, on_stderr, on_stdout)

    def close(self) -> None:
        """It stays: that is what it is kept for."""
