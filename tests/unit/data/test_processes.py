"""Processes that share work, and end with whoever gave it to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.data import processes
from tests.paths import LIMIT_S
from tests.waiting import until

SCRIPT = """
import sys
from pathlib import Path
from hvd_elastic.data.processes import in_processes

def work(piece):
    folder, _ = piece
    Path(folder, "begun").touch()
    Path(folder, "pipe").read_bytes()  # nobody writes to it

if __name__ == "__main__":
    try:
        list(in_processes(work, [(sys.argv[1], bytes(int(sys.argv[2])))] * 6, 2))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("size", [0, 200_000])  # a pipe holds 64 KiB
def test_ctrl_c_does_not_wait_for_the_work_that_is_given_up(tmp_path: Path, size: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path, str(size)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        until((tmp_path / "begun").exists, process=process)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT_S)  # ends when all its processes have
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, said
    assert said == ""


@pytest.mark.parametrize(("version", "closes"), [((3, 11, 4), True), ((3, 11, 5), False)])
def test_a_pipe_that_python_closes_itself_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], closes: bool
) -> None:
    """Closed twice at the same time, it ends in a traceback of Python's thread."""
    monkeypatch.setattr(processes, "sys", SimpleNamespace(version_info=version))
    reader, writer = Pipe(duplex=False)
    pool: Any = SimpleNamespace(_call_queue=SimpleNamespace(_reader=reader))
    with reader, writer:
        processes._stop_writing(pool)
        assert reader.closed is closes
