"""A model learns as well while the world changes as it does without."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, LIMIT_S, ROOT

# test_same_outcome holds the parameters themselves against those of an undisturbed run.
pytestmark = [pytest.mark.dist, COSTLY]

EPOCHS = 20
STEP_TIME_S = 0.02
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
    assert job.wait(LIMIT_S) == 0, job.story()
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
    pausing = str(ROOT / "tests/dist/scripts/pausing.py")
    words = [sys.executable, pausing, str(stage.folder / "pause"), *script[1:]]
    job = start_job(hosts, script=[*words, "--step-time", str(STEP_TIME_S)])
    job.wait_size(3)
    for size in (2, 1, 3):
        job.wait_steps(30)
        since = job.mark()
        # Training waits for newcomers, or it would be over before they are ready.
        with paused(stage.folder / "pause") if size == 3 else contextlib.nullcontext():
            job.command("scale", job.run_id, str(size))
            if size == 3:
                ready = partial(job.kinds, "worker_standby", since)
                job.wait_for(lambda: len(ready()) == 2, "two newcomers are ready")  # noqa: B023
        job.wait_size(size, since)
    changed = accuracy(job)
    assert len(job.kinds("rescale_finished")) >= 4, "the start, and three rescales"
    assert steady >= 0.97
    assert abs(changed - steady) <= TOLERANCE


@contextlib.contextmanager
def paused(file: Path) -> Iterator[None]:
    """No rank begins another step while the block lasts."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()
