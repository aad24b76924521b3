"""Ranks negotiate their collectives when all have one, and sleep until then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import COSTLY, ROOT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests" / "dist" / "scripts" / "negotiation.py"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
GLOO_LIMIT_S = 6
"""Below the time that a rank of the script keeps the others waiting."""


def run(folder: Path, script: Path, *arguments: object, **variables: str) -> str:
    horovodrun = shutil.which("horovodrun", path=PATH)
    if horovodrun is None:
        pytest.skip("Horovod is not built")
    words = [horovodrun, "-np", 3, "--network-interfaces", "lo", sys.executable, script, *arguments]
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", **variables},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("waiting", [1, pytest.param(0, marks=COSTLY)])
def test_ranks_sleep_until_all_have_something_and_a_shutdown_wakes_them(
    waiting: int, tmp_path: Path
) -> None:
    run(tmp_path, SCRIPT, waiting, HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_LIMIT_S))
    told = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(3)]
    assert [ended for ended, _ in told] == ["True", "True", "False"]
    # Two threads look at their sockets 100 times a second; with a cycle of 1 ms it is thousands.
    assert max(int(switches) for _, switches in told) < 600


STALLED = """\
import time

import horovod.torch as hvd
import torch

hvd.init()
for late in (0.0, 4.0):
    if hvd.rank() == 1:
        time.sleep(late)
    hvd.allreduce(torch.ones(1), name="awaited")
hvd.shutdown()
"""


@COSTLY
def test_horovod_still_warns_of_a_tensor_that_a_rank_lacks(tmp_path: Path) -> None:
    script = tmp_path / "stalled.py"
    script.write_text(STALLED)
    output = run(tmp_path, script, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    assert "Missing ranks:" in output
    assert "1: [" in output
