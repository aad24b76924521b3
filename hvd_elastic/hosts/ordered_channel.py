"""Channels of paramiko that send nothing after their end.

paramiko builds a message under the channel's lock and sends it without: what another thread built
can follow the CLOSE with which paramiko answers the host's. OpenSSH then ends the connection with
all its channels ("ieof packet referred to nonexistent channel"), see paramiko's issue 1115.
"""

from __future__ import annotations

from typing import Any

import paramiko


class OrderedChannel(paramiko.Channel):
    """A channel whose CLOSE waits for messages that other threads are sending."""

    _sending = 0
    _held: tuple[Any, ...] = ()
    """What is sent after the last of them."""

    def _send(self, s: Any, m: Any) -> int:
        self._begin()
        try:
            return int(super()._send(s, m))
        finally:
            self._end()

    def shutdown(self, how: int) -> None:
        """Shut down one or both directions, as in paramiko."""
        self._begin()
        try:
            super().shutdown(how)
        finally:
            self._end()

    def _close_internal(self) -> tuple[Any, ...]:
        # The caller has the lock.
        messages: tuple[Any, ...] = super()._close_internal()
        if self._sending == 0:
            return messages
        self._held += messages
        return ()

    def _begin(self) -> None:
        with self.lock:
            self._sending += 1

    def _end(self) -> None:
        with self.lock:
            self._sending -= 1
            held: tuple[Any, ...] = ()
            if self._sending == 0:
                held, self._held = self._held, ()
        for message in held:
            if message is not None:
                self.transport._send_user_message(message)


class OrderedTransport(paramiko.Transport):
    """A transport whose channels are :class:`OrderedChannel`."""

    def open_channel(self, *args: Any, **options: Any) -> OrderedChannel:
        """Open a channel, as in paramiko."""
        channel: Any = super().open_channel(*args, **options)
        channel.__class__ = OrderedChannel
        assert isinstance(channel, OrderedChannel)
        return channel
