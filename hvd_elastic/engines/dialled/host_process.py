"""Run the host process of an engine's task or actor, on the host that the engine gives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hvd_elastic.errors import RunError

_TAIL_BYTES = 4096
_ERROR = re.compile(
    r"^\s*(?:[\w.]+\.)?(?P<kind>\w+(?:Error|Exception)): (?P<text>\S.*)", re.MULTILINE
)
_MISSING = re.compile(r"No module named '(\w+)")


class HostProcess:
    """A process that dials back to the leader, and runs its commands on this host.

    It ends when the leader ends it, when its link is lost for good, with :meth:`close`, and with
    the process that has made this object.

    Args:
        invitation: of :class:`hvd_elastic.hosts.dialled.DialIn`; it goes through a pipe.
        name: name to propose for the host, such as its address; the leader adds a number if another
            host has it.
        slots: number of processes that the host can hold.
        env: variables for all that runs here, beside those of this process.
    """

    def __init__(
        self,
        invitation: Mapping[str, Any],
        name: str,
        slots: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what is imported here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvd_elastic.programs.dial_back"],
            env={**os.environ, **path},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # it decides itself when it ends
        )
        asked = {**invitation, "name": name, "slots": slots, "env": dict(env or {})}
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # its end says why
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        self._said = b""
        self._reading = threading.Thread(target=self._read, name="host process", daemon=True)
        self._reading.start()

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the leader has no more use for this host.

        Raises:
            RunError: the link was lost, or the leader has another key; says which.
        """
        status = self._process.wait()
        self.close()
        if status:
            said = self._said.decode(errors="replace").strip()
            raise RunError(said or "the host process was killed")

    def terminate(self) -> None:
        """Give notice that the host goes away: its workers leave, as at SIGTERM under ssh."""
        self._process.terminate()

    def close(self) -> None:
        """End the process at once, with all that it has started."""
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reading.join()

    def _read(self) -> None:
        assert self._process.stderr is not None, "started with a pipe"
        with self._process.stderr as pipe:
            while line := pipe.readline(_TAIL_BYTES):
                self._said = (self._said + line)[-_TAIL_BYTES:]


def last_error(said: str) -> str:
    r"""Return the last error that a text names, after which there may be advice; else its begin.

    >>> last_error("ray::map()\n  File …\nValueError: no such column x\nTo retry, configure …")
    'ValueError: no such column x'
    >>> last_error("hvd_elastic.errors.RunError: the link is lost\n")
    'the link is lost'
    """
    found = [*_ERROR.finditer(said)]
    if not found:
        return next(iter(said.strip().splitlines()), "no reason is given")
    kind, text = found[-1]["kind"], found[-1]["text"].rstrip()
    return text if kind == "RunError" else f"{kind}: {text}"


def missing_package(said: str) -> str | None:
    """Return the package that an import did not find; None: that was not the error.

    >>> missing_package("ModuleNotFoundError: No module named 'pyarrow.lib'")
    'pyarrow'
    """
    found = _MISSING.findall(said)
    return found[-1] if found else None
