"""Scripts of Lightning on ranks that die, join and leave end as if nothing had happened."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

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

pytest.importorskip("lightning", reason="Lightning is not installed: make test-trainers")
pytestmark = pytest.mark.dist

SCRIPT = SCRIPTS / "autoencoder.py"
PLACES = ("after the step", "validation", "saving", "end of the epoch", "before the step")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=COSTLY) for seed in range(1, 6))])
def test_kill_9_in_each_part_changes_nothing(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    kills = killed_at(PLACES[:3] if seed == 0 else rng.choices(PLACES, k=5), rng)
    monkeypatch.setenv("KILLS", json.dumps(kills))
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--np", "2", script=[sys.executable, str(SCRIPT), "FOLDER"])
    assert job.wait(WAIT_S) == 0, job.story()
    died = sorted(job.folder.glob("killed-*"))
    assert len(died) == len(kills), f"{[path.name for path in died]} of {kills}: {job.story()}"
    assert job.check_audit(finished=True).complete_epochs == 8
    monkeypatch.delenv("KILLS")
    assert differences(outcome(job.folder), alone(tmp_path / "alone", SCRIPT)) == []


@COSTLY
@pytest.mark.timeout(5400)
def test_twenty_changes_at_random_places_change_nothing(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fourteen ranks die, after each of which another one joins; meanwhile three leave and join."""
    monkeypatch.setenv("EPOCHS", "16")
    job = change_at_random(stage, start_job, SCRIPT, PLACES)
    assert job.check_audit(finished=True).complete_epochs == 16
    assert differences(outcome(job.folder), alone(tmp_path / "alone", SCRIPT)) == []


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
    expected = alone(tmp_path / "alone", SCRIPT, SLOW="0")
    assert differences(outcome(job.folder), expected) == []


@pytest.mark.parametrize(
    "place", ["between the steps", pytest.param("after the steps", marks=COSTLY)]
)
def test_kill_9_in_a_gan_changes_nothing(
    stage: Stage, start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("KILLS", json.dumps([[place, 1, 0]]))
    a, b, *_ = stage.hosts
    script = SCRIPTS / "gan.py"
    job = start_job({a: 1, b: 1}, "--np", "2", script=[sys.executable, str(script), "FOLDER"])
    assert job.wait(WAIT_S) == 0, job.story()
    assert (job.folder / "killed-0").exists(), job.story()
    assert job.check_audit(finished=True).complete_epochs == 8
    monkeypatch.delenv("KILLS")
    found, expected = outcome(job.folder), alone(tmp_path / "alone", script)
    for each in (found, expected):
        del each["largest"]  # a largest value goes with the rank that had it
    assert differences(found, expected) == []
    logged = [
        (folder / "logs" / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
        for folder in (job.folder, tmp_path / "alone")
    ]
    assert logged[0][0] == logged[1][0]
    assert len(logged[0]) >= len(logged[1]), "what the first rank 0 has logged is there"


@COSTLY
def test_weights_that_a_validation_exchanges_are_not_trained_on(
    stage: Stage, start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLS", json.dumps([["validation", 1, 1]]))
    monkeypatch.setenv("EXCHANGE", "1")
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--np", "2", script=[sys.executable, str(SCRIPT), "FOLDER"])
    assert job.wait(WAIT_S) != 0, job.story()
    assert (job.folder / "killed-0").exists(), job.story()
    assert "had other values than after the last batch" in job.story()
    assert not (job.folder / "end.json").exists()


@pytest.mark.parametrize(
    "feature",
    [
        "loaders",
        *(
            pytest.param(name, marks=COSTLY)
            for name in ("accumulate", "as_on", "batch_norm", "checkpoints", "loggers", "stopping")
        ),
    ],
)
def test_two_ranks_end_as_one(
    stage: Stage, start_job: StartJob, tmp_path: Path, feature: str
) -> None:
    a, b, *_ = stage.hosts
    script = SCRIPTS / "features.py"
    command = [sys.executable, str(script), "FOLDER", feature]
    job = start_job({a: 1, b: 1}, "--np", "2", script=command)
    assert job.wait(WAIT_S) == 0, job.story()
    assert differences(outcome(job.folder), alone(tmp_path / "alone", script, feature)) == []
    if feature == "checkpoints":
        saved = {path.name for path in (job.home / "runs" / job.run_id / "saved").glob("*.ckpt")}
        assert saved == {f"lightning-{number}.ckpt" for number in range(1, len(saved) + 1)}
        assert len(saved) >= len(outcome(job.folder)["files"]), "each is at the leader too"
