"""Find the sockets of a ring and shut them down, which makes its collectives fail at once.

Gloo has no function that aborts a collective. A socket that this process shuts down looks to Gloo
as if the peer had closed it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_REPEAT_S = 0.05
"""Time between two shutdowns of the sockets of a ring that is being built and opens more."""


class RingSockets:
    """The sockets that this process opened while its ring was built."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: set[str] = set()
        self._store: tuple[str, int] | None = None
        self._made = threading.Event()
        self._made.set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Record the sockets that are opened in this context as those of the ring."""
        if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
            port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
            self._store = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port)
        self._before = set(_sockets().values())
        self._made.clear()
        try:
            yield
        finally:
            self._own = set(_sockets().values()) - self._before
            self._made.set()

    def abort(self) -> None:
        """Shut the sockets down; if the ring is being built, repeat until it is built.

        Thread-safe.
        """

        def repeat() -> None:
            while not self._made.wait(_REPEAT_S):
                self.shut()
            self.shut()

        self.shut()
        if not self._made.is_set():
            threading.Thread(target=repeat, name="hvd_elastic-abort", daemon=True).start()

    def shut(self) -> None:
        """Shut down the sockets that are open now."""
        made = self._made.is_set()
        for descriptor, name in _sockets().items():
            if name not in self._own if made else name in self._before:
                continue
            with contextlib.suppress(OSError):
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate:
                    # The descriptor may have been closed and reused since it was listed.
                    if _target(duplicate.fileno()) != name or (
                        duplicate.family not in (socket.AF_INET, socket.AF_INET6)
                    ):
                        continue
                    # The rendezvous store ends its requests by itself, and Horovod would repeat a
                    # broken request after 0.5 s.
                    if not made and self._store and _peer(duplicate) == self._store:
                        continue
                    duplicate.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return ``socket:[inode]`` by descriptor of every open socket of this process."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = _target(int(entry.name))
            if target.startswith("socket:"):
                found[int(entry.name)] = target
    return found


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    """Return address and port of the peer; None if not connected."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return None
    return address, port


def _target(descriptor: int) -> str:
    # Training is paused meanwhile, and Path takes two and a half times as long.
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
