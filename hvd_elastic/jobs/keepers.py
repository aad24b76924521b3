"""The keepers of a cluster, as the daemon sees them: it starts that of its own user."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from hvd_elastic.jobs.keeper import BeginLeader, FromKeeper, Keeper, Link
from hvd_elastic.jobs.server import RequestServer

_AGAIN_S = 1.0
"""Time until a keeper that has ended is replaced [s]."""


class OwnKeeper:
    """The keeper of the daemon's user, a child of the daemon that ends with it.

    Args:
        begin_leader: starts a leader, in the keeper.
        server: has ``read`` called when the keeper says something.
    """

    def __init__(
        self, begin_leader: BeginLeader, server: RequestServer, read: Callable[[], object]
    ) -> None:
        self._begin_leader = begin_leader
        self._server, self._read = server, read
        self._start()

    def send(self, *messages: object) -> None:
        """Send messages to the keeper; without any, what it could not take before."""
        self._link.send(*messages)

    def receive(self) -> list[FromKeeper] | None:
        """Return what the keeper has said; None: it has ended, and another one was started.

        Raises:
            ProtocolError: what it said is no message.
        """
        found = self._link.receive()
        if found is not None:
            return found
        self.close()
        time.sleep(max(0.0, self._began_at + _AGAIN_S - time.monotonic()))
        self._start()
        return None

    def close(self) -> None:
        """End the keeper; the leaders go on."""
        self._server.unwatch(self._link.fileno())
        self._link.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._child, 0)

    def _start(self) -> None:
        self._began_at = time.monotonic()
        here, there = socket.socketpair()
        here.setblocking(False)
        _flush()
        self._child = os.fork()
        if not self._child:
            _be_keeper(there, self._begin_leader)
        there.close()
        self._link: Link[FromKeeper] = Link(here, FromKeeper, "a keeper")
        self._server.watch(here.fileno(), self._read)


def _be_keeper(connection: socket.socket, begin_leader: BeginLeader) -> None:
    """Be the keeper in a process that was just forked from the daemon, and end it."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()  # Ctrl-C is for the daemon
        number = connection.fileno()
        # The lock, the socket and the database stay the daemon's alone.
        os.closerange(3, number)
        os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))
        Keeper(connection, begin_leader).serve()
        status = 0
    except BaseException:  # noqa: BLE001  (a forked child must not return into its parent's code)
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its file may be on a disk that is full
            stream.flush()
