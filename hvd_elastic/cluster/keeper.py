"""Holds a connection to an agent on each kept host, and passes frames between calls and agents.

Part of the keeper (``hvd_elastic/cli/keeping.py``). What is on its way is bounded by the senders'
windows (``remote/keep_wire.py``), so the queues here need no limit of their own, and nobody who
stands still holds up another.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_elastic.cluster import keep_socket
from hvd_elastic.cluster.keep_bounds import Bounds
from hvd_elastic.cluster.kept import KEY_BYTES
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import CHUNK_BYTES
from hvd_elastic.hosts.programs import keep_wire
from hvd_elastic.hosts.programs.keep_wire import MARK, WINDOW_BYTES, Frames, frame, pack_number
from hvd_elastic.hosts.remote_python import start_program
from hvd_elastic.hosts.ssh import connect

__all__ = ["Keeper"]

# For the agent's Python, once connected.
START_S = 20.0
# A connection that has been silent for so long is asked first whether it is still there: of what
# is sent into a dead one nobody knows whether it began.
FRESH_S = 10.0
ANSWER_S = 3.0
# More is sent by a thread of its own, since it could have to wait.
LIGHT_BYTES = 4096
_PROGRAM = (
    "hvd_elastic.hosts.programs.end_processes", "hvd_elastic.hosts.programs.pass_input", "hvd_elastic.hosts.programs.hold_command", "hvd_elastic.hosts.programs.keep_wire", "hvd_elastic.hosts.programs.hold_in_turn", "hvd_elastic.hosts.programs.keep_commands",
)  # fmt: skip


class NotKeptError(HvdElasticError):
    """A host where no agent can be; a call goes there without one."""


class _Client:
    """A call, at the other end of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.commands: dict[int, tuple[_There, int]] = {}
        self._unsent: list[bytes] = []
        self._ended = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> None:
        with self._changed:
            if not self._ended:
                self._unsent.append(data)
                self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def send_all(self) -> None:
        """Until :meth:`end`; in a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._ended)
                if self._ended:
                    return
                data, self._unsent = b"".join(self._unsent), []
            try:
                self.sock.sendall(data)
            except OSError:
                return


@dataclass(frozen=True)
class _Command:
    """A command on a host: whose it is, its number there, what the host may say."""

    client: _Client
    number: int
    bounds: Bounds = field(default_factory=Bounds)


class _There:
    """A host's agent, at the other end of a connection.

    Attributes:
        commands: by their numbers here.
        waiting: numbers of commands that nothing has been sent of yet.
    """

    def __init__(self, connection: Connection, take: Callable[[_There, bytes], None]) -> None:
        self.commands: dict[int, _Command] = {}
        self.waiting: set[int] = set()
        self.next_number = 1
        self.heard_at = time.monotonic()
        self.ready = threading.Event()
        self._frames = Frames(WINDOW_BYTES)
        self._begins = b""
        self.ended = False
        self._connection = connection
        self._unsent: list[bytes] = []
        self._asked = False
        self._sending = False
        self._lock = threading.Lock()
        self.process = start_program(connection, _PROGRAM, on_stdout=lambda data: take(self, data))

    def find_frames(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """In what has come, once the agent is there.

        Raises:
            ValueError: it is no agent of ours.
        """
        if not self.ready.is_set():
            before, mark, data = (self._begins + data).partition(MARK)
            if not mark:
                self._begins = before[-len(MARK) :]
                return []
            self.ready.set()
        return self._frames.feed(data)

    def ask(self) -> None:
        """Sends nothing but a question until :meth:`answered`; gives it up after a while."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
        self._write(frame(keep_wire.PING))
        timer = threading.Timer(ANSWER_S, self._give_up)
        timer.daemon = True
        timer.start()

    def answered(self) -> None:
        self.heard_at = time.monotonic()
        if self._asked:
            with self._lock:
                self._asked = False
            self.waiting.clear()
            self.send(b"")

    def send(self, data: bytes) -> None:
        """Sends in the order of calls; does not wait for a host that reads no more."""
        with self._lock:
            if data:
                self._unsent.append(data)
            if self._asked or self._sending or not self._unsent:
                return
            self._sending = True
            light = sum(map(len, self._unsent)) <= LIGHT_BYTES
        if light:
            self._send_all()
        else:
            threading.Thread(target=self._send_all, name="to an agent", daemon=True).start()

    def wait(self) -> None:
        """Until the agent has ended, or the connection to it is lost."""
        self.process.wait()
        self.ended = True
        self.ready.set()

    def close(self) -> None:
        """The agent ends, and with it every command."""
        self._connection.close()

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._sending = False
                    return
                data, self._unsent = b"".join(self._unsent), []
            self._write(data)

    def _write(self, data: bytes) -> None:
        # Who waits for the end of the process tells everybody that the connection is gone.
        with contextlib.suppress(OSError, EOFError):
            self.process.stdin.write(data)

    def _give_up(self) -> None:
        if self._asked:
            self.close()


class Keeper:
    """The agents and the calls of one user; ends its process when there are none.

    Args:
        first_call_s: how long it waits for the first call.
    """

    def __init__(self, first_call_s: float) -> None:
        self._lock = threading.Lock()
        self._agents: dict[bytes, _There] = {}
        self._opening: dict[bytes, threading.Lock] = {}
        self._openings = 0
        # Where no agent can be, and until when none is tried again.
        self._hopeless: dict[bytes, float] = {}
        self._clients: set[_Client] = set()
        self._stopping: list[socket.socket] = []
        self._stops = False
        self._end_if_idle_in(first_call_s)

    def admit(self, sock: socket.socket) -> None:
        """A call begins, at the other end of that socket."""
        client = _Client(sock)
        with self._lock:
            self._clients.add(client)
            client.put(frame(keep_wire.LIVE, 0, b"" if self._stops else b"".join(self._agents)))
        threading.Thread(target=client.send_all, name="to a call", daemon=True).start()
        threading.Thread(target=self._serve, args=(client,), name="a call", daemon=True).start()

    def stop(self, asking: socket.socket) -> None:
        """Every agent ends as soon as it has no command.

        Args:
            asking: hears at once where calls go on, else by the end of this process.
        """
        with self._lock:
            self._stops = True
            self._stopping.append(asking)
            agents = list(self._agents.values())
            goes_on = bool(self._clients or self._openings)
        if goes_on:
            with contextlib.suppress(OSError):
                asking.send(keep_socket.STOP)
        for agent in agents:
            # Each takes a moment, and many are many moments.
            threading.Thread(target=self._close_if_idle, args=(agent,), daemon=True).start()
        self._end_if_idle()

    def _serve(self, client: _Client) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := client.sock.recv(CHUNK_BYTES):
                for kind, number, payload in frames.feed(data):
                    self._obey(client, kind, number, payload)
        client.end()
        with self._lock:
            self._clients.discard(client)
            left = list(client.commands.values())
        client.sock.close()
        for agent, number in left:
            # Its holder ends the command.
            agent.send(frame(keep_wire.FORGET, number))
        self._end_if_idle()

    def _obey(self, client: _Client, kind: int, number: int, payload: bytes) -> None:
        if kind == keep_wire.OPEN:
            with self._lock:
                self._openings += 1
            arguments = (client, number, json.loads(payload))
            threading.Thread(target=self._open, args=arguments, name="open", daemon=True).start()
        elif kind == keep_wire.START:
            self._start(client, number, payload[:KEY_BYTES], payload[KEY_BYTES:])
        else:
            with self._lock:
                place = client.commands.get(number)
                if place is not None:
                    place[0].commands[place[1]].bounds.note(kind, payload)
            if place is not None:
                place[0].send(frame(kind, place[1], payload))

    def _start(self, client: _Client, number: int, key: bytes, payload: bytes) -> None:
        with self._lock:
            agent = self._agents.get(key)
            if agent is None or self._stops:
                client.put(frame(keep_wire.GONE, number))
                return
            there = agent.next_number
            agent.next_number += 1
            agent.commands[there] = _Command(client, number)
            client.commands[number] = (agent, there)
            stale = time.monotonic() - agent.heard_at > FRESH_S
            if stale:
                agent.waiting.add(there)
        if stale:
            agent.ask()
        agent.send(frame(keep_wire.START, there, payload))

    def _hear(self, agent: _There, data: bytes) -> None:
        """What an agent says; in a thread of its connection."""
        said: dict[_Client, list[bytes]] = {}
        try:
            found = agent.find_frames(data)
            agent.answered()
            for kind, there, payload in found:
                with self._lock:
                    command = agent.commands.get(there)
                    if command is None:
                        continue
                    if not command.bounds.allow(kind, payload):
                        raise ValueError(f"a frame of kind {kind} that must not come")
                said.setdefault(command.client, []).append(frame(kind, command.number, payload))
                if kind == keep_wire.OVER:
                    self._forget(agent, there)
        except ValueError:
            # Its commands are told by whoever waits for its end; nothing more of it is read.
            agent.close()
            raise
        finally:
            for client, frames in said.items():
                client.put(b"".join(frames))

    def _forget(self, agent: _There, there: int) -> None:
        """A command is over."""
        with self._lock:
            command = agent.commands.pop(there)
            command.client.commands.pop(command.number, None)
        self._close_if_idle(agent)

    def _close_if_idle(self, agent: _There) -> None:
        with self._lock:
            ends = self._stops and not agent.commands
        if ends:
            agent.close()

    # ---- connections

    def _open(self, client: _Client, number: int, wanted: dict[str, Any]) -> None:
        """Connects to a host, and stays with it as long as it is kept."""
        key = bytes.fromhex(wanted["key"])
        agent = None
        try:
            with self._lock:
                lock = self._opening.setdefault(key, threading.Lock())
            with lock:
                if self._stops or time.monotonic() < self._hopeless.get(key, 0.0):
                    raise NotKeptError
                if key not in self._agents:
                    agent = self._connect(key, wanted)
                    with self._lock:
                        self._agents[key] = agent
                    if agent.ended:
                        self._lose(key, agent)
            client.put(frame(keep_wire.OPENED, number))
        except Exception as error:  # noqa: BLE001  # whatever it is, a call waits for the answer
            text = f"{type(error).__name__} {error}"
            client.put(frame(keep_wire.FAILED, number, text.encode("utf-8", "replace")))
        finally:
            with self._lock:
                self._openings -= 1
        if agent is not None:
            self._close_if_idle(agent)
        self._end_if_idle()

    def _connect(self, key: bytes, wanted: dict[str, Any]) -> _There:
        name, user, port = wanted["host"]
        config, identity = (
            None if wanted[part] is None else Path(wanted[part])
            for part in ("config_path", "identity")
        )
        options = SshOptions(config, wanted["connect_timeout_s"], identity=identity)
        connection = connect(Host(name, user=user, port=port), options)
        try:
            agent = _There(connection, self._hear)
            threading.Thread(
                target=self._await_end, args=(key, agent), name="an agent's end", daemon=True
            ).start()
            in_time = agent.ready.wait(START_S)
            if not in_time or agent.ended:
                # Unless only the connection was lost, who asks again is told at once.
                if not in_time or agent.process.wait() >= 0:
                    self._hopeless[key] = time.monotonic() + wanted["keep_s"]
                    self._end_if_idle_in(wanted["keep_s"])
                raise NotKeptError
        except BaseException:
            connection.close()
            raise
        return agent

    def _await_end(self, key: bytes, agent: _There) -> None:
        # Where there is no Python it ends, and does not get ready.
        agent.wait()
        self._lose(key, agent)
        self._end_if_idle()

    def _lose(self, key: bytes, agent: _There) -> None:
        """Its connection is gone, or it had nothing to do for long enough."""
        with self._lock:
            if self._agents.get(key) is not agent:
                return  # it is not there yet, or not any more
            del self._agents[key]
            lost = list(agent.commands.items())
            for _, command in lost:
                command.client.commands.pop(command.number, None)
        agent.close()
        for there, command in lost:
            if there in agent.waiting:
                command.client.put(frame(keep_wire.GONE, command.number))
            else:
                command.client.put(frame(keep_wire.EXIT, command.number, pack_number(-1)))
                command.client.put(frame(keep_wire.DRAINED, command.number))

    def _end_if_idle_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end_if_idle)
        timer.daemon = True
        timer.start()

    def _end_if_idle(self) -> None:
        with self._lock:
            remembers = not self._stops and any(
                time.monotonic() < until for until in self._hopeless.values()
            )
            if not (self._clients or self._agents or self._openings or remembers):
                os._exit(0)
