"""Ranks that compute gradients which are not finite, under a leader, with a kill and a join."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.checkpoint.manifests import find_checkpoints
from tests.dist.jobs import Job, call, environment, write_script
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

SCRIPT = '''\
"""Two of the examples are NaN, or what one rank computes is now and then."""
import json
import os
import signal
import sys
from pathlib import Path

import torch

import hvd_elastic.torch as hvd

folder, where, dies = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "dies"
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
model.double()
adam = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(adam, model)
inputs = torch.randn(90, 6).double()
targets = inputs.sum(1, keepdim=True)
if where == "data":
    inputs[[20, 70]] = torch.nan
loader = hvd.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 9)


@hvd.run
def train(state):
    for epoch in hvd.epochs(4):
        for a, b in loader:
            state.step_number += 1
            bad = state.step_number % 10 in (3, 8)
            optimizer.zero_grad()
            outputs = model(a)
            if where == "layer" and bad and hvd.rank() == hvd.size() - 1:
                outputs = outputs * torch.nan
            loss = torch.nn.functional.mse_loss(outputs, b)
            loss.backward()
            optimizer.step()
            mark = folder / "died"
            if dies and state.step_number == 24 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 0:
        (folder / "end.json").write_text(json.dumps([p.tolist() for p in model.parameters()]))


train(hvd.State(model=model, optimizer=optimizer, step_number=0))
'''


LOAD = {
    "torch": """
import sys, torch
from hvd_elastic.torch import load_model
model = load_model(sys.argv[1], torch.nn.Linear(2, 1))
print("finite", bool(model.weight.isfinite().all()))
""",
    "keras": """
import sys, keras, numpy as np
from hvd_elastic.keras import load_model
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
load_model(sys.argv[1], model)
print("finite", bool(np.isfinite(model.get_weights()[0]).all()))
""",
}


def flat(values: Any) -> list[float]:
    return [n for each in values for n in flat(each)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=COSTLY)])
@pytest.mark.parametrize("where", ["data", pytest.param("layer", marks=COSTLY)])
def test_steps_that_are_not_finite_are_left_out_as_on_one_rank(
    tmp_path: Path, where: str, ranks: int
) -> None:
    script = write_script(tmp_path, SCRIPT)
    alone, folder = tmp_path / "alone", tmp_path / "ranks"
    alone.mkdir()
    folder.mkdir()
    command = [sys.executable, str(script), str(alone), where, "lives"]
    subprocess.run(command, env=environment(tmp_path), check=True, timeout=LIMIT_S)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots={ranks + 1}\n", encoding="utf-8")
    options = ["--hostfile", hosts, "--np", ranks, "--min-np", ranks, "--spares", 1]
    with Job(*options, "--", sys.executable, script, folder, where, "dies", home=tmp_path) as job:
        assert job.wait() == 0, job.text
        assert "is left out: its gradients are not finite" in job.text
        told = [each["skipped_steps"] for each in job.events("metrics") if "skipped_steps" in each]
        assert told == sorted(told)
        assert 0 < told[-1] <= 8
        (finished,) = job.events("run_finished")
        assert finished["steps"] == 40
    assert (folder / "died").exists()
    expected = flat(json.loads((alone / "end.json").read_text()))
    found = flat(json.loads((folder / "end.json").read_text()))
    assert found == pytest.approx(expected, rel=1e-6)


@COSTLY
@pytest.mark.parametrize("kind", ["data", "layer", "scale", "rank"])
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_each_of_thirty_bad_steps_is_left_out_and_each_checkpoint_is_healthy(
    tmp_path: Path, framework: str, kind: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n", encoding="utf-8")
    script = Path(__file__).parent / "scripts" / "bad_steps.py"
    options = ["--hostfile", hosts, "--checkpoint-every", 0.05, "--keep-checkpoints", 1000]
    train = [sys.executable, script, framework, kind, tmp_path]
    with Job(*options, "--", *train, home=tmp_path) as job:
        assert job.wait() == 0, job.text
        found = find_checkpoints(job.folder / "checkpoints")
    assert not any(each.not_finite for each in found)
    bad: list[int] = []
    for rank in range(3):
        told = json.loads((tmp_path / f"{framework}-{kind}-{rank}.json").read_text())
        changed, bad = told["changed"], told["bad"]
        assert [step for step, taken in enumerate(changed) if not taken] == bad
        assert len(bad) == 30
        assert told["finite"]
    steps = sorted(each.step for each in found)
    after = {next((step for step in steps if step > each), None) for each in bad[:-2]}
    assert None not in after
    assert len(after) > 10, "a checkpoint is written after most of them, before the next"


@COSTLY
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_resumed_run_and_load_model_pass_over_a_checkpoint_that_is_not_finite(
    tmp_path: Path, framework: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n", encoding="utf-8")
    script = Path(__file__).parent / "scripts" / "spoilt_weights.py"
    options = ["--hostfile", hosts, "--checkpoint-every", 0.2, "--on-not-finite", "ignore"]
    train = [sys.executable, script, framework, tmp_path]
    with Job(*options, "--", *train, home=tmp_path) as job:
        assert job.wait() == 1, job.text
        kept = find_checkpoints(job.folder / "checkpoints")
        finite = max(each.step for each in kept if not each.not_finite)
        (finished,) = job.events("run_finished")
        assert finished["checkpoint_step"] == finite < max(each.step for each in kept)
        told = call("status", job.run_id, home=tmp_path).stdout
        assert "holds NaN or infinity in" in told, told
        loaded = subprocess.run(
            [sys.executable, "-c", LOAD[framework], job.run_id],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert loaded.stdout == "finite True\n", loaded.stderr
        done = call("run", "--resume", job.run_id, home=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        (restored,) = job.events("restored")
        assert restored["step"] == finite
    assert "NaN" in done.stdout + done.stderr
    assert "finite True" in done.stdout + done.stderr
