from __future__ import annotations

import subprocess
import sys


def test_a_keeper_that_nobody_calls_ends() -> None:
    program = (
        "import time; from hvd_elastic.cluster.keeper import Keeper; Keeper(0.1); time.sleep(99)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
