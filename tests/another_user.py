"""Programs that act as another user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
NOBODY_WORDS = "user nobody (uid 65534)"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# Modules are imported first: nobody may not look into the folder that Python lies in.
_BECOME = f"""
import encodings.idna, json, os, socket, sys, time
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""
_HOLD = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", "\\0", 1))
listener.listen()
print("holds", flush=True)
connection, _ = listener.accept()
connection.settimeout(60)
print(connection.recv(1 << 16) or "nothing", flush=True)
"""


def as_nobody(program: str, *words: str) -> subprocess.Popen[str]:
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
        self._process = as_nobody(_HOLD, address)
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
