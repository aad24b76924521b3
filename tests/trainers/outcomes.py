"""What scripts of trainers write at their end, alone and on ranks that change."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import ROOT, WORKER_PYTHONPATH

SCRIPTS = ROOT / "tests" / "trainers" / "scripts"
WAIT_S = 1000.0


def alone(folder: Path, script: Path, *words: str, **environment: str) -> Any:
    """Train with one process, without a launcher; return what the script has written."""
    folder.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
    kept |= {"PYTHONPATH": WORKER_PYTHONPATH, "OMP_NUM_THREADS": "1"} | environment
    subprocess.run([sys.executable, str(script), str(folder), *words], env=kept, check=True)
    return outcome(folder)


def outcome(folder: Path) -> Any:
    return json.loads((folder / "end.json").read_text())


def differences(found: Any, expected: Any, place: str = "", within: float = 1e-8) -> list[str]:
    """Where two outcomes differ by more than rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        pairs = [(found[key], expected[key], f"{place}/{key}") for key in expected]
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} entries, not {len(expected)}"]
        pairs = [(*pair, place) for pair in zip(found, expected, strict=True)]
    else:
        same = found == pytest.approx(expected, abs=within, nan_ok=True)
        return [] if same else [f"{place}: {found}, not {expected}"]
    return [each for pair in pairs for each in differences(*pair, within)]


def killed_at(places: Sequence[str], rng: random.Random) -> list[tuple[str, int, int]]:
    """Place, epoch and rank of each death; the one that saves has the files."""
    return [
        (place, number, 0 if place == "saving" else rng.choice((0, 1)))
        for number, place in enumerate(places)
    ]


def leave_and_join(job: RunningJob, *deaths: int) -> None:
    """Have one of two ranks leave, and another one join, after each of these numbers of deaths."""
    for after in deaths:
        job.wait_for((job.folder / f"killed-{after - 1}").exists, f"{after} deaths", WAIT_S)
        for size in (2, 1, 2):
            job.command("scale", job.run_id, str(size))
            job.wait_for(partial(lambda size: job.size() == size, size), f"size {size}", WAIT_S)


def change_at_random(
    stage: Stage, start_job: StartJob, script: Path, places: Sequence[str]
) -> RunningJob:
    """Train on two ranks of which fourteen die at random, while three leave; return the job."""
    rng = random.Random(20)
    kills = killed_at(rng.choices(places, k=14), rng)
    a, b, *_ = stage.hosts
    words = [sys.executable, str(script), "FOLDER"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLS", json.dumps(kills))
        job: RunningJob = start_job({a: 1, b: 1}, "--np", "2", "--min-np", "1", script=words)
    leave_and_join(job, 3, 7, 11)
    assert job.wait(3 * WAIT_S) == 0, job.story()
    assert len([*job.folder.glob("killed-*")]) == len(kills), job.story()
    return job
