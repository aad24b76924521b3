"""What a run learns does not depend on what happened to its processes: the batches are the same."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import ALL, COSTLY, LIMIT_S

KILLS = int(os.environ.get("HVD_ELASTIC_TEST_KILLS", "5" if ALL else "3"))
"""More make a soak: HVD_ELASTIC_TEST_KILLS=300 make test ARGS=tests/dist/test_same_outcome.py"""
pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800 + 60 * KILLS)]
KILL_SEED = int(os.environ.get("HVD_ELASTIC_TEST_KILL_SEED", "0"))
# In 32 bits the rounding of one sum is a percent of the parameters a thousand steps later.
MODEL = ("--seed", "7", "--double", "--examples", "144", "--batch-size", "12")
SLOW = (*MODEL, "--step-time", "0.1")
"""So that the undisturbed run has not many steps to repeat."""
STEPS_IN_AN_EPOCH = 12


def run_undisturbed(stage: Stage, start_job: StartJob, like: RunningJob) -> RunningJob:
    """Train as long as ``like`` has, with two processes to whom nothing happens."""
    epochs = like.kinds("run_finished")[-1]["steps"] // STEPS_IN_AN_EPOCH
    hosts = {stage.hosts[0]: 1, stage.hosts[1]: 1}
    script_options = (*MODEL, "--step-time", "0", "--epochs", str(epochs))
    job: RunningJob = start_job(hosts, "--min-np", "2", script_options=script_options)
    assert job.wait(LIMIT_S + 10 * epochs) == 0, job.story()
    return job


def digests(job: RunningJob) -> dict[int, str]:
    """Step → parameters and optimizer state after it, as every rank held them."""
    job.check_equal_parameters()
    found: dict[int, str] = {}
    for record in job.digests():
        if record["kind"] == "same":
            # A step that is done again is done with the same batch from the same state.
            assert found.setdefault(record["step"], record["digest"]) == record["digest"]
    return found


@EVERY_STYLE
def test_random_kills_change_no_bit(stage: Stage, start_job: StartJob) -> None:
    """With two ranks the order of a sum does not matter, so the results agree bit for bit."""
    a, b, c, _ = stage.hosts
    job = start_job(
        {a: 2, b: 2, c: 1}, "--np", "2", "--min-np", "2", "--spares", "2", script_options=SLOW
    )
    job.wait_size(2)
    rng = random.Random(KILL_SEED)
    killed = 0
    while killed < KILLS:
        # At least one rank lives on, so the state does.
        since = job.mark()
        members = {job.name_of_rank(rank) for rank in (0, 1)} if job.digests() else set()
        trains = [worker for worker in job.workers() if worker.name in members]
        time.sleep(rng.random() * 0.2)
        if len(trains) < 2:
            continue
        rng.choice(trains).kill()
        killed += 1
        job.wait_size(2, since)
    audit = job.finish()
    assert audit.voided_steps <= KILLS, "at most the step in flight of each kill"
    assert not job.kinds("restored")
    assert digests(job).items() <= digests(run_undisturbed(stage, start_job, job)).items()


@EVERY_STYLE
@COSTLY
def test_resizes_change_no_more_than_rounding(stage: Stage, start_job: StartJob) -> None:
    """The global batch stays the script's at every world size."""
    a, b, c, _ = stage.hosts
    job = start_job({a: 1}, script_options=SLOW)
    job.wait_size(1)
    for hosts in ({a: 1, b: 1, c: 1}, {b: 1}, {a: 2, b: 2}):
        job.wait_steps(10)
        since = job.mark()
        job.use(hosts)
        job.wait_size(sum(hosts.values()), since)
    job.finish()
    assert not job.kinds("restored")
    undisturbed = run_undisturbed(stage, start_job, job)
    here, there = trained(job), trained(undisturbed)
    assert here.keys() == there.keys()
    for name in here:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-6, atol=1e-9)


def trained(job: RunningJob) -> dict[str, Any]:
    """The parameters that rank 0 wrote at its end."""
    path = job.folder / "trained.pt"
    if path.exists():
        return {name: tensor.numpy() for name, tensor in torch.load(path).items()}
    return dict(np.load(path.with_suffix(".npz")))
