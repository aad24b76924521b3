"""Act as another user of this machine, in a process of its own."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["UID", "call", "needs_root", "open_folder"]

UID = 65534
"""The user ``nobody``."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")


def call(act: Callable[[], object], uid: int = UID) -> None:
    """Call ``act`` as a user in a process that is forked, and fail if it raises."""
    pid = os.fork()
    if pid == 0:
        try:
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            act()
        except BaseException:  # noqa: BLE001  # nothing may go on as the test in this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "see what the other user printed"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user reaches and writes to: those of pytest are their owner's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)
