"""Find who uses the cores and GPUs of a host; standard library only, as it is sent to hosts."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from pathlib import Path
from typing import Any

from hvd_elastic.programs.nvidia import ask_nvidia_smi
from hvd_elastic.programs.processes import all_processes, read

_LEAST_CORES = 0.5
"""Cores that a process uses at least to be named."""
_LEAST_S = 0.5
"""Shortest time over which the use of cores is measured [s]."""


class BusyProcesses:
    """The processes of other users than this one and root that use cores or GPUs from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = {each.key: each.cpu_s for each in all_processes().values()}

    def find(self) -> list[dict[str, Any]]:
        """Return them, each with ``user``, ``pid``, ``command`` and ``uses``, in words."""
        time.sleep(max(0.0, self._began + _LEAST_S - time.monotonic()))
        passed_s = time.monotonic() - self._began
        on_gpus = _on_gpus()
        found = []
        for pid, process in all_processes().items():
            cores = (process.cpu_s - self._before.get(process.key, process.cpu_s)) / passed_s
            if pid not in on_gpus and cores < _LEAST_CORES:
                continue
            with contextlib.suppress(OSError):  # it has ended
                uid = Path("/proc", str(pid)).stat().st_uid
                if uid not in (0, os.getuid()):
                    uses = "a GPU" if pid in on_gpus else f"{cores:.1f} cores"
                    name = read(pid, "comm").decode("utf-8", "replace").strip()
                    found.append({"user": _user(uid), "pid": pid, "command": name, "uses": uses})
        return found


def _on_gpus() -> set[int]:
    answer = ask_nvidia_smi("--query-compute-apps=pid")
    return {int(line) for line in (answer.lines if answer else ()) if line.isdecimal()}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
