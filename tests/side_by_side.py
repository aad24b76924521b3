"""``pytest -n``: several processes run tests at a time, handed out by the one that was started.

When the tests are broken off, pytest-xdist itself gives those who run them five seconds, interrupts
them again amid their tidying up, and then kills them: virtual hosts and ranks would be left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
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
            threading.Thread(target=_end_what_the_dead_forked, daemon=True).start()
        self._running.append(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        with contextlib.suppress(ValueError):
            self._running.remove(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, sched: Any) -> None:
        """A test that has killed its process is not tried again, in one process after the other."""
        for file, tests in [*sched.workqueue.items()]:
            if crashitem in tests:
                tests[crashitem] = True
                if all(tests.values()):
                    del sched.workqueue[file]

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


def _end_what_the_dead_forked() -> None:
    """End what was forked by processes that have died, or the run would never go on.

    It holds their locks, and their end of the connection by which pytest-xdist notices a death.
    """
    this = psutil.Process()
    while True:
        time.sleep(1.0)
        for process in this.children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.killpg(process.pid, signal.SIGKILL)


def register(config: pytest.Config) -> None:
    """For ``pytest_configure``."""
    if hasattr(config, "workerinput"):
        # A terminal sends Ctrl-C to all of its process group; these are to hear of it once. What
        # they fork is in a group of theirs.
        os.setpgid(0, 0)
    else:
        config.pluginmanager.register(HandsOut())
