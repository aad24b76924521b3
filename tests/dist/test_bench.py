"""``hvd-elastic bench``: one elastic run on virtual hosts measures all sizes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.running import Stage
from tests.paths import COSTLY, LITTLE_WORK, NEEDS_TENSORFLOW, ROOT, WORKER_PYTHONPATH

pytestmark = pytest.mark.dist


def bench(stage: Stage, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "hosts").write_text("".join(f"{host} slots=1 price=1.5\n" for host in stage.hosts))
    environment = {
        **os.environ,
        **LITTLE_WORK,
        "HVD_ELASTIC_HOME": str(folder / "home"),
        "HVD_ELASTIC_SSH_CONFIG": str(stage.cluster.ssh_config),
        "PYTHONPATH": f"{WORKER_PYTHONPATH}{os.pathsep}{ROOT / 'tests/dist/scripts'}",
    }
    command = [sys.executable, "-m", "hvd_elastic.cli.app", "bench", *words]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "framework", ["torch", pytest.param("tensorflow", marks=[NEEDS_TENSORFLOW, COSTLY])]
)
def test_each_size_is_measured_in_one_run(stage: Stage, framework: str) -> None:
    stage.boot_all()
    folder = stage.folder / f"bench-{framework}-{os.getpid()}"
    folder.mkdir()
    words = ["synthetic", "-H", "hosts", "--np", "1,3,4", "--seconds", "1", "--batch-size", "8"]
    words += ["--framework", framework, "--model", f"bench_models:{framework}_net"]
    words += [part for suffix in ("json", "csv", "html") for part in ("--out", f"r.{suffix}")]
    done = bench(stage, folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    assert [each["slots"] for each in found["sizes"]] == [1, 3, 4]
    assert [each["hosts"] for each in found["sizes"]] == [1, 3, 4]
    for size in found["sizes"]:
        assert size["throughput"] == pytest.approx(8 * size["slots"] / size["step_s"])
        assert size["low"] < size["throughput"] < size["high"]
    assert [each["slots"] for each in found["predicted"]] == [2]
    assert found["parameters"] == 16 * 4 + 4
    with (folder / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["slots"] for row in rows] == ["1", "3", "4", "2"]
    assert "r.json" not in (folder / "r.html").read_text()
    assert "Throughput" in (folder / "r.html").read_text()
    assert "cost of epochs of 1,281,167 examples" in done.stdout
    assert len(list((folder / "home" / "runs").iterdir())) == 1
    again = bench(stage, folder, "compare", "r.json", "r.json")
    assert again.returncode == 0
    assert again.stdout.count("within the noise") == 3


def test_a_model_that_fails_is_told(stage: Stage, tmp_path: Path) -> None:
    words = ["-H", "hosts", "--np", "1", "--model", "bench_models:no_such_net"]
    done = bench(stage, tmp_path, "synthetic", *words)
    assert done.returncode == 1
    assert "no_such_net" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_batch_that_fits_into_memory_is_named(stage: Stage, tmp_path: Path) -> None:
    words = ["-H", "hosts", "--np", "1", "--model", "bench_models:greedy_net", "--batch-size", "8"]
    done = bench(stage, tmp_path, "synthetic", *words)
    assert done.returncode == 1
    assert "greedy_net with 8 examples does not fit into the memory of host" in done.stderr
    assert "--batch-size 2 does" in done.stderr
    assert "Traceback" not in done.stderr


def test_sums_of_all_sizes_are_timed(stage: Stage, tmp_path: Path) -> None:
    words = ["-H", "hosts", "--np", "2", "--max", "1MB", "--json"]
    done = bench(stage, tmp_path, "allreduce", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["slots"], found["hosts"]) == (2, 2)
    assert [each["size"] for each in found["sums"]] == [1024 * 4**power for power in range(6)]
    for each in found["sums"]:
        # of two ranks each sends and receives as much as the tensor has
        assert each["bus_bandwidth"] == pytest.approx(each["size"] / each["seconds"])
