"""Accept connections to a port that strangers reach as well.

A peer is a stranger until it has shown who it is, which takes one of ours some milliseconds.
Nothing that strangers do ends the loop or keeps others waiting for long: not too many are in their
handshake at a time, each has a time limit, and where there is no room the oldest is ended.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 30.0
"""Time limit for a peer to show who it is [s]."""
MOST_STRANGERS = 512
"""Most strangers at a time, since all hosts of a run may come at the same moment; fewer if this
process may open few files."""
GRACE_S = 0.5
"""Time for which nobody is ended to make room for others, who wait that long to be accepted [s]."""
_SHARE = 4
"""At most one file in so many is a stranger's."""
_PAUSE_S = 0.05
"""Time until another attempt to accept if files or threads are lacking [s]."""
_CLOSED = (errno.EBADF, errno.EINVAL)
"""Errors of a listening socket that was closed or shut down."""


def accept_peers(
    listener: socket.socket,
    admit: Callable[[socket.socket], Any],
    serve: Callable[[Any], None],
    refused: Callable[[Any, Exception], None] = lambda *_: None,
) -> None:
    """Accept connections, each in a thread of its own; returns when the listener is closed.

    Args:
        admit: returns the peer of a connection once it has shown who it is, or raises an exception.
        serve: called with the peer that ``admit`` returned.
        refused: called with the address and the exception if a connection is refused.
    """
    strangers = _Strangers()

    def meet(plain: socket.socket, address: Any) -> None:
        try:
            with strangers.counting(plain):
                peer = admit(plain)
        except Exception as error:  # noqa: BLE001  (whatever a stranger sends ends nothing)
            plain.close()
            refused(address, error)
            return
        serve(peer)

    while True:
        strangers.make_room()
        try:
            listener.settimeout(strangers.end_overdue())
            plain, address = listener.accept()
        except socket.timeout:  # noqa: UP041  (another exception before Python 3.10)
            continue
        except OSError as error:
            if listener.fileno() < 0 or error.errno in _CLOSED:
                return
            strangers.end_oldest()  # such as for lack of descriptors
            time.sleep(_PAUSE_S)
            continue
        try:
            strangers.count_new(plain)
            threading.Thread(target=meet, args=(plain, address), daemon=True).start()
        except (OSError, RuntimeError):  # no more descriptors, or threads
            strangers.remove(plain)
            plain.close()
            strangers.end_oldest()
            time.sleep(_PAUSE_S)


class _Strangers:
    """Connections whose peers have not shown yet who they are, in the order of their arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Descriptors of their own: TLS takes that of the socket away.
        self._ends: dict[int, socket.socket] = {}
        self._since: dict[int, float] = {}
        """When each has come [monotonic s], without those that were ended."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = files != resource.RLIM_INFINITY and files // _SHARE < MOST_STRANGERS
        self._most = max(1, files // _SHARE) if few else MOST_STRANGERS

    def count_new(self, plain: socket.socket) -> None:
        end = plain.dup()
        with self._changed:
            self._ends[id(plain)] = end
            self._since[id(plain)] = time.monotonic()

    @contextlib.contextmanager
    def counting(self, plain: socket.socket) -> Any:
        """Count it until the end of the context."""
        try:
            yield
        finally:
            self.remove(plain)

    def remove(self, plain: socket.socket) -> None:
        with self._changed:
            end = self._ends.pop(id(plain), None)
            self._since.pop(id(plain), None)
            self._changed.notify()
        if end is not None:
            end.close()

    def make_room(self) -> None:
        """Wait until there is room for one more; end the oldest if that takes too long."""
        with self._changed:
            while len(self._since) >= self._most:
                left_s = GRACE_S - self._age_s()
                if left_s <= 0:
                    self.end_oldest()
                else:
                    self._changed.wait(left_s)

    def end_oldest(self) -> None:
        """End the connection of the oldest; its thread then closes it."""
        with self._changed:
            for oldest in [*self._since][:1]:
                del self._since[oldest]
                with contextlib.suppress(OSError):
                    self._ends[oldest].shutdown(socket.SHUT_RDWR)

    def end_overdue(self) -> float | None:
        """End those whose time is over; return the time until the next one's is [s], if any."""
        with self._changed:
            while self._since:
                left_s = LIMIT_S - self._age_s()
                if left_s > 0:
                    return left_s
                self.end_oldest()
        return None

    def _age_s(self) -> float:
        return time.monotonic() - next(iter(self._since.values()))
