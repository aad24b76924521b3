"""First steps of a process that was forked from a rank, or from an input host, to read."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path


class WorkerStart:
    """``worker_init_fn`` that closes the rank's inherited connections, then calls the script's.

    A loader process is forked from the rank and inherits its connections to the other ranks. They
    would stay open after the rank has died, until the loader process ends too (PyTorch checks every
    5 s), and also after the rank has closed its end.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        # Process id of the rank if its main thread starts the process, else None: the kernel's
        # death signal follows the forking *thread*, and only the main one lasts as long as the
        # process.
        self.parent: int | None = None
        self.set_parent()

    def set_parent(self) -> None:
        """Note that this thread is about to start processes."""
        is_main = threading.current_thread() is threading.main_thread()
        self.parent = os.getpid() if is_main else None

    def __call__(self, worker_id: int) -> None:
        if self.parent is not None:
            _die_with(self.parent)
        _release_inherited_connections()
        if self._then is not None:
            self._then(worker_id)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with(parent: int) -> None:
    """Have the kernel end this process as soon as the rank has died."""
    if os.getppid() != parent:  # started by a fork server, which does not die with the rank
        return
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux: PyTorch itself checks the parent every 5 s
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died just before prctl()
        os._exit(1)


def _release_inherited_connections() -> None:
    try:
        descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:  # not Linux
        return
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        if _is_tcp(descriptor):
            # /dev/null takes the number, so code that still uses it as a connection reads an end
            # of file instead of an unrelated file that reuses the number.
            os.dup2(null, descriptor)
    os.close(null)


def _is_tcp(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        inherited = socket.socket(fileno=descriptor)
    except OSError:  # closed already: the descriptor that listed the folder
        return False
    found = inherited.family in (socket.AF_INET, socket.AF_INET6) and (
        inherited.type == socket.SOCK_STREAM
    )
    inherited.detach()
    return found
