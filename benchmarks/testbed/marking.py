"""Runs a training script and writes down when its steps were finished, whoever launched it.

``python -m benchmarks.testbed.marking FOLDER SCRIPT [ARG]...`` is ``python SCRIPT [ARG]...`` with a
file in FOLDER that grows by one line for each step of any PyTorch optimizer, so that launchers are
compared by one and the same clock: the kernel's monotonic one, which all virtual hosts share.
A line costs one ``write``, some 10 microseconds.

The script may add lines of its own to the file that ``HVD_ELASTIC_BENCH_MARKS`` names, and says the
number of ranks as ``optimizer.world_size()`` where Horovod does not know it. With
``HVD_ELASTIC_BENCH_TRACE=1`` the inner parts of a rescale of ours are written down as well, see
:mod:`benchmarks.testbed.tracing`.
"""

from __future__ import annotations

import json
import os
import runpy
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SAME_STEP_S = 0.0002


class LineWriter:
    """Appends JSON lines to a file of this process.

    Args:
        folder: where it is made.
        host: begins its name.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self.path = folder.absolute() / f"{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._out = os.open(self.path, flags, 0o600)

    def write(self, record: dict[str, Any]) -> None:
        """Write one line, whole, however this process ends."""
        os.write(self._out, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def main() -> None:
    """Entry point in the training process."""
    began = time.monotonic()
    folder, script, *arguments = sys.argv[1:]
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
    from torch.optim.optimizer import register_optimizer_step_post_hook

    write({"mark": "torch", "mono": time.monotonic()})

    last = 0.0

    def after_step(optimizer: Any, *_: Any) -> None:
        nonlocal last
        now = time.monotonic()
        # Horovod's own optimizer calls the step that it inherits, so the hook is run twice.
        twice = hasattr(optimizer, "skip_synchronize") and now - last < _SAME_STEP_S
        last = now
        if twice:
            return
        write({"mark": "step", "mono": now, "size": _world_size(optimizer)})

    register_optimizer_step_post_hook(after_step)
    if os.environ.get("HVD_ELASTIC_BENCH_TRACE") == "1":
        from benchmarks.testbed.tracing import install

        install(write)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as for a script that is run directly
    runpy.run_path(script, run_name="__main__")


def _slot(environment: Mapping[str, str]) -> int:
    """Which process of its host this is, as its launcher tells."""
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
    """When the kernel started this process, on the monotonic clock (to a hundredth of a second)."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8")
    # The name of the program, in brackets, may hold spaces; the start is field 22.
    ticks = int(text.rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main()
