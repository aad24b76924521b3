"""Runs on a real Slurm: slurmctld on this machine, a slurmd on each of four virtual hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.running import RunningJob, Stage
from tests.engines.slurm_cluster import SlurmCluster, missing_programs

pytestmark = [pytest.mark.dist, pytest.mark.root, pytest.mark.timeout(300)]

SALLOC = ("salloc", "--quiet", "--no-kill", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def slurm(stage: Stage) -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing or stage.cluster.loopback:
        pytest.skip(f"needs root and Slurm (missing: {missing}); see make test-engines")
    with (
        SlurmCluster(stage.cluster, stage.folder / "slurm") as slurm,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(slurm.config))
        stage.services = frozenset({"slurmd", "slurmstepd"})
        yield slurm


@pytest.fixture
def nodes(stage: Stage, slurm: SlurmCluster) -> list[str]:
    """All nodes, up and idle."""
    for host in stage.hosts:
        if stage.cluster.status(host) == "off":
            stage.cluster.boot(host)
            slurm.start_slurmd(host)
    slurm.wait_idle(stage.hosts)
    return stage.hosts


def end_well(job: RunningJob) -> None:
    """Let training end, and check it; a crashed host keeps its files, unlike in finish()."""
    (job.folder / "enough").touch()
    assert job.wait() == 0, job.story()
    job.check_audit(finished=True)
    job.check_equal_parameters()


def test_a_lost_node_costs_one_step_and_no_example(stage: Stage, nodes: list[str]) -> None:
    """The run is led in salloc's shell; Slurm itself notices the loss much later."""
    with RunningJob(stage, None, launcher=(*SALLOC, "--nodes=3")) as job:
        job.wait_size(3)
        job.wait_steps(10)
        since = job.mark()
        lost = job.events[0]["hosts"][-1][0]
        stage.cluster.crash(lost)
        noticed = job.wait_event("host_lost", since, host=lost)
        rescaled = job.wait_size(2, since)
        assert rescaled["mono"] - noticed["mono"] <= 1.0
        job.wait_steps(10)
        end_well(job)


def test_a_run_leaves_nothing_on_its_nodes(stage: Stage, nodes: list[str]) -> None:
    with RunningJob(stage, None, launcher=(*SALLOC, "--nodes=2")) as job:
        job.wait_size(2)
        job.wait_steps(10)
        job.finish()
