"""Runs on a real Spark: master and driver on this machine, workers on virtual hosts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from tests.dist.running import RunningJob, Stage
from tests.engines.spark_cluster import SparkCluster
from tests.paths import ROOT

pytest.importorskip("pyspark", reason="Spark is not installed; see make test-engines")
pytestmark = [pytest.mark.dist, pytest.mark.root, pytest.mark.timeout(400)]

DRIVER = str(ROOT / "tests" / "engines" / "spark_driver.py")


@pytest.fixture(scope="module")
def spark(stage: Stage) -> Iterator[SparkCluster]:
    if stage.cluster.loopback:
        pytest.skip("needs root")
    with (
        SparkCluster(stage.cluster, stage.folder / "spark") as spark,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SPARK_URL", spark.url)
        patch.setenv("SPARK_LOCAL_IP", spark.address)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        stage.services = frozenset({"java", "python3", "python"})
        for host in stage.hosts[:3]:
            spark.start_worker(host)
        yield spark


def test_a_lost_executor_is_a_lost_host_and_a_new_worker_joins(
    stage: Stage, spark: SparkCluster
) -> None:
    """Each example once; the pause does not wait for Spark to notice."""
    sizes = ("--np", "3", "--min-np", "2", "--max-np", "4")
    with RunningJob(stage, None, *sizes, program=(DRIVER,)) as job:
        job.wait_size(3)
        job.wait_steps(10)
        since = job.mark()
        host = stage.hosts[2]
        (executor,) = spark.executors(host)
        executor.send_signal(signal.SIGKILL)
        noticed = job.wait_event("host_lost", since, host=host)
        rescaled = job.wait_size(2, since)
        assert rescaled["mono"] - noticed["mono"] <= 1.0
        job.wait_size(3, since)  # Spark starts another executor there
        since = job.mark()
        spark.start_worker(stage.hosts[3])
        job.wait_size(4, since)
        job.wait_steps(10)
        (job.folder / "enough").touch()
        assert job.wait() == 0, job.story()
        job.check_audit(finished=True)
        job.check_equal_parameters()
