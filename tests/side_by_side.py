"""``pytest -n``: the process that hands out the tests ends those that run them with care.

pytest-xdist itself gives them five seconds when the tests are broken off, interrupts them again
amid their tidying up, and then kills them. Virtual hosts and ranks would be left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
import pytest

__all__ = ["register"]

TIDYING_S = 90.0
"""So long may the tests that are broken off take to end what they have started."""


class HandsOut:
    """In the process that the user has started."""

    def __init__(self) -> None:
        self._running: list[Any] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        if not self._running:
            # As Ctrl-C does: a time limit, say, must not leave hosts behind either.
            signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 143))
        self._running.append(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        with contextlib.suppress(ValueError):
            self._running.remove(node)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Interrupt those that still run tests, once each, and wait until they are done."""
        if self._running:
            for process in psutil.Process().children():
                process.send_signal(signal.SIGINT)
        for node in self._running:
            channel = node.channel
            with contextlib.suppress(EOFError, channel.RemoteError, channel.TimeoutError):
                channel.waitclose(TIDYING_S)


def register(config: pytest.Config) -> None:
    """For ``pytest_configure``; the processes that run the tests come here too."""
    if hasattr(config, "workerinput"):
        # A terminal sends Ctrl-C to all of its process group; they are to hear of it once.
        os.setpgid(0, 0)
    else:
        config.pluginmanager.register(HandsOut())
