"""Processes that freeze and cables that are pulled: no connection closes, and runs that go on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.dist.conftest import EVERY_STYLE, StartJob, trains
from tests.dist.running import RunningJob, Stage

pytestmark = pytest.mark.dist

TIMEOUT_S = 8.0
"""Longer than a busy machine keeps a process from running, since nobody else may be lost."""
SLACK_S = 120.0
"""The machine is busy; how quick it is on a quiet one is measured, not tested."""
FAST = ("--failure-timeout", str(TIMEOUT_S))


@pytest.fixture
def job(stage: Stage, shared_jobs: list[RunningJob], style: str) -> Iterator[RunningJob]:
    """A job that trains with one process on each of the first two hosts."""
    yield from trains(stage, shared_jobs, dict.fromkeys(stage.hosts[:2], 1), *FAST, style=style)


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_out_the_timeout(job: RunningJob) -> None:
    end = time.monotonic() + 1.25 * TIMEOUT_S
    job.wait_for(lambda: time.monotonic() > end, "the failure timeout is over")


def check_pause(job: RunningJob, since: int) -> None:
    """It stood still for the timeout and not much longer, and nothing was lost."""
    pause_s = job.kinds("rescale_finished", since)[0]["pause_s"]
    assert pause_s < TIMEOUT_S + SLACK_S
    assert not job.kinds("restored", since)


@EVERY_STYLE
def test_a_frozen_worker_is_replaced(stage: Stage, job: RunningJob) -> None:
    _, b, *_ = stage.hosts
    since, worker = job.mark(), job.worker(b)
    with frozen(worker.pid):
        left = job.wait_event("worker_left", since)
        assert (left["host"], left["local_rank"]) == (b, 0)
        assert "no sign of life" in left["cause"]
        job.wait_event("rescale_finished", since)
        check_pause(job, since)
        job.wait_size(2, since)
        assert worker.pid not in [known.pid for known in job.workers()]
    assert not job.kinds("host_lost", since), "its agent is alive"


@EVERY_STYLE
def test_a_frozen_agent_costs_its_host_and_comes_back_as_a_new_one(
    stage: Stage, job: RunningJob
) -> None:
    _, b, *_ = stage.hosts
    since, old = job.mark(), job.worker(b)
    with frozen(job.agent_pid(b)):
        job.wait_event("host_lost", since, host=b)
        job.wait_event("rescale_finished", since)
        check_pause(job, since)
    job.wait_size(2, since)
    assert job.worker(b) != old


@EVERY_STYLE
def test_a_frozen_leader_blames_nobody(job: RunningJob) -> None:
    since, digests = job.mark(), len(job.digests())
    with frozen(job.process.pid):
        # Training does not need the leader. Long enough that everybody seems silent to it.
        wait_out_the_timeout(job)
        job.wait_for(lambda: len(job.digests()) > digests + 10, "training has gone on")
    job.wait_steps(20)
    assert not job.kinds("host_lost", since)
    assert not job.kinds("worker_left", since)


@EVERY_STYLE
@pytest.mark.root
def test_a_pulled_cable_costs_the_host_until_it_is_mended(stage: Stage, job: RunningJob) -> None:
    if stage.cluster.loopback:
        pytest.skip("hosts on the loopback network have no cables to pull")
    _, b, *_ = stage.hosts
    since, old = job.mark(), job.worker(b)
    stage.cluster.cut(b)
    try:
        job.wait_event("host_lost", since, host=b)
        job.wait_event("rescale_finished", since, size=1)
        check_pause(job, since)
        job.wait_steps(5)
    finally:
        stage.cluster.heal(b)
    job.wait_size(2, since)  # connecting is tried at growing intervals
    assert job.worker(b) != old, "it comes back as a newcomer"


@EVERY_STYLE
def test_a_slow_worker_is_not_taken_for_a_dead_one(stage: Stage, job: RunningJob) -> None:
    """The last of these."""
    _, b, *_ = stage.hosts
    since, stuck = job.mark(), job.folder / f"stuck-{b}"
    stuck.touch()
    wait_out_the_timeout(job)
    stuck.unlink()
    job.wait_steps(20)
    assert not job.kinds("rescale_started", since)
    assert not job.kinds("worker_left", since)
    job.finish()


@EVERY_STYLE
def test_a_spare_takes_the_place_of_a_killed_worker_in_one_pause(
    stage: Stage, start_job: StartJob
) -> None:
    """After another spare was frozen, which is replaced, and nobody waits for it."""
    a, b, c, _ = stage.hosts
    job = start_job({a: 1, b: 1, c: 1}, *FAST, "--spares", "1")
    job.wait_size(2)
    job.wait_event("worker_standby", 0, host=c)
    since, spare = job.mark(), job.worker(c)
    with frozen(spare.pid):
        job.wait_event("worker_left", since, host=c)
        job.wait_event("worker_standby", since, host=c)
    assert not job.kinds("rescale_started", since)
    since, killed = job.mark(), job.worker(b)
    killed.kill()
    job.wait_size(2, since)
    sizes = [event["size"] for event in job.kinds("rescale_finished", since)]
    assert sizes == [2], "it never shrank"
    assert {worker.host for worker in job.workers()} >= {a, c}
    job.wait_event("worker_standby", since, host=b)
    job.wait_steps(5)
    assert not job.kinds("rescale_started", since)[1:], "the new spare waits"
    job.finish()


STOPS_AT_ITS_END = """
import os, signal, sys, time
import torch
import hvd_elastic.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = torch.utils.data.TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
loader = hvd.DataLoader(data, 4)
if os.environ["HVD_ELASTIC_HOST"] == sys.argv[1]:
    time.sleep(600)


@hvd.run
def train(state):
    for _ in hvd.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


train(hvd.State(model, optimizer))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_worker_that_is_silent_after_training_is_given_time_to_end(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    script = stage.folder / "stops_at_its_end.py"
    script.write_text(STOPS_AT_ITS_END, encoding="utf-8")
    job = start_job({a: 1, b: 1}, *FAST, script=[sys.executable, str(script), b])
    job.wait_event("checkpoint", 0)
    worker = psutil.Process(job.worker(a).pid)
    job.wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker is stopped")
    wait_out_the_timeout(job)
    worker.resume()
    assert job.wait() == 0, job.story()
    assert job.kinds("run_finished")[-1]["status"] == "succeeded", job.story()
    assert job.kinds("rescale_started")[-1]["to_size"] == 1, "the other never became ready"
    job.check_nothing_left()
