"""Runs on a real Spark: master and driver on this machine, workers on virtual hosts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed.run_processes import temporary_entries
from benchmarks.testbed.spark import SparkCluster
from tests.dist.running import RunningJob, Stage
from tests.paths import ALL, LITTLE_WORK, ROOT, WORKER_PYTHONPATH

pytest.importorskip("pyspark", reason="Spark is not installed; see make test-engines")
pytestmark = [pytest.mark.dist, pytest.mark.root, pytest.mark.timeout(3600 if ALL else 1800)]

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


def ours_left(stage: Stage) -> list[str]:
    """What is left of ours on the hosts: folders, and processes."""
    left = [name for _, name in temporary_entries(stage.cluster) if "hvd_elastic" in name]
    for host in stage.hosts:
        for pid in stage.cluster.pids(host):
            with contextlib.suppress(psutil.Error):
                command = " ".join(psutil.Process(pid).cmdline())
                left += [command] if "hvd_elastic" in command else []
    return left


def test_a_lost_executor_is_a_lost_host_and_a_new_worker_joins(
    stage: Stage, spark: SparkCluster
) -> None:
    """Each example once; the pause does not wait for Spark to notice."""
    sizes = ("--np", "3", "--min-np", "2", "--max-np", "4")
    with RunningJob(stage, None, *sizes, program=(DRIVER,)) as job:
        job.wait_size(3, deadline_s=600)
        job.wait_steps(10)
        since = job.mark()
        host = stage.hosts[2]
        (executor,) = spark.executors(host)
        executor.send_signal(signal.SIGKILL)
        noticed = job.wait_event("host_lost", since, host=host)
        rescaled = job.wait_event("rescale_finished", since)
        assert rescaled["mono"] - noticed["mono"] < 60, "not the time after which Spark notices"
        job.wait_size(3, since)  # Spark starts another executor there
        since = job.mark()
        spark.start_worker(stage.hosts[3])
        job.wait_size(4, since)
        job.wait_steps(10)
        (job.folder / "enough").touch()
        assert job.wait() == 0, job.story()
        job.check_audit(finished=True)
        job.check_equal_parameters()
        job.wait_for(lambda: not ours_left(stage), "an end of all on the hosts", ended_too=True)


def test_what_users_of_sparks_own_class_write_runs_unchanged(
    spark: SparkCluster, tmp_path: Path
) -> None:
    values = 100 if ALL else 3
    there = [name for name in ("keras", "lightning") if importlib.util.find_spec(name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.spark_forms", str(tmp_path), str(values), *there],
        env={**os.environ, **LITTLE_WORK, "PYTHONPATH": WORKER_PYTHONPATH},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["function here"] == found["function there"] == ["0", 1e-3, "yes"]
    assert found["script"] is None
    lines = done.stdout.splitlines()
    assert "rate 0.01 at rank 0" in lines
    assert {f"[rank {rank}] rate 0.01 at rank {rank}" for rank in (1, 2)} <= {*lines}
    assert found["data parallel"] == [3, 0.0]
    assert found["values"] == list(range(values))
    assert found["rows of rank 0"] == list(range(0, 50, 3))
    assert found["rows"] == [3, list(range(50))]
    assert found.get("lightning", [3, 2]) == [3, 2]
    assert found.get("keras", [3, 8]) == [3, 8]
    assert "9 processes wanted, and the executors of the cluster have room for" in found["too many"]
    assert "Spark assigns no GPUs to tasks" in found["no GPU"]
    assert found["thread"] == 1
    for name in ("null", "null in an array", "null vector"):
        assert found[name].startswith("column 'a' of the DataFrame has nulls"), found
    assert "several columns named 'a'" in found["two columns"]
    assert "cancelled job group mine, which ends the training" in found["group cancelled"]
    assert "the Spark session was stopped" in found["stopped"]
    assert "the executors have another Python than the driver" in found["another Python"]
    if sys.prefix != sys.base_prefix:  # else that Python has all packages
        assert "the executors have no package" in found["no package"]
