"""A run that is stopped leaves a checkpoint of all that was trained, whoever of it still lives.

One that its script ends in the middle of an epoch has used everything until there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from hvd_elastic.checkpoint.manifests import newest_valid
from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage

pytestmark = pytest.mark.dist

RETURNS = """
import torch
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = hvd.DataLoader(TensorDataset(torch.randn(1000, 2)), 32, shuffle=True)


@hvd.run
def train(state):
    for epoch in hvd.epochs(20):
        for step, (inputs,) in enumerate(loader):
            if (epoch, step) == (2, 12):
                return
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            state.commit()


train(hvd.State(model=model, optimizer=optimizer))
"""

NO_CHECKPOINTS = ("--checkpoint-every", "600")
"""But the last one."""
PATIENT = ("--failure-timeout", "8")
"""Longer than a busy machine keeps a process from running, since nobody else may be lost."""


def made(job: RunningJob) -> int:
    return max((record["step"] for record in job.digests()), default=0)


def kept(job: RunningJob) -> int:
    """The step that the stopped run can go on from."""
    assert job.wait() == 130, job.story()
    (ended,) = job.kinds("run_finished")
    found = newest_valid(job.home / "runs" / job.run_id / "checkpoints")
    assert found is not None, job.story()
    assert ended["checkpoint_step"] == found.step
    return found.step


def test_a_script_that_returns_in_the_middle_of_an_epoch_has_read_all_until_there(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    script = stage.folder / "returns.py"
    script.write_text(RETURNS)
    job = start_job({a: 1, b: 1}, script=[sys.executable, str(script)])
    assert job.wait() == 0, job.story()
    told = json.loads(job.command("report", job.run_id, "--json"))
    assert told["audit"]["ok"], told["audit"]
    assert told["audit"]["sentence"] == (
        "each of 1000 examples (by index) used exactly once in each of 2 epochs; "
        "ended in epoch 2 with 384 used, none twice"
    )
    assert "2 (ended in it)" in Path(told["path"]).read_text()
    job.check_nothing_left()


def test_a_frozen_rank_0_is_not_the_only_one_that_is_asked(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, *NO_CHECKPOINTS, *PATIENT)
    job.wait_size(2)
    job.wait_steps(5)
    os.kill(job.worker(a).pid, signal.SIGSTOP)
    before = made(job)  # steps that the other takes alone after its checkpoint are discarded
    job.command("stop", "--no-wait", job.run_id)
    assert kept(job) >= before
    job.check_nothing_left()


def test_who_waits_for_more_hosts_writes_its_state_too(stage: Stage, start_job: StartJob) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, *NO_CHECKPOINTS, "--min-np", "2", *PATIENT)
    job.wait_size(2)
    job.wait_steps(5)
    since = job.mark()
    stage.cluster.crash(a)
    job.wait_event("host_lost", since)
    job.wait_event("waiting", since)
    job.command("stop", "--no-wait", job.run_id)
    assert kept(job) >= made(job)
    job.check_nothing_left([b])


def takes_signals(leader: int) -> bool:
    """Whether a leader has gone so far as to answer them itself."""
    status = Path(f"/proc/{leader}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) & 1 << signal.SIGTERM - 1)


def test_who_is_just_being_taken_over_writes_its_state_first(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, *NO_CHECKPOINTS)
    job.wait_size(2)
    job.wait_steps(5)
    job.process.kill()
    job.wait()
    before = made(job)
    job.resume(alive=True)
    job.wait_for(lambda: takes_signals(job.process.pid), "the next leader begins")
    job.process.send_signal(signal.SIGINT)
    assert kept(job) >= before
    job.check_nothing_left()
