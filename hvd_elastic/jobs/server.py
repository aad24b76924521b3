"""Serves requests over a unix socket that its user, or a group, can reach; one message each way."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hvd_elastic.errors import HvdElasticError, RunError, StrangerError
from hvd_elastic.jobs.job import Answer, Request, encode_job
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.own_files import user_words
from hvd_elastic.programs.peers import peer_groups, peer_uid

_LARGEST_BYTES = 256 * 1024 * 1024
"""Largest request; a submission of 10,000 jobs is far smaller."""
_LARGEST_OF_OTHERS_BYTES = 16 * 1024 * 1024
"""The same for other users than the daemon's."""
_MOST_OF_OTHERS = 64
"""Connections of another user at a time: the daemon has few descriptors."""
_PATIENCE_S = 10.0
"""How long a client may take to send its request, or to read its answer [s]."""
_AT_ONCE = 0.0
"""Deadline of a client that makes room for others [monotonic s]."""
_FULL_S = 0.05
"""Time until another try to connect while too many others do [s]."""
_ANSWER_S = 60.0
"""Longest wait of a caller for the daemon [s]."""
_UNKNOWN_S = 0.5
"""Time until a daemon is asked again that does not know the answer yet [s]."""
_decoder = msgspec.json.Decoder(Request)


@dataclass
class _Client:
    socket: socket.socket
    user: int
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    answer: bytes | None = None
    refusal: Answer | None = None
    """Answer to whatever it asks; it is read all the same, since unread data would cut it short."""


class RefusedError(RunError):
    """The daemon has refused what was asked for."""


class RequestServer:
    """Accepts requests and passes them to ``handle``, all in the thread of the caller.

    Args:
        handle: answers a request of a user, who is given by id; an HvdElasticError is sent as the
            answer.
    """

    def __init__(self, place: ClusterFolder, handle: Callable[[Request, int], Answer]) -> None:
        self._handle = handle
        self._group = place.group
        self._selector = selectors.DefaultSelector()
        self._answered: set[int] = set()
        """Other users to whom an answer was given in this round."""
        self._listener = listen_in(place, "daemon.sock")
        self._selector.register(self._listener, selectors.EVENT_READ)

    def watch(self, descriptor: int, read: Callable[[], object]) -> None:
        """Have :meth:`serve` call ``read`` and return early when this descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def unwatch(self, descriptor: int) -> None:
        """Watch a descriptor no more, which is about to be closed."""
        self._selector.unregister(descriptor)

    def serve(self, timeout_s: float) -> None:
        """Serve what clients ask, and return after at most so long, or after something happened.

        Of each other user it is one request, so that none keeps the daemon from its other work.
        """
        self._answered.clear()
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Client):
                self._move_on(key.data)
            else:
                key.data()
        now, moved = time.monotonic(), {key.fd for key, _ in ready}
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client) and now > key.data.deadline:
                # It may be late because the daemon was stopped, or waited for its disk.
                if key.fd not in moved or key.data.deadline == _AT_ONCE:
                    self._drop(key.data)

    def close(self) -> None:
        """Stop listening, and close the connections of all clients."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client):
                self._drop(key.data)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        user = peer_uid(connection)
        if user != os.getuid():
            self._make_room(user)
        client = _Client(connection, user, time.monotonic() + _PATIENCE_S)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, client)
        if not may_use(connection, self._group):
            text = f"this daemon belongs to another user (id {os.getuid()}); you have id {user}"
            client.refusal = Answer(text, ok=False)

    def _make_room(self, user: int) -> None:
        """Have the oldest connection of a user dropped who has as many as one may have."""
        clients = [key.data for key in self._selector.get_map().values()]
        own = [each for each in clients if isinstance(each, _Client) and each.user == user]
        if len(own) >= _MOST_OF_OTHERS:
            min(own, key=lambda each: each.deadline).deadline = _AT_ONCE

    def _move_on(self, client: _Client) -> None:
        is_own = client.user == os.getuid()
        if client.answer is None and client.user in self._answered:
            return
        try:
            if client.answer is not None:
                sent = client.socket.send(client.answer)
                client.answer = client.answer[sent:]
                if not client.answer:
                    self._drop(client)
                return
            chunk = client.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        if client.refusal is None:
            client.received += chunk
        if len(client.received) > (_LARGEST_BYTES if is_own else _LARGEST_OF_OTHERS_BYTES):
            self._reply(client, Answer("the request is too large", ok=False))
        elif not chunk:
            self._answered |= set() if is_own else {client.user}
            self._reply(client, client.refusal or self._answer(client))

    def _answer(self, client: _Client) -> Answer:
        try:
            return self._handle(_decoder.decode(bytes(client.received)), client.user)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Answer(f"the request is not valid: {error}", ok=False)
        except HvdElasticError as error:
            return Answer(str(error), ok=False, exit_status=error.exit_status)
        except Exception as error:  # noqa: BLE001  # what one user asks must not end the daemon
            traceback.print_exc()
            return Answer(f"the request cannot be handled: {error!r}", ok=False)

    def _reply(self, client: _Client, answer: Answer) -> None:
        client.answer = msgspec.json.encode(answer)
        client.deadline = time.monotonic() + _PATIENCE_S
        self._selector.modify(client.socket, selectors.EVENT_WRITE, client)
        self._move_on(client)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.socket)
        client.socket.close()


def listen_in(place: ClusterFolder, name: str) -> socket.socket:
    """Return a socket in a cluster's folder at which its user, and its group, can connect.

    Raises:
        RunError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with place.socket_address(name) as address:
        with contextlib.suppress(FileNotFoundError):
            Path(address).unlink()  # of a daemon that was killed; the caller holds the lock
        before = os.umask(0o177)
        try:
            listener.bind(address)
            if place.group is not None:
                os.chown(address, -1, place.group)
                Path(address).chmod(0o660)
        except OSError as error:
            raise RunError(
                f"cannot make the socket of cluster {place.name} in {place.path}: {error.strerror}"
            ) from error
        finally:
            os.umask(before)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def may_use(connection: socket.socket, group: int | None) -> bool:
    """Return whether the peer of a connection is this user, or in the group of the cluster."""
    if peer_uid(connection) == os.getuid():
        return True
    return group is not None and group in peer_groups(connection)


def _connect(place: ClusterFolder) -> socket.socket:
    """Connect to a daemon, at which others may be waiting to be let in as well."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        try:
            return place.connect("daemon.sock", _ANSWER_S)
        except BlockingIOError:  # its backlog is full
            if time.monotonic() > deadline:
                raise
            time.sleep(_FULL_S)


def ask_daemon(place: ClusterFolder, request: Request) -> Answer:
    """Send a request to the daemon of a cluster and return its answer.

    Raises:
        RefusedError: it refused.
        UsageError: a word of the request is not UTF-8.
        RunError: there is no daemon, it does not answer, or it is another user's; to them nothing
            was sent.
    """
    ask = f"Start it with: hvd-elastic up HOSTFILE --name {place.name}"
    if place.is_others:
        owner = user_words(place.path.stat().st_uid)
        folder = place.path.resolve()  # not this user's link to it
        up = f"hvd-elastic up HOSTFILE --place {folder} --group GROUP"
        ask = f"Only {owner} can start it: {up}"
    asked = encode_job(request)
    try:
        with _connect(place) as connection:
            connection.sendall(asked)
            connection.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    except ConnectionResetError:
        received = b""  # it was killed
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise RunError(f"cluster {place.name} has no daemon. {ask}") from error
    except (PermissionError, StrangerError) as error:
        if place.shared and isinstance(error, StrangerError):
            raise RunError(str(error)) from error
        whose = f"{place.path} is theirs"
        do = "Submit from that account, or start a cluster of your own"
        if place.shared:
            found = place.path.stat()
            whose = f"{place.named} is that of {user_words(found.st_uid)} and a group (id "
            whose += f"{found.st_gid}) that you are not in, as far as this login goes"
            do = "See: id -G   and ask that user, or log in again if you were added to it"
        raise RunError(
            f"the daemon of cluster {place.name} belongs to another user: {whose}. {do}"
        ) from error
    except OSError as error:
        raise RunError(
            f"the daemon of cluster {place.name} does not answer ({error}); see {place.log}"
        ) from error
    if not received:
        raise RunError(
            f"the daemon of cluster {place.name} ended before it answered. {ask}   Then see with "
            "hvd-elastic queue whether it has done what you asked for"
        )
    answer = msgspec.json.decode(received, type=Answer)
    if answer.ask_again:
        time.sleep(_UNKNOWN_S)
        return ask_daemon(place, request)
    if not answer.ok:
        refusal = RefusedError(answer.message)
        refusal.exit_status = answer.exit_status
        raise refusal
    return answer
