"""Ranks that are killed between the steps of two optimizers, and models that show nothing of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.dist.conftest import StartJob
from tests.dist.jobs import times_all_trained
from tests.dist.running import Stage
from tests.paths import COSTLY, ROOT, WORKER_PYTHONPATH

pytestmark = pytest.mark.dist

SCRIPT = ROOT / "tests" / "dist" / "scripts" / "adversaries.py"
PLACES = ("after critic 0", "after critic 1", "before generator", "after generator")


def undisturbed(folder: Path) -> list[list[torch.Tensor]]:
    """Train with one process, without a launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
    environment = {**kept, "PYTHONPATH": WORKER_PYTHONPATH, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=environment, check=True)
    found: list[list[torch.Tensor]] = torch.load(folder / "end.pt", weights_only=True)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=COSTLY) for seed in range(1, 6))])
def test_kill_9_between_two_steps_changes_no_more_than_rounding(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    kills = [(rank, rng.randint(3, 9), rng.choice(PLACES)) for rank in (1, 0)]
    monkeypatch.setenv("KILLS", json.dumps(kills))
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--np", "2", script=[sys.executable, str(SCRIPT), "FOLDER"])
    assert job.wait() == 0, job.story()
    audit = job.check_audit(finished=True)
    assert (audit.complete_epochs, audit.voided_steps) == (8, 0), (
        f"an undone body is not recorded: {job.story()}"
    )
    assert len([*job.folder.glob("died-*")]) == 2, job.story()
    assert times_all_trained(job.events, 2) >= 2, "before each kill"
    monkeypatch.delenv("KILLS")
    found = torch.load(job.folder / "end.pt", weights_only=True)
    torch.testing.assert_close(found, undisturbed(tmp_path), rtol=0, atol=1e-8)
