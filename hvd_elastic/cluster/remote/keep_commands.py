"""Stays on a host after a call of ``runclust --keep``, so that the next one begins at once.

It speaks frames (``keep_wire``) on its stdin and stdout, which are an ssh channel: there is no port
and no file. Each command gets a holder of its own (``hold_command``), forked from this process. It
ends with the channel, and by itself when no command has run for the time it was told.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import signal
import time

from hvd_elastic.cluster.remote.hold_command import main as hold_command
from hvd_elastic.cluster.remote.keep_wire import (
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
# After so long without anything to do, the holder of the next command is made ready: when a call of
# many hosts is over everywhere, since hosts may share cores.
LULL_S = 0.5
# Until it is told how long to stay.
FIRST_KEEP_S = 60.0
# poll(2) knows no more than 24 days.
LONGEST_S = 86400.0
CANNOT_EXECUTE = 126
HEAD_BYTES = 4


class Held:
    """A command's holder: its process and its three pipes (-1: closed)."""

    def __init__(self, pid: int, way_in: int, out: int, err: int) -> None:
        self.number = 0
        self.pid = pid
        self.way_in = way_in
        self.outputs = {OUT: out, ERR: err}
        self.waiting = b""
        self.room = WINDOW_BYTES
        self.ended = False
        self.forgotten = False

    @property
    def descriptors(self) -> list[int]:
        return [self.way_in, *self.outputs.values()]

    @property
    def drained(self) -> bool:
        return max(self.outputs.values()) < 0

    def tell(self, what: bytes) -> bool:
        """Has it begin; False: it is not there any more."""
        data = memoryview(len(what).to_bytes(HEAD_BYTES, "big") + what)
        try:
            while data:
                data = data[os.write(self.way_in, data) :]
        except OSError:
            return False
        return True

    def close_input(self) -> None:
        """If the command still runs, its holder ends it."""
        if self.way_in >= 0:
            os.close(self.way_in)
            self.way_in, self.waiting = -1, b""

    def close_output(self, kind: int) -> None:
        if self.outputs[kind] >= 0:
            os.close(self.outputs[kind])
            self.outputs[kind] = -1

    def forget(self) -> None:
        """Nobody listens any more."""
        self.close_input()
        for kind in self.outputs:
            self.close_output(kind)
        self.forgotten = True


class Agent:
    """Serves one keeper until that goes away, or nothing has been asked for long enough."""

    def __init__(self) -> None:
        # What this loads, holders need not.
        pwd.getpwuid(os.getuid())
        self._held: dict[int, Held] = {}
        self._spare: Held | None = None
        self._frames = Frames()
        self._unsent = b""
        self._send_at = 0.0
        self._keep_s = FIRST_KEEP_S
        self._idle_since = time.monotonic()
        self._child_ended, tell_end = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(tell_end, False)
        signal.set_wakeup_fd(tell_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

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
                if held.way_in in events:
                    self._pass_input(held)
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
            if held.waiting:
                poll.register(held.way_in, select.POLLOUT)
            if held.room > 0:
                for descriptor in held.outputs.values():
                    if descriptor >= 0:
                        poll.register(descriptor, select.POLLIN)
        if self._unsent:
            return dict(poll.poll(max(0.0, self._send_at - time.monotonic()) * 1000))
        if self._held:
            return dict(poll.poll())
        if self._spare is None:
            events = dict(poll.poll(LULL_S * 1000))
            if not events:
                self._spare = self._fork()
            return events
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
            written = os.write(held.way_in, held.waiting)
        except BlockingIOError:
            return
        except OSError:
            held.close_input()
            return
        held.waiting = held.waiting[written:]
        self._say(ROOM, held.number, pack_number(written))

    def _reap(self) -> None:
        for held in self._held.values():
            if held.ended:
                continue
            pid, status = os.waitpid(held.pid, os.WNOHANG)
            if pid:
                code = -1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                held.ended = True
                self._say(EXIT, held.number, pack_number(code))

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
        if kind == INPUT and held.way_in >= 0:
            held.waiting += payload
        elif kind == ROOM:
            held.room += unpack_number(payload)
        elif kind == CLOSE:
            held.close_input()
        elif kind == FORGET:
            held.forget()

    def _start(self, number: int, payload: bytes) -> None:
        keep_s = json.loads(payload)["keep_s"]
        if keep_s is not None:
            self._keep_s = keep_s
        held, self._spare = self._spare or self._fork(), None
        if not held.tell(payload):
            # Somebody killed it while it waited, and nothing has begun.
            held.forget()
            os.waitpid(held.pid, 0)
            held = self._fork()
            held.tell(payload)
        self._held[number] = held
        held.number = number
        os.set_blocking(held.way_in, False)

    def _fork(self) -> Held:
        """A process that waits to be told what to hold."""
        inside, way_in = os.pipe()
        out, to_out = os.pipe()
        err, to_err = os.pipe()
        others = [each for held in self._held.values() for each in held.descriptors]
        highest = max(inside, to_out, to_err, *others)
        pid = os.fork()
        if pid == 0:
            try:
                become((inside, to_out, to_err), highest)
            finally:
                os._exit(CANNOT_EXECUTE)
        for descriptor in (inside, to_out, to_err):
            os.close(descriptor)
        return Held(pid, way_in, out, err)

    def _say(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        if not self._unsent:
            self._send_at = time.monotonic() + GATHER_S
        self._unsent += frame(kind, number, payload)

    def _send(self) -> None:
        data = memoryview(self._unsent)
        while data:
            data = data[os.write(1, data) :]
        self._unsent = b""


def become(pipes: tuple[int, int, int], highest: int) -> None:
    """In the child: a holder, with no descriptor open but its pipes; no higher one is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in enumerate(pipes):
        os.dup2(descriptor, target)
    # Another holder's stdin held open here would keep its command alive.
    os.closerange(3, highest + 1)
    what = json.loads(read_exactly(int.from_bytes(read_exactly(HEAD_BYTES), "big")))
    if what["argv"]:
        os.execvp(what["argv"][0], what["argv"])
    hold_command(*what["hold"])


def read_exactly(size: int) -> bytes:
    """So many bytes of stdin; the process ends where there are no more."""
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(0)
    return data


def main() -> None:
    """Serves until it is time to end."""
    try:
        Agent().serve()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    # Holders end their commands when the pipes close with this process.
    os._exit(0)
