"""Joins the debugger of a worker on this host: sent there by ``hvd-elastic debug``.

The first line of its input names the worker, as JSON; the rest goes to the debugger, whose output
it prints. It ends with either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import sys
import threading
import time

from hvd_elastic.errors import StrangerError
from hvd_elastic.programs.peers import connect_own

_POLL_S = 0.2


def debugger_address(run: str, host: str, slot: int) -> str:
    """Return the address of a worker's debugger, in the abstract namespace of unix sockets.

    Args:
        run: id of the run.
        host: name of the worker's host in the hostfile.
    """
    # Of a fixed length, since the kernel allows 107 bytes.
    digest = hashlib.sha256(json.dumps([run, host, slot]).encode()).hexdigest()[:32]
    return f"\0hvd_elastic-debugger-{digest}"


def main() -> None:
    """Connect when the worker has stopped, and pass on what goes to and fro."""
    run, host, slot = json.loads(sys.stdin.buffer.readline())
    connection = _connected(debugger_address(run, host, slot))

    def pass_input() -> None:
        with contextlib.suppress(OSError):
            for data in iter(sys.stdin.buffer.read1, b""):  # type: ignore[union-attr]
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)  # the worker sees the end, and says the rest

    threading.Thread(target=pass_input, daemon=True).start()
    with contextlib.suppress(OSError):
        for output in iter(lambda: connection.recv(1 << 16), b""):
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()
    os._exit(0)  # the thread may be reading


def _connected(address: str) -> socket.socket:
    """Wait until the worker has stopped, while somebody reads our output."""
    reader = select.poll()
    reader.register(1, 0)  # errors and hang-ups are always told
    said = False
    while not reader.poll(0):
        try:
            return connect_own(address)
        except StrangerError as error:
            sys.exit(str(error))
        except OSError:
            if not said:
                print("waiting until it reaches breakpoint()", flush=True)
                said = True
            time.sleep(_POLL_S)
    sys.exit(1)
