"""Changes and failures where gradients travel over NCCL; needs a GPU, one is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_elastic.torch.gradient_statistics import GradientStatistics
from tests.dist.jobs import environment, hostfile_of, write_script
from tests.paths import LIMIT_S, ROOT

horovod = pytest.importorskip("horovod.torch", reason="Horovod is not built; see make horovod")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not horovod.nccl_built(), reason="no GPU, or no NCCL"
)


def test_workers_that_die_and_come_leave_training_whole(tmp_path: Path):
    """Its own checks: every example once, equal parameters, nobody dies but those it kills."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--parts", "faults"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    measured = json.loads(out.with_suffix(".raw.json").read_text())
    assert [len(row["pause_s"]["samples_s"]) for row in measured["faults"]] == [3, 1, 1, 1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_statistics_of_gradients_are_those_of_the_cpu(kind: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(40))).double()
        model = model.to(device)
        optimizer = kind(model.parameters(), lr=1e-3)
        statistics = GradientStatistics(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(step)).double()
            model(inputs.to(device)).square().sum().backward()
            if statistics.ready:
                statistics.see(model.parameters())
                statistics.end_pass(1.0)
                statistics.end_step(step, 8, model.parameters())
            optimizer.step()
        found.append(statistics.drain())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


def test_more_slots_than_gpus_is_an_error_that_says_what_to_do(tmp_path: Path):
    gpus = torch.cuda.device_count()
    hosts = hostfile_of(tmp_path / "hosts", ["localhost"], slots=gpus + 1)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hvd_elastic.cli.app", "run", "-H", str(hosts), "--"),
            *(sys.executable, str(write_script(tmp_path))),
        ],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert f"slot {gpus} has no GPU of its own" in done.stdout + done.stderr
    assert f"slots={gpus}" in done.stdout + done.stderr
