"""Pass a command's input on, in the format that ``hold_command`` describes.

Like that module it imports little, and it is loaded only if the command has input.
"""

from __future__ import annotations

import os
import select

# Input that is kept until the command reads it; beyond that the leader has to wait.
HELD_BYTES = 1 << 18


def feed(way_in: int) -> None:
    """Pass stdin on to the command; returns when stdin has ended.

    Args:
        way_in: write end of the command's stdin; closed at the end of the input, or when the
            command does not read any more.
    """
    os.set_blocking(way_in, False)
    arrived, waiting, complete = b"", b"", False
    while True:
        poll = select.poll()
        # The end of stdin must be noticed even while the buffer is full.
        poll.register(0, select.POLLRDHUP | (select.POLLIN if len(arrived) < HELD_BYTES else 0))
        if way_in >= 0 and waiting:
            poll.register(way_in, select.POLLOUT)
        events = dict(poll.poll())
        if events.get(0, 0) & select.POLLIN:
            data = os.read(0, 1 << 16)
            if not data:
                return
            arrived += data
        elif events.get(0, 0):
            return
        while len(waiting) < HELD_BYTES and len(arrived) >= 4 and not complete:
            size = int.from_bytes(arrived[:4], "big")
            if len(arrived) < 4 + size:
                break
            waiting, arrived = waiting + arrived[4 : 4 + size], arrived[4 + size :]
            complete = size == 0
        if way_in >= 0 and waiting:
            try:
                waiting = waiting[os.write(way_in, waiting) :]
            except BlockingIOError:
                pass
            except OSError:
                complete, waiting = True, b""
        if way_in >= 0 and complete and not waiting:
            os.close(way_in)
            way_in = -1
        if way_in < 0:
            arrived = b""
