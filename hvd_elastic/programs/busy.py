"""Find who uses the cores and GPUs of a host; standard library only, as it is sent to hosts."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from pathlib import Path
from typing import Any

from hvd_elastic.programs.nvidia import ask_nvidia_smi

_LEAST_CORES = 0.5
"""Cores that a process uses at least to be named."""
_LEAST_S = 0.5
"""Shortest time over which the use of cores is measured [s]."""


class BusyProcesses:
    """The processes of other users than this one and root that use cores or GPUs from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = {pid: spent for pid, (_, spent, _) in _processes().items()}

    def find(self) -> list[dict[str, Any]]:
        """Return them, each with ``user``, ``pid``, ``command`` and ``uses``, in words."""
        time.sleep(max(0.0, self._began + _LEAST_S - time.monotonic()))
        passed_s = time.monotonic() - self._began
        on_gpus = _on_gpus()
        found = []
        for pid, (uid, spent, name) in _processes().items():
            cores = (spent - self._before.get(pid, spent)) / os.sysconf("SC_CLK_TCK") / passed_s
            if uid in (0, os.getuid()) or (pid not in on_gpus and cores < _LEAST_CORES):
                continue
            uses = "a GPU" if pid in on_gpus else f"{cores:.1f} cores"
            found.append({"user": _user(uid), "pid": pid, "command": name, "uses": uses})
        return found


def _processes() -> dict[int, tuple[int, int, str]]:
    """Return user id, processor time [ticks] and name of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            uid = path.stat().st_uid
            name, _, rest = (path / "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            spent = int(fields[11]) + int(fields[12])
            found[int(path.name)] = (uid, spent, name.partition("(")[2])
    return found


def _on_gpus() -> set[int]:
    answer = ask_nvidia_smi("--query-compute-apps=pid")
    return {int(line) for line in (answer.lines if answer else ()) if line.isdecimal()}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
