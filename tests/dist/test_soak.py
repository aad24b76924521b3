"""The soak itself, for a short time: what it says of a run that is well, and how it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_elastic.virtual.netns import why_no_namespaces
from tests.dist.conftest import LOOPBACK
from tests.dist.jobs import ended, environment
from tests.paths import COSTLY, LIMIT_S, ROOT
from tests.waiting import until

pytestmark = pytest.mark.dist

CLEAN_S = LIMIT_S


def command(*arguments: object) -> list[str]:
    extra = ["--loopback"] if os.environ.get(LOOPBACK) == "1" else []
    return [sys.executable, str(ROOT / "benchmarks/soak.py"), *map(str, arguments), *extra]


def report(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(autouse=True)
def needs_horovod() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")


@COSTLY
def test_a_short_soak_passes(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    options = ["--seed", 2, "--minutes", 0.2, "--no-baseline", "--report", path]
    options += ["--step-time", 0.05]  # or it would keep all cores busy
    done = subprocess.run(
        command(*options, "--faults", "kill_worker,kill_host,pause_worker,hosts,corrupt"),
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(path)
    assert found["ok"]
    assert found["faults"]
    assert all(fault["stall_s"] is not None for fault in found["faults"])
    for name in ("examples, as the ranks saw it", "examples, by the run's audit"):
        assert found["checks"][name].startswith(
            "each of 1437 examples (by index) used exactly once in"
        )
    assert found["checks"]["left behind"] == "nothing"
    assert path.with_suffix(".md").read_text().startswith("# Soak, seed 2\n\n**passed")


@COSTLY
@pytest.mark.skipif(why_no_namespaces() is not None, reason="needs network namespaces")
def test_ctrl_c_ends_it_cleanly_with_what_was_measured(tmp_path: Path) -> None:
    path, output = tmp_path / "soak.json", tmp_path / "output"
    options = ["--seed", 1, "--minutes", 5, "--faults", "pause_worker", "--report", path]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command(*options),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(tmp_path),
            start_new_session=True,
        )
    with ended(process):
        said = output.read_text
        until(lambda: "is dealt with" in said(), process=process, said=said)
        process.send_signal(signal.SIGINT)
        assert process.wait(CLEAN_S) == 130, output.read_text()
    found = report(path)
    assert found["verdict"].startswith("interrupted after")
    assert found["faults"][0]["kind"] == "pause_worker"
    assert found["checks"]["left behind"] == "nothing"
    left = [p for p in psutil.process_iter() if f"soak-{process.pid}-" in " ".join(_words(p))]
    assert not left


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words
