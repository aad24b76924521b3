"""The tests of Spark's own distributor, from a checkout of apache/spark, with our class."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.paths import LITTLE_WORK, ROOT, WORKER_PYTHONPATH

pytest.importorskip("pyspark", reason="Spark is not installed; see make test-engines")

CHECKOUT = os.environ.get("SPARK_CHECKOUT", "")
OTHERWISE = {
    "test_encryption_passes": "_check_encryption",
    "test_encryption_fails": "_check_encryption",
    "test_execute_command": "_execute_command",
    "test_create_torchrun_command": "_create_torchrun_command",
    "test_local_training_succeeds": "_run_local_training",
    "test_dist_training_succeeds": "_run_distributed_training",
    "test_get_num_tasks_distributed": "_get_num_tasks",
    "test_get_num_tasks_locally": "use_gpu=True, and this machine",
}
"""Tests that cannot pass, and a part of the reason; docs/spark.md has the reasons in words."""


@pytest.mark.skipif(not CHECKOUT, reason="SPARK_CHECKOUT names no checkout of apache/spark")
@pytest.mark.timeout(3600)
def test_sparks_own_tests_pass_but_for_those_of_its_private_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.spark_suite", CHECKOUT],
        env={
            **os.environ,
            **LITTLE_WORK,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([WORKER_PYTHONPATH, os.environ.get("PYTHONPATH", "")]),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    endings = json.loads(done.stdout.splitlines()[-1])
    assert "test_data_loader" in endings
    otherwise = {name: said for name, said in endings.items() if said}
    unknown = {n: said for n, said in otherwise.items() if OTHERWISE.get(n, "no") not in said}
    assert not unknown, done.stderr
