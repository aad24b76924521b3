"""Act as another user of this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["UID", "WORDS", "Holder", "call", "needs_root", "open_folder", "start"]

UID = 65534
"""The user ``nobody``."""
WORDS = f"user nobody (uid {UID})"
"""How errors name this user."""

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


# Modules are imported first: nobody may not look into the folder that Python lies in.
_BECOME = f"""
import encodings.idna, http.client, os, signal, socket, sys
os.setgroups([]); os.setgid({UID}); os.setuid({UID})
"""
_HOLD = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", "\\0", 1))
listener.listen()
print("holds", flush=True)
connection, _ = listener.accept()
connection.settimeout(60)
print(connection.recv(1 << 16) or "nothing", flush=True)
connection.close()
signal.pause()  # others may connect; they are told nothing
"""


def start(program: str, *words: str) -> subprocess.Popen[str]:
    """Start a Python program as another user."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BECOME + program, *words],
        stdout=subprocess.PIPE,
        text=True,
    )


class Holder:
    """Another user, who listens on a unix socket before this one does.

    Args:
        address: path of the socket, or ``@`` and its name in the abstract namespace.
    """

    def __init__(self, address: str) -> None:
        self._process = start(_HOLD, address)
        assert self._line() == "holds"

    def got(self) -> str:
        """Return what was sent to the socket by the first process that has connected."""
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> "Holder":  # noqa: PYI034, UP037  (Python 3.10 has no Self)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
