"""``breakpoint()`` in a worker: pdb for whoever joins it with ``hvd-elastic debug``."""

from __future__ import annotations

import contextlib
import os
import pdb  # noqa: T100
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hvd_elastic.formatting import worker_name
from hvd_elastic.programs.join_debugger import debugger_address
from hvd_elastic.programs.peers import peer_uid
from hvd_elastic.worker.worker import Worker


def install_breakpoints(worker: Worker) -> None:
    """Have ``breakpoint()`` wait for a user; ``PYTHONBREAKPOINT`` of the user's stays.

    ``pdb.set_trace()`` does the same, since a worker has no terminal for pdb.
    While the rank is paused, its step has not begun, so it counts as busy for no deadline. Its
    heartbeats continue.
    """
    if worker.link is not None and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _Breakpoints(worker)
        pdb.set_trace = sys.breakpointhook


_LOOK_S = 0.5
"""Time between two looks whether the worker that waits for a user is to leave the run [s]."""


class _Breakpoints:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pid = os.getpid()
        self._pdb: _Pdb | None = None

    def __call__(self, *_: object, **__: object) -> None:
        frame = sys._getframe(1)
        if os.getpid() != self._pid:
            sys.stderr.write(
                f"{_place(frame)}: breakpoint() is passed over in a process that the script has "
                "started, such as one of a loader: set num_workers=0 to debug what it reads\n"
            )
            return
        if self._pdb is None or self._pdb.left:
            connection = self._joined(_place(frame))
            if connection is None:
                return
            self._pdb = _Pdb(self._worker, connection)
        self._pdb.set_trace(frame)

    def _joined(self, place: str) -> socket.socket | None:
        """Wait until a user joins; return the connection to that user."""
        run, host = os.environ["HVD_ELASTIC_RUN_ID"], os.environ["HVD_ELASTIC_HOST"]
        slot = int(os.environ["HVD_ELASTIC_LOCAL_RANK"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            try:
                server.bind(debugger_address(run, host, slot))
            except OSError as error:
                self._worker.warn(f"{place}: breakpoint() is passed over: {error.strerror}")
                return None
            server.listen(1)
            self._worker.warn(
                f"stops at breakpoint() in {place}, and the others wait; join it by: hvd-elastic "
                f"debug {run} {worker_name(host, slot)}"
            )
            server.settimeout(_LOOK_S)
            with _standing_still(self._worker):
                while not self._worker.is_to_leave:
                    with contextlib.suppress(TimeoutError):
                        connection, _ = server.accept()
                        if peer_uid(connection) in (os.getuid(), 0):
                            connection.setblocking(True)
                            return connection
                        connection.close()
            self._worker.warn(f"{place}: continues from breakpoint(), since it is to leave the run")
            return None


class _Pdb(pdb.Pdb):
    """Pdb over a connection. When its user leaves, the script continues.

    Attributes:
        left: whether the user has left.
    """

    def __init__(self, worker: Worker, connection: socket.socket) -> None:
        self._worker = worker
        self._connection = connection
        self.left = False
        streams = (connection.makefile(mode, encoding="utf-8") for mode in ("r", "w"))
        super().__init__(stdin=next(streams), stdout=next(streams), nosigint=True, readrc=False)

    def interaction(self, *arguments: Any, **named: Any) -> None:
        with _standing_still(self._worker):
            try:
                super().interaction(*arguments, **named)
            except OSError:
                self._leave()  # the connection is broken

    def do_quit(self, arg: str) -> bool:
        self._leave()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815

    def _leave(self) -> None:
        self.left = True
        self.clear_all_breaks()
        self.set_continue()
        self._connection.close()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()


@contextlib.contextmanager
def _standing_still(worker: Worker) -> Iterator[None]:
    began, worker.step_clock.began = worker.step_clock.began, None
    try:
        yield
    finally:
        if began is not None:
            worker.step_clock.began = time.monotonic()


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
