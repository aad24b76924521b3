"""``breakpoint()`` in a rank of a run, and ``hvd-elastic debug``."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import Stage
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

SCRIPT = """
import pdb
import torch
import hvd_elastic.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
@hvd.run
def train(state):
    for epoch in hvd.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if hvd.rank() == 1 and state.step in (3, 4):
                breakpoint()
            if hvd.rank() == 1 and state.step == 15:
                pdb.set_trace()
            optimizer.step()
            state.step += 1
class Looks:
    def __len__(self): return len(data)
    def __getitem__(self, index):
        breakpoint()  # in a process of the loader
        return data[index]
loader = hvd.DataLoader(Looks(), 24, num_workers=1)
train(hvd.State(model=model, optimizer=optimizer, step=0))
"""


def test_a_rank_is_joined_at_a_breakpoint_and_profiled(stage: Stage, start_job: StartJob) -> None:
    script = stage.folder / "breakpoints.py"
    script.write_text(SCRIPT)
    a, b, *_ = stage.hosts
    options = ("--min-np", "2", "--profile", "1")
    job = start_job({a: 1, b: 1}, *options, script=[sys.executable, str(script)])
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONBREAKPOINT"}

    def join(*typed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hvd_elastic.cli.app", "debug", job.run_id, f"{b}:0"],
            input="".join(f"{line}\n" for line in typed),
            env={**environment, "HVD_ELASTIC_HOME": str(job.home)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return done.stdout

    job.wait_event("warning", 0)
    first = join("p ('step', state.step, x.shape)", "continue", "p ('then', state.step)", "quit")
    assert "('step', 3, torch.Size([12, 4]))" in first
    assert "('then', 4)" in first
    assert "('step', 15)" in join("p ('step', state.step)")
    assert job.wait() == 0, job.story()
    told = [event["message"] for event in job.kinds("warning")]
    stops = [message.partition("stops at breakpoint() in ")[2] for message in told]
    wanted = [f"{script}:{line}, and the others wait; join it by: hvd-elastic" for line in (17, 19)]
    for where in wanted:
        assert sum(stop.startswith(where) for stop in stops) == 1, stops
    assert "breakpoint() is passed over in a process that the script has started" in job.story()
    profile = job.command("get", job.run_id, "profile-rank1-step25.json.gz", str(stage.folder))
    assert "profile-rank1-step25.json.gz: " in profile
    with gzip.open(stage.folder / "profile-rank1-step25.json.gz") as file:
        assert "aten::addmm" in {event.get("name") for event in json.load(file)["traceEvents"]}


@COSTLY
def test_a_worker_at_a_breakpoint_leaves_with_its_host(stage: Stage, start_job: StartJob) -> None:
    script = stage.folder / "breakpoints.py"
    script.write_text(SCRIPT)
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, script=[sys.executable, str(script)])
    job.wait_event("warning", 0)
    job.use({a: 1})
    assert job.wait() == 0, job.story()
    assert any("since it is to leave" in event["message"] for event in job.kinds("warning"))
