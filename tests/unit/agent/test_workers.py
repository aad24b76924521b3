"""How workers are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

TIMEOUT_S = 60


def test_workers_die_with_the_agent_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, sys, signal\n"
        "from hvd_elastic.agent.worker_start import start_process\n"
        "p = start_process([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'],\n"
        "                   '/', dict(os.environ), 0, 1)\n"
        f"open({str(note)!r}, 'w').write(str(p))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL
    pid = int(note.read_text())
    deadline = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
