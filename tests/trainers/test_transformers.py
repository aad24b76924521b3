"""Scripts of Hugging Face's Trainer on ranks that die, join and leave end as if alone."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.paths import COSTLY
from tests.trainers.outcomes import (
    SCRIPTS,
    WAIT_S,
    alone,
    change_at_random,
    differences,
    killed_at,
    outcome,
)

pytest.importorskip("transformers", reason="transformers is not installed: make test-trainers")
pytestmark = pytest.mark.dist

SCRIPT, FEATURES = SCRIPTS / "clm.py", SCRIPTS / "hf_features.py"
PLACES = ("after the step", "evaluation", "saving", "end of the epoch", "before the step")


def check_ends_as(found: Any, expected: Any) -> None:
    """Their losses are computed in float32, whatever the model's type is."""
    assert differences(found, expected, within=1e-6) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=COSTLY) for seed in range(1, 6))])
def test_kill_9_in_each_part_changes_nothing(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    places = PLACES[:3] if seed == 0 else rng.choices(PLACES, k=5)
    kills = killed_at(places, rng)
    monkeypatch.setenv("KILLS", json.dumps(kills))
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--np", "2", script=[sys.executable, str(SCRIPT), "FOLDER"])
    assert job.wait(WAIT_S) == 0, job.story()
    died = sorted(job.folder.glob("killed-*"))
    assert len(died) == len(kills), f"{[path.name for path in died]} of {kills}: {job.story()}"
    assert job.check_audit(finished=True).complete_epochs == 4
    monkeypatch.delenv("KILLS")
    check_ends_as(outcome(job.folder), alone(tmp_path / "alone", SCRIPT))


@COSTLY
@pytest.mark.timeout(5400)
def test_twenty_changes_at_random_places_change_nothing(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fourteen ranks die, after each of which another one joins; meanwhile three leave and join."""
    monkeypatch.setenv("EPOCHS", "15")
    job = change_at_random(stage, start_job, SCRIPT, PLACES)
    assert job.check_audit(finished=True).complete_epochs == 15
    check_ends_as(outcome(job.folder), alone(tmp_path / "alone", SCRIPT))


def test_stopped_after_a_rank_has_left_and_resumed_at_another_size(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCUMULATE", "3")
    monkeypatch.setenv("SLOW", "1")
    a, b, *_ = stage.hosts
    script = [sys.executable, str(SCRIPT), "FOLDER"]
    job = start_job({a: 1, b: 1}, "--np", "2", "--min-np", "1", script=script)
    job.wait_size(2)
    mark = job.mark()
    job.command("scale", job.run_id, "1")
    job.wait_size(1, mark)
    job.command("stop", job.run_id)
    job.wait(WAIT_S)
    assert not (job.folder / "end.json").exists(), job.story()
    monkeypatch.setenv("SLOW", "0")
    job.resume("--np", "2")
    assert job.wait(WAIT_S) == 0, job.story()
    check_ends_as(outcome(job.folder), alone(tmp_path / "alone", SCRIPT))


OTHERS = (
    *("classification", "lengths", "batch metrics", "plateau", "checkpointing", "streams", "sft"),
    "preferences",
)


@pytest.mark.parametrize(
    "feature", ["lora", *(pytest.param(name, marks=COSTLY) for name in OTHERS)]
)
def test_two_ranks_end_as_one(
    stage: Stage, start_job: StartJob, tmp_path: Path, feature: str
) -> None:
    a, b, *_ = stage.hosts
    command = [sys.executable, str(FEATURES), "FOLDER", feature]
    job = start_job({a: 1, b: 1}, "--np", "2", script=command)
    assert job.wait(WAIT_S) == 0, job.story()
    expected = alone(tmp_path / "alone", FEATURES, feature)
    assert differences(outcome(job.folder), expected, within=2e-5) == []


@pytest.mark.parametrize("feature", ["in order", pytest.param("rewards", marks=COSTLY)])
def test_alone_it_computes_what_the_plain_trainer_does(tmp_path: Path, feature: str) -> None:
    plain = alone(tmp_path / "plain", FEATURES, feature, PLAIN="1")
    assert differences(alone(tmp_path / "ours", FEATURES, feature), plain, within=2e-5) == []
