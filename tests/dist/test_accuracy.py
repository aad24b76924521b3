"""A model learns as well while the world changes as it does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import ROOT, RunningJob, Stage

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

EPOCHS = 20
STEP_TIME_S = 0.04
"""Training has to last until workers have been started in its course."""
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def digits(stage: Stage) -> Path:
    """scikit-learn's digits, where all hosts see them."""
    pytest.importorskip("sklearn")
    folder = stage.folder / "digits"
    script = ROOT / "datasets_prep" / "digits.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder)], check=True)
    return folder


def accuracy(job: RunningJob) -> float:
    """Test accuracy of a run that ended well and read everything exactly once."""
    assert job.wait(120) == 0, job.story()
    job.check_nothing_left()
    audit = job.check_audit(finished=True)
    assert audit.complete_epochs == EPOCHS
    (found,) = [e["test_accuracy"] for e in job.kinds("metrics") if "test_accuracy" in e]
    return float(found)


def test_three_rescales_do_not_change_the_accuracy(
    stage: Stage, start_job: StartJob, digits: Path
) -> None:
    hosts = dict.fromkeys(stage.hosts[:3], 1)
    script = [sys.executable, str(ROOT / "scripts" / "examples" / "digits.py")]
    script += ["--data", str(digits), "--epochs", str(EPOCHS), "--quiet"]
    steady = accuracy(start_job(hosts, "--np", "2", script=script))
    job = start_job(hosts, script=[*script, "--step-time", str(STEP_TIME_S)])
    since = 0
    for size in (3, 2, 1, 3):
        if since:
            job.command("scale", job.run_id, str(size))
        job.wait_size(size, since)
        job.wait_steps(30)
        since = job.mark()
    changed = accuracy(job)
    assert len(job.kinds("rescale_finished")) >= 4, "the start, and three rescales"
    assert steady >= 0.97
    assert abs(changed - steady) <= TOLERANCE
