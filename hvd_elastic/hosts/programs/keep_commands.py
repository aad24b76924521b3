"""Stays on a host after a call of ``runclust --keep``, so that the next one begins at once.

It speaks frames (``keep_wire``) on its stdin and stdout, which are an ssh channel: there is no port
and no file. Each command has a holder (``hold_in_turn``), forked from this process, which is kept
for the next one. It ends with the channel, and by itself when no command has run for the time it
was told.

Imports what is built into every Python: on many hosts at a time on one machine, what this loads is
most of what the first call costs.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal loads enum
import _socket
import marshal
import os
import pwd
import select
import time

from hvd_elastic.hosts.programs.hold_in_turn import LOST, SIGCHLD, TWO, Turns
from hvd_elastic.hosts.programs.keep_wire import (
    CLOSE,
    DRAINED,
    ERR,
    EXIT,
    FORGET,
    INPUT,
    MARK,
    OUT,
    OVER,
    PING,
    PONG,
    ROOM,
    START,
    WINDOW_BYTES,
    Frames,
    frame,
    pack_number,
    unpack_number,
)

READ_BYTES = 1 << 16
# The first piece of output waits so long for more, to travel together.
GATHER_S = 0.004
# Until it is told how long to stay.
FIRST_KEEP_S = 60.0
# poll(2) knows no more than 24 days.
LONGEST_S = 86400.0
CLOSED = -1


class Holder:
    """A process that holds commands, and the socket to it.

    Attributes:
        ends: whether it holds no other command after this one.
    """

    def __init__(self, pid: int, sock: _socket.socket, ends: bool) -> None:
        self.pid = pid
        self.sock = sock
        self.ends = ends
        self.frames = Frames()

    def tell(self, payload: bytes, outputs: tuple[int, int]) -> bool:
        """Has it begin; False: it is not there any more."""
        data = frame(START, 0, payload)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, TWO.pack(*outputs))
        try:
            self.sock.sendall(data[self.sock.sendmsg([data], [rights]) :])
        except OSError:
            return False
        return True


class Held:
    """A command: its holder, and the two pipes that it writes to (CLOSED where there is none)."""

    def __init__(self, number: int, holder: Holder, feeds: bool, out: int, err: int) -> None:
        self.number = number
        self.holder = holder
        self.feeds = feeds
        self.outputs = {OUT: out, ERR: err}
        self.waiting = b""
        self.room = WINDOW_BYTES
        self.ended = False
        self.forgotten = False

    @property
    def drained(self) -> bool:
        return max(self.outputs.values()) < 0

    def close_input(self) -> None:
        """If the command still runs, its holder ends it."""
        self.waiting, self.feeds = b"", False
        if not self.ended:
            self.holder.ends = True
            try:  # noqa: SIM105  # contextlib is slow to load
                self.holder.sock.shutdown(_socket.SHUT_WR)
            except OSError:
                pass

    def close_output(self, kind: int) -> None:
        if self.outputs[kind] >= 0:
            os.close(self.outputs[kind])
            self.outputs[kind] = CLOSED

    def forget(self) -> None:
        """Nobody listens any more."""
        self.close_input()
        for kind in self.outputs:
            self.close_output(kind)
        self.forgotten = True


class Agent:
    """Serves one keeper until that goes away, or nothing has been asked for long enough."""

    def __init__(self) -> None:
        self._account = pwd.getpwuid(os.getuid())
        self._held: dict[int, Held] = {}
        self._idle: Holder | None = None
        self._frames = Frames()
        self._unsent = b""
        self._send_at = 0.0
        self._keep_s = FIRST_KEEP_S
        self._idle_since = time.monotonic()
        self._child_ended, tell_end = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(tell_end, False)
        _signal.set_wakeup_fd(tell_end, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Returns when it is time to end."""
        self._unsent = MARK
        self._send()
        while True:
            events = self._wait()
            if events is None:
                return
            self._pass_output(events)
            if self._child_ended in events:
                os.read(self._child_ended, READ_BYTES)
                self._reap()
            for held in self._held.values():
                # The holder of one that has ended, but is not drained, may hold another.
                happened = 0 if held.ended else events.get(held.holder.sock.fileno(), 0)
                if happened:
                    if happened & select.POLLOUT:
                        self._pass_input(held)
                    if happened & ~select.POLLOUT:
                        self._hear(held)
            if 0 in events:
                data = os.read(0, READ_BYTES)
                if not data:
                    return
                for kind, number, payload in self._frames.feed(data):
                    self._obey(kind, number, payload)
            full = len(self._unsent) >= READ_BYTES
            if self._drop_done() or full or (self._unsent and time.monotonic() >= self._send_at):
                self._send()

    def _wait(self) -> dict[int, int] | None:
        """What is ready; None when it is time to end."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        for held in self._held.values():
            if not held.ended:
                # Where it ends with this command, its end is heard as that of a process.
                wanted = 0 if held.holder.ends else select.POLLIN
                wanted |= select.POLLOUT if held.waiting else 0
                if wanted:
                    poll.register(held.holder.sock.fileno(), wanted)
            if held.room > 0:
                for descriptor in held.outputs.values():
                    if descriptor >= 0:
                        poll.register(descriptor, select.POLLIN)
        if self._unsent:
            return dict(poll.poll(max(0.0, self._send_at - time.monotonic()) * 1000))
        if self._held:
            return dict(poll.poll())
        left_s = self._idle_since + self._keep_s - time.monotonic()
        return dict(poll.poll(min(left_s, LONGEST_S) * 1000)) if left_s > 0 else None

    def _pass_output(self, events: dict[int, int]) -> None:
        for held in self._held.values():
            for kind, descriptor in held.outputs.items():
                if descriptor not in events or held.room <= 0:
                    continue
                data = os.read(descriptor, min(READ_BYTES, held.room))
                if data:
                    held.room -= len(data)
                    self._say(kind, held.number, data)
                    continue
                held.close_output(kind)
                if held.drained:
                    self._say(DRAINED, held.number)

    def _pass_input(self, held: Held) -> None:
        try:
            written = held.holder.sock.send(held.waiting)
        except BlockingIOError:
            return
        except OSError:
            held.close_input()
            return
        held.waiting = held.waiting[written:]
        self._say(ROOM, held.number, pack_number(written))

    def _hear(self, held: Held) -> None:
        """What its holder says."""
        try:
            data = held.holder.sock.recv(READ_BYTES)
        except OSError:
            data = b""
        held.holder.ends = held.holder.ends or not data
        for kind, _, payload in held.holder.frames.feed(data):
            self._say(kind, held.number, payload)
            if kind == EXIT:
                held.ended = True
                self._keep_idle(held.holder)

    def _keep_idle(self, holder: Holder) -> None:
        if self._idle is None:
            self._idle = holder
        else:
            holder.sock.close()

    def _reap(self) -> None:
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._bury(*found)
        except ChildProcessError:
            pass

    def _bury(self, pid: int, status: int) -> None:
        """A holder has ended, as a rule with its command."""
        for held in self._held.values():
            if held.holder.pid == pid and not held.ended:
                self._hear(held)
                if not held.ended:
                    code = -1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                    self._say(EXIT, held.number, pack_number(code))
                    held.ended = True
                    held.holder.sock.close()
        if self._idle is not None and self._idle.pid == pid:
            self._idle.sock.close()
            self._idle = None

    def _drop_done(self) -> bool:
        """Whether a command is over and everything about it said."""
        found = False
        for held in list(self._held.values()):
            if held.ended and (held.drained or held.forgotten):
                held.forget()
                del self._held[held.number]
                self._say(OVER, held.number)
                self._idle_since = time.monotonic()
                found = True
        return found

    def _obey(self, kind: int, number: int, payload: bytes) -> None:
        if kind == PING:
            self._say(PONG)
            self._send()
            return
        if kind == START:
            self._start(number, payload)
            return
        held = self._held.get(number)
        if held is None:
            return
        if kind == INPUT and held.feeds and not held.ended:
            held.waiting += payload
        elif kind == ROOM:
            held.room += unpack_number(payload)
        elif kind == CLOSE:
            held.close_input()
        elif kind == FORGET:
            held.forget()

    def _start(self, number: int, payload: bytes) -> None:
        what = marshal.loads(payload)  # noqa: S302  # of who may run here what he likes
        if what["keep_s"] is not None:
            self._keep_s = what["keep_s"]
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        if what["argv"]:
            holder = self._launch(what["argv"], to_out, to_err)
            feeds = True
        else:
            feeds = what["hold"][3]
            holder = self._tell(payload, (to_out, to_err))
        for descriptor in (to_out, to_err):
            os.close(descriptor)
        holder.sock.setblocking(False)
        self._held[number] = Held(number, holder, feeds, out, err)

    def _tell(self, payload: bytes, outputs: tuple[int, int]) -> Holder:
        """Has a holder begin, the one that is idle where there is one."""
        holder, self._idle = self._idle, None
        if holder is not None:
            holder.sock.setblocking(True)
            if holder.tell(payload, outputs):
                return holder
            # Somebody killed it, and nothing has begun.
            holder.sock.close()
        holder = self._fork()
        holder.tell(payload, outputs)
        return holder

    def _fork(self) -> Holder:
        ours, theirs = _socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                become_holder(theirs.fileno())
                Turns(self._account).serve()
            finally:
                os._exit(LOST)
        theirs.close()
        return Holder(pid, ours, ends=False)

    def _launch(self, argv: list[str], out: int, err: int) -> Holder:
        """A program that holds a command by itself."""
        ours, theirs = _socket.socketpair()
        pid = os.posix_spawnp(
            argv[0],
            argv,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, descriptor, target)
                for target, descriptor in enumerate((theirs.fileno(), out, err))
            ],
        )
        theirs.close()
        return Holder(pid, ours, ends=True)

    def _say(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        if not self._unsent:
            self._send_at = time.monotonic() + GATHER_S
        self._unsent += frame(kind, number, payload)

    def _send(self) -> None:
        data = memoryview(self._unsent)
        while data:
            data = data[os.write(1, data) :]
        self._unsent = b""


def become_holder(way_in: int) -> None:
    """In the child: nothing stays open but its stdin."""
    _signal.set_wakeup_fd(-1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for target, descriptor in enumerate((way_in, nothing, nothing)):
        os.dup2(descriptor, target)
    # The agent's stdout held open here would keep the channel, another holder's socket its command.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # pathlib is slow to load
        if int(name) > 2:
            try:  # noqa: SIM105  # contextlib is slow to load
                os.close(int(name))
            except OSError:
                pass


def main() -> None:
    """Serves until it is time to end."""
    try:
        Agent().serve()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    # Holders end their commands when their sockets close with this process.
    os._exit(0)
