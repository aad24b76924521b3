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
_APART_S = 0.9
"""Least time between two keepers of another user, each of which needs a decision [s]."""
_BYTES_S, _MOST_BYTES = 2 << 20, 16 << 20
"""Bytes per second that the daemon reads of another user's keeper, and at once after a silence: it
has other work. What is more waits at the keeper."""
_MOST_AT_ONCE = 64
"""Connections that are taken or closed at once."""


class _OtherKeeper:
    """A keeper of another user.

    Attributes:
        is_read: whether it may say more now.
    """

    def __init__(self, connection: socket.socket, user: int) -> None:
        self.link: Link[FromKeeper] = Link(
            connection, FromKeeper, f"the keeper of {user_words(user)}"
        )
        self._at = time.monotonic()
        self.is_read = True
        self._left, self._counted = float(_MOST_BYTES), 0

    def count(self) -> bool:
        """Count what it has said; return whether it may say more now."""
        now = time.monotonic()
        said = self.link.received - self._counted
        self._left = min(_MOST_BYTES, self._left + (now - self._at) * _BYTES_S) - said
        self._at, self._counted = now, self.link.received
        return self._left > 0


class Keepers:
    """The keepers of all users.

    Args:
        begin_leader: starts a leader, in the keeper of the daemon's user.
        server: has ``read`` called when a keeper says something, comes or goes.
        warn: called with a user and what is wrong with the user's keeper.
    """

    def __init__(
        self,
        place: ClusterFolder,
        begin_leader: BeginLeader,
        server: RequestServer,
        read: Callable[[], object],
        warn: Callable[[int, str], None],
    ) -> None:
        self._server, self._read, self._warn = server, read, warn
        self._own = OwnKeeper(begin_leader, server, read)
        self._others: dict[int, _OtherKeeper] = {}
        self._came_at: dict[int, float] = {}
        """When the last keeper of each user came [s, monotonic]."""
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
        elif (other := self._others.get(user)) is not None:
            other.link.send(*messages)
            if other.link.unsent > _MOST_UNSENT:
                self.drop(user, "takes nothing any more")

    def send_rest(self) -> None:
        """Send what keepers could not take before, and let those say more that could not."""
        for user in (None, *self._others):
            self.send(user)
        for other in self._others.values():
            if not other.is_read and other.count():
                other.is_read = True
                self._server.watch(other.link.fileno(), self._read)

    def receive(self) -> list[tuple[int | None, FromKeeper]]:
        """Return what keepers have said, with their users."""
        found: list[tuple[int | None, FromKeeper]] = []
        told = self._own.receive()
        if told is None:
            self._moved.append(None)
        found += [(None, message) for message in told or ()]
        for user, other in list(self._others.items()):
            if not other.is_read:
                continue
            try:
                told = other.link.receive()
            except ProtocolError as error:
                self.drop(user, str(error))
                continue
            if told is None:
                self.drop(user, "")
            elif not other.count():
                other.is_read = False
                self._server.unwatch(other.link.fileno())
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
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _address = self._listener.accept() if self._listener else (None, None)
            except OSError:  # there are no more
                return
            if connection is None:
                return
            user = peer_uid(connection)
            now = time.monotonic()
            is_soon = now - self._came_at.get(user, -_APART_S) < _APART_S
            is_one_more = user == os.getuid() or user in self._others
            if is_soon or is_one_more or not may_use(connection, self._group):
                connection.close()  # its keeper tries again
                continue
            connection.setblocking(False)
            self._came_at[user] = now
            self._others[user] = _OtherKeeper(connection, user)
            self._server.watch(connection.fileno(), self._read)
            self._moved.append(user)

    def drop(self, user: int, why: str) -> None:
        """Close the connection to the keeper of a user; ``why`` is a fault of it, or empty."""
        if (other := self._others.pop(user, None)) is None:
            return  # it took nothing, so it was sent away already
        if why:
            self._warn(user, f"is sent away: {why}")
        if other.is_read:
            self._server.unwatch(other.link.fileno())
        other.link.close()
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
