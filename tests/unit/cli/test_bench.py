"""``hvd-elastic bench input`` on a script of its own, and what ``bench`` refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.cli.app import main
from tests.paths import LIMIT_S, ROOT, WORKER_PYTHONPATH

SCRIPT = """
import time
import torch
import hvd_elastic.torch as hvd

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        time.sleep(0.3)
        return torch.zeros(2)

print("made by the script")
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = hvd.DataLoader(Slow(), 2, shuffle=True)

@hvd.run
def train(state):
    for epoch in hvd.epochs(10**6):
        for batch in loader:
            raise AssertionError("it trains")

train(hvd.State(model=model, optimizer=optimizer))
"""


def bench(*arguments: str, script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvd_elastic.cli.app", "bench", "input"]
    return subprocess.run(
        [*command, *arguments, "--", sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": WORKER_PYTHONPATH},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_loader_is_measured_without_training(tmp_path: Path) -> None:
    """No faster than an example takes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = bench("--seconds", "0.8", "--json", script=script)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # and nothing that the script prints
    assert found["examples"] > 0
    assert found["examples_per_s"] <= 1 / 0.3
    assert (found["batch_size"], found["processes"]) == (2, 0)
    assert found["cpu_s"] < found["seconds"]
    assert found["bound"] == "storage"  # it sleeps
    assert "made by the script" in done.stderr


def test_a_script_that_reads_nothing_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('done')")
    done = bench(script=script)
    assert done.returncode == 1
    assert "ended with status 0 before it had read batches" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthetic", "--np", "99"], "--np 99: hosts has 4 slots in all"),
        (["synthetic", "--np", "1,x"], "--np takes a whole number of 1 or more, not 'x'"),
        (["synthetic", "--emulate-device", "5"], "takes two times in ms"),
        (["synthetic", "--out", "r.pdf"], "has to end in .json, .csv, .html, .png"),
        (["synthetic", "--model", "vgg"], "it is resnet50 or gpt2"),
        (["allreduce", "--np", "1"], "a sum needs two slots or more"),
        (["allreduce", "--np", "5"], "hosts has 4 slots in all"),
        (["allreduce", "--max", "64"], "takes a size from 1KB to 16GB"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("n[1-4] slots=1\n")
    what, *options = words
    with pytest.raises(SystemExit) as ended:
        main(["bench", what, "-H", "hosts", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "home" / "runs").exists()
