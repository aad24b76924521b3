"""What an agent may say about a command: a host that says anything else is let go of.

Everything is bounded by what the call has sent or made room for, so no host can fill the memory of
the keeper or of a call.
"""

from __future__ import annotations

from hvd_elastic.hosts.programs.keep_wire import (
    DRAINED,
    ERR,
    EXIT,
    INPUT,
    OUT,
    OVER,
    REASON_BYTES,
    REFUSED,
    ROOM,
    WINDOW_BYTES,
    pack_number,
    unpack_number,
)

__all__ = ["Bounds"]

NUMBER_BYTES = len(pack_number(0))
_ONCE = {EXIT: NUMBER_BYTES, DRAINED: 0, OVER: 0}


class Bounds:
    """Of one command."""

    def __init__(self) -> None:
        self._room = WINDOW_BYTES
        self._unused = 0
        self._unsaid = dict(_ONCE)
        self._refused = False

    def note(self, kind: int, payload: bytes) -> None:
        """The call sends that to the agent."""
        if kind == INPUT:
            self._unused += len(payload)
        elif kind == ROOM:
            self._room += unpack_number(payload)

    def allow(self, kind: int, payload: bytes) -> bool:
        """Whether the agent may say that now; it counts as said."""
        if kind in (OUT, ERR):
            self._room -= len(payload)
            return bool(payload) and self._room >= 0
        if kind == ROOM:
            used = unpack_number(payload) if len(payload) == NUMBER_BYTES else 0
            self._unused -= used
            return used > 0 and self._unused >= 0
        if kind == REFUSED:
            refused, self._refused = self._refused, True
            return not refused and len(payload) <= REASON_BYTES
        return self._unsaid.pop(kind, None) == len(payload)
