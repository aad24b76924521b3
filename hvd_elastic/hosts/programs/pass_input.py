"""Passes a command's input on, in pieces as ``hold_command`` describes them.

Few imports, and loaded only when it is needed: see there.
"""

from __future__ import annotations

import os
import select

HELD_BYTES = 1 << 18


class Input:
    """From stdin to the command.

    Args:
        way_in: the command's end of it.

    Attributes:
        complete: whether its end has come; nothing else will.
    """

    def __init__(self, way_in: int) -> None:
        os.set_blocking(way_in, False)
        self._way_in = way_in
        self._arrived = b""
        self._waiting = b""
        self.complete = False

    def register(self, poll: select.poll) -> None:
        """What is to be waited for."""
        wanted = select.POLLIN if len(self._arrived) < HELD_BYTES else 0
        # The end of stdin is seen even while there is no room for more.
        poll.register(0, select.POLLRDHUP | wanted)
        if self._way_in >= 0 and self._waiting:
            poll.register(self._way_in, select.POLLOUT)

    def step(self, events: dict[int, int]) -> bool:
        """Does what can be done; False: stdin has ended."""
        if events.get(0, 0) & select.POLLIN:
            data = os.read(0, 1 << 16)
            if not data:
                return False
            self._arrived += data
        elif events.get(0, 0):
            return False
        self._unpack()
        if self._way_in >= 0 and self._waiting:
            try:
                self._waiting = self._waiting[os.write(self._way_in, self._waiting) :]
            except BlockingIOError:
                pass
            except OSError:
                self.close()
        if self.complete and not self._waiting:
            self.close()
        if self._way_in < 0:
            self._arrived = b""
        return True

    def _unpack(self) -> None:
        # Once the command reads no more, pieces are cut anywhere.
        if self._way_in < 0:
            return
        while len(self._waiting) < HELD_BYTES and len(self._arrived) >= 4 and not self.complete:
            size = int.from_bytes(self._arrived[:4], "big")
            if len(self._arrived) < 4 + size:
                break
            self._waiting += self._arrived[4 : 4 + size]
            self._arrived = self._arrived[4 + size :]
            self.complete = size == 0

    def close(self) -> None:
        """The command reads no more, or has read all."""
        if self._way_in >= 0:
            os.close(self._way_in)
        self._way_in, self._waiting = -1, b""


def feed(way_in: int) -> None:
    """Passes the input on until the leader is gone."""
    given = Input(way_in)
    goes_on = True
    while goes_on:
        poll = select.poll()
        given.register(poll)
        goes_on = given.step(dict(poll.poll()))
