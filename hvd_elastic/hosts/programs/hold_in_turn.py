"""Holds one command after the other (see ``hold_command``), as long as none leaves anything.

So a command costs no process but its own. One that leaves children in the background, or ends
before its input, is held for the last time: this process ends with it, and the children are
nobody's, as under ssh.

Stdin is a socket to the agent (``keep_commands``): ``START`` frames come in, each with the
descriptors of the command's stdout and stderr, and behind it the input, if there is any. ``EXIT``
or ``REFUSED`` goes out. The end of the socket: end the command.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal loads enum
import _socket
import marshal
import os
import select
import struct

from hvd_elastic.hosts.programs.hold_command import (
    PRCTL,
    SIGTERM,
    SUBREAPER,
    later,
    start,
    why_not,
)
from hvd_elastic.hosts.programs.keep_wire import (
    EXIT,
    HEAD,
    REASON_BYTES,
    REFUSED,
    frame,
    pack_number,
)

TYPE_CHECKING = False  # typing is slow to load
if TYPE_CHECKING:
    from pwd import struct_passwd
    from typing import NoReturn

    from hvd_elastic.hosts.programs.pass_input import Input

TWO = struct.Struct("@2i")
SIGCHLD = 17
LOST = 1


class Turns:
    """What stays from one command to the next.

    Args:
        account: the user's.
    """

    def __init__(self, account: struct_passwd) -> None:
        PRCTL(SUBREAPER, 1, 0, 0, 0)
        self._account = account
        self._agent = _socket.socket(fileno=os.dup(0))
        self._nothing = os.open("/dev/null", os.O_RDWR)
        self._here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        self._child_ended, tell_end = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(tell_end, False)
        _signal.set_wakeup_fd(tell_end, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, lambda *_: None)
        self._write_to(self._nothing, self._nothing)

    def serve(self) -> None:
        """Until the process ends."""
        while True:
            payload = self._receive()
            command, env, cwd, feeds, grace_s = marshal.loads(payload)["hold"]  # noqa: S302  # ours
            try:
                pid, way_in = start(self._account, command, env, cwd, feeds)
            except OSError as error:
                self._refuse(why_not(error))
            except ValueError as error:
                self._refuse(f"the command: {error}")
            if cwd:
                os.fchdir(self._here)
            self._hold(pid, later("pass_input")["Input"](way_in) if feeds else None, grace_s)

    def _receive(self) -> bytes:
        """What the next command is; its output goes where it says."""
        head, sent, _, _ = self._agent.recvmsg(HEAD.size, _socket.CMSG_SPACE(TWO.size))
        if not head:
            os._exit(0)
        outputs = TWO.unpack(sent[0][2])
        self._write_to(*outputs)
        for descriptor in outputs:
            os.close(descriptor)
        size, payload = HEAD.unpack(head)[2], b""
        while len(payload) < size:
            payload += self._agent.recv(size - len(payload)) or os._exit(0)
        return payload

    def _write_to(self, out: int, err: int) -> None:
        os.dup2(out, 1)
        os.dup2(err, 2)

    def _refuse(self, why: str) -> NoReturn:
        text = why.encode("utf-8", "replace")[:REASON_BYTES]
        self._agent.sendall(frame(REFUSED, 0, text))
        os._exit(LOST)

    def _hold(self, pid: int, given: Input | None, grace_s: float) -> None:
        """Returns when the command has ended and nothing of it is left."""
        code, goes_on = None, True
        while code is None and goes_on:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            if given is not None:
                given.register(poll)
            poll.register(self._child_ended, select.POLLIN)
            events = dict(poll.poll())
            if self._child_ended in events:
                os.read(self._child_ended, 1 << 10)
                code = self._reap(pid)
            elif given is None:
                goes_on = 0 not in events
            else:
                goes_on = given.step(events)
        if code is None:
            later("end_processes")["end_all"](grace_s)
            os._exit(128 + SIGTERM)
        if given is not None:
            if not given.complete:
                os._exit(code)
            given.close()
        self._write_to(self._nothing, self._nothing)
        self._agent.sendall(frame(EXIT, 0, pack_number(code)))

    def _reap(self, wanted: int) -> int | None:
        """The command's exit status once it has ended; the process ends if it has left children."""
        code = None
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == wanted:
                    by_signal = os.WIFSIGNALED(status)
                    code = os.WTERMSIG(status) + 128 if by_signal else os.WEXITSTATUS(status)
                elif pid == 0:
                    break
        except ChildProcessError:
            return code
        if code is not None:
            os._exit(code)
        return None
