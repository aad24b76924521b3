"""Random courses of joins, leaves and kills: every example is used exactly once in every epoch."""

from __future__ import annotations

import os

import pytest

from tests.dist.conftest import EVERY_STYLE, current_job
from tests.dist.running import RunningJob, Stage
from tests.dist.schedules import Act, make_schedule
from tests.paths import ALL
from tests.unit.data.shards import write_numbers

SCHEDULES = int(os.environ.get("HVD_ELASTIC_TEST_SCHEDULES", "10" if ALL else "1"))
"""More make a soak: HVD_ELASTIC_TEST_SCHEDULES=500 make test ARGS=tests/dist/test_schedules.py"""
# Hosts join, leave and crash in schedule 3, and workers are killed while others are starting.
FIRST_SEED = int(os.environ.get("HVD_ELASTIC_TEST_FIRST_SEED", "3"))
SCHEDULES_IN_A_RUN = 5
"""Starting a run takes longer than a schedule, so several are played on one, one after another."""

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def shards(stage: Stage) -> str:
    return str(write_numbers(stage.folder / "scheduled", [25, 40, 0, 31, 17, 37], width=8))


@pytest.fixture
def job(stage: Stage, shared_jobs: list[RunningJob], style: str, shards: str) -> RunningJob:
    """A job that is on its way to one process on each of the first two hosts.

    With PyTorch it reads shards, and its batch adapts.
    """
    reads = ("--shards", shards, "--max-batch-size", "48") if style == "torch" else ()
    hosts = dict.fromkeys(stage.hosts[:2], 1)
    return current_job(stage, shared_jobs, hosts, style=style, script_options=reads)


def play(stage: Stage, job: RunningJob, act: Act) -> None:
    """Do it; whom it would hit may be gone, or not there yet."""
    workers = job.workers()
    if act.kind == "hosts":
        job.use(act.hosts)
    elif act.kind == "crash":
        stage.cluster.crash(act.host)
        stage.cluster.boot(act.host)
    elif act.kind == "kill_agent":
        job.kill_agent(act.host)
    elif act.kind == "kill_rank_0":
        workers = [worker for worker in workers if worker.name == job.name_of_rank(0)]
    elif act.kind == "kill_host":
        workers = [worker for worker in workers if worker.host == act.host]
    elif act.kind == "kill_worker":
        workers = [w for w in workers if (w.host, w.slot) == (act.host, act.slot)]
    if act.kind.startswith("kill") and act.kind != "kill_agent":
        for worker in workers:
            worker.kill()


@EVERY_STYLE
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SCHEDULES))
def test_every_example_is_used_exactly_once(stage: Stage, job: RunningJob, seed: int) -> None:
    schedule = make_schedule(seed, stage.hosts[:3])
    for act in schedule:
        job.wait_steps(act.after_steps)
        play(stage, job, act)
    hosts = schedule[-1].hosts
    job.wait_for(lambda: job.settled_on(hosts), f"training on {hosts} after {schedule}")
    job.wait_steps(3)
    job.check_equal_parameters()
    job.check_audit()
    if (seed - FIRST_SEED) % SCHEDULES_IN_A_RUN == SCHEDULES_IN_A_RUN - 1:
        job.finish()


@EVERY_STYLE
def test_the_last_run_of_the_schedules_ends_well(shared_jobs: list[RunningJob]) -> None:
    if shared_jobs and shared_jobs[-1].process.poll() is None:
        shared_jobs[-1].finish()
