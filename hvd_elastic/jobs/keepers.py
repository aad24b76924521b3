"""The keepers of a cluster, as the daemon sees them.

It starts that of its own user. Those of others are started by their ``submit``, and connect.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection

from hvd_elastic.jobs.keeper import BeginLeader, Keeper
from hvd_elastic.jobs.keeper_link import FromKeeper, Leave, Link
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import RequestServer, listen_in, may_use
from hvd_elastic.own_files import user_words
from hvd_elastic.programs.peers import peer_uid
from hvd_elastic.wire.framing import ProtocolError

_MOST_UNSENT = 64 << 20
"""Bytes that a keeper may leave unread."""
_AGAIN_S = 1.0
"""Time until a keeper that has ended is replaced [s]."""


class Keepers:
    """The keepers of all users.

    Args:
        begin_leader: starts a leader, in the keeper of the daemon's user.
        server: has ``read`` called when a keeper says something, comes or goes.
        warn: called with what is wrong with a keeper.
    """

    def __init__(
        self,
        place: ClusterFolder,
        begin_leader: BeginLeader,
        server: RequestServer,
        read: Callable[[], object],
        warn: Callable[[str], None],
    ) -> None:
        self._server, self._read, self._warn = server, read, warn
        self._own = OwnKeeper(begin_leader, server, read)
        self._others: dict[int, Link[FromKeeper]] = {}
        self._moved: list[int | None] = []
        self._group = place.group
        self._listener = None if self._group is None else listen_in(place, "keepers.sock")
        if self._listener is not None:
            server.watch(self._listener.fileno(), self._accept)

    @property
    def others(self) -> Collection[int]:
        """Users but the daemon's whose keepers are there."""
        return self._others.keys()

    def has(self, user: int | None) -> bool:
        """Return whether the keeper of a user is there; None is the daemon's user."""
        return user is None or user in self._others

    def send(self, user: int | None, *messages: object) -> None:
        """Send messages to the keeper of a user, if it is there."""
        if user is None:
            self._own.send(*messages)
        elif (link := self._others.get(user)) is not None:
            link.send(*messages)
            if link.unsent > _MOST_UNSENT:
                self.drop(user, "takes nothing any more")

    def send_rest(self) -> None:
        """Send what keepers could not take before."""
        for user in (None, *self._others):
            self.send(user)

    def receive(self) -> list[tuple[int | None, FromKeeper]]:
        """Return what keepers have said, with their users."""
        found: list[tuple[int | None, FromKeeper]] = []
        told = self._own.receive()
        if told is None:
            self._moved.append(None)
        found += [(None, message) for message in told or ()]
        for user, link in list(self._others.items()):
            try:
                told = link.receive()
            except ProtocolError as error:
                self.drop(user, str(error))
                continue
            if told is None:
                self.drop(user, "")
            found += [(user, message) for message in told or ()]
        return found

    def take_moved(self) -> list[int | None]:
        """Return the users whose keepers have come or gone since the last call."""
        found, self._moved = self._moved, []
        return found

    def dismiss(self, user: int) -> None:
        """End the keeper of a user, who has no job left."""
        self.send(user, Leave())
        self.drop(user, "")

    def close(self) -> None:
        """End the keeper of this user, and let the others wait for the next daemon."""
        for user in list(self._others):
            self.drop(user, "")
        if self._listener is not None:
            self._server.unwatch(self._listener.fileno())
            self._listener.close()
        self._own.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept() if self._listener else (None, None)
        except OSError:
            return
        if connection is None:
            return
        user = peer_uid(connection)
        if user == os.getuid() or user in self._others or not may_use(connection, self._group):
            connection.close()
            return
        connection.setblocking(False)
        self._others[user] = Link(connection, FromKeeper, f"the keeper of {user_words(user)}")
        self._server.watch(connection.fileno(), self._read)
        self._moved.append(user)

    def drop(self, user: int, why: str) -> None:
        """Close the connection to the keeper of a user; ``why`` is a fault of it, or empty."""
        if (link := self._others.pop(user, None)) is None:
            return  # it took nothing, so it was sent away already
        if why:
            self._warn(f"the keeper of {user_words(user)} is sent away: {why}")
        self._server.unwatch(link.fileno())
        link.close()
        self._moved.append(user)


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
        Keeper(begin_leader).serve(connection)
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
