"""Runs a training script under any launcher and records when its steps were finished.

``python -m benchmarks.testbed.marking FOLDER SCRIPT [ARG]...`` runs ``python SCRIPT [ARG]...`` and
appends one line to a file in FOLDER for each step of any PyTorch optimizer; after ``--own-steps``
as the first argument the script does that itself, and PyTorch is not imported. So all launchers are
compared by the same clock: the kernel's monotonic one, which all virtual hosts share. A line costs
one ``write``, about 10 microseconds.

The script may append lines of its own to the file that ``HVD_ELASTIC_BENCH_MARKS`` names. Where
Horovod does not know the number of ranks, ``optimizer.world_size()`` returns it. With
``HVD_ELASTIC_BENCH_TRACE=1`` the parts of our own rescales are recorded too, with ``=steps`` those
of our own steps, see :mod:`benchmarks.testbed.tracing`.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SAME_STEP_S = 0.0002


class LineWriter:
    """Appends JSON lines to a file of this process.

    Args:
        folder: folder of the file.
        host: host name, with which the file's name begins.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self.path = folder.absolute() / f"{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._out = os.open(self.path, flags, 0o600)

    def write(self, record: dict[str, Any]) -> None:
        """Write one line with a single system call, so that it is complete if this process dies."""
        os.write(self._out, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def tell_time(path: Path) -> None:
    """Write the time to a file, whole at once [s, monotonic]."""
    partial = path.with_suffix(".new")
    partial.write_text(str(time.monotonic()), encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Run the training script that the command line names, and record its steps."""
    began = time.monotonic()
    own_steps = sys.argv[1] == "--own-steps"
    folder, script, *arguments = sys.argv[1 + own_steps :]
    host = (
        os.environ.get("HVD_ELASTIC_HOST")
        or os.environ.get("HOROVOD_HOSTNAME")
        or socket.gethostname()
    )
    lines = LineWriter(Path(folder), host)
    os.environ["HVD_ELASTIC_BENCH_MARKS"] = str(lines.path)
    write = lines.write
    process = {"host": host, "slot": _slot(os.environ), "pid": os.getpid(), "born": _born()}
    write({"mark": "process", **process, "mono": began})
    if not own_steps:
        _mark_steps(write)
    if traced := os.environ.get("HVD_ELASTIC_BENCH_TRACE"):
        from benchmarks.testbed.tracing import install, install_steps

        (install_steps if traced == "steps" else install)(write)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as for a script that is run directly
    runpy.run_path(script, run_name="__main__")


def _mark_steps(write: Callable[[dict[str, Any]], None]) -> None:
    """Write a line for each step of any PyTorch optimizer from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    write({"mark": "torch", "mono": time.monotonic()})

    last = 0.0

    def after_step(optimizer: Any, *_: Any) -> None:
        nonlocal last
        now = time.monotonic()
        # Horovod's own optimizer calls the step that it inherits, so the hook runs twice.
        twice = hasattr(optimizer, "skip_synchronize") and now - last < _SAME_STEP_S
        last = now
        if twice:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        costs = {
            "cpu": round(used.ru_utime + used.ru_stime, 6),
            "switches": used.ru_nvcsw + used.ru_nivcsw,
        }
        write({"mark": "step", "mono": now, "size": _world_size(optimizer), **costs})

    register_optimizer_step_post_hook(after_step)


def _slot(environment: Mapping[str, str]) -> int:
    """Return the slot of this process on its host, from its launcher's variables."""
    base = int(environment.get("HVD_ELASTIC_BENCH_SLOT", "0"))
    for name in ("HVD_ELASTIC_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK"):
        if name in environment:
            return base + int(environment[name])
    return base


def _world_size(optimizer: Any) -> int:
    told = getattr(optimizer, "world_size", None)
    if told is not None:
        return int(told())
    horovod = sys.modules.get("horovod.torch")
    return horovod.size() if horovod is not None and horovod.is_initialized() else 1


def _born() -> float:
    """Return when the kernel started this process [s, monotonic], to a hundredth of a second."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8")
    # The program's name in brackets may contain spaces; the start time is field 22.
    ticks = int(text.rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main()
