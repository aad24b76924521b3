"""Hosts that join and leave because somebody asked for it."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.dist.conftest import EVERY_STYLE, StartJob, styles, trains
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY, ROOT

pytestmark = pytest.mark.dist


@pytest.fixture
def job(stage: Stage, shared_jobs: list[RunningJob], style: str) -> Iterator[RunningJob]:
    """A job that trains with one process on each of the first two hosts."""
    yield from trains(stage, shared_jobs, dict.fromkeys(stage.hosts[:2], 1), style=style)


def worker_hosts(job: RunningJob) -> list[str]:
    return [worker.host for worker in job.workers()]


def warned(job: RunningJob, since: int, words: str) -> bool:
    return any(words in warning["message"] for warning in job.kinds("warning", since))


def check_steps_never_fall(job: RunningJob, since: int = 0) -> None:
    steps = [event["step"] for event in job.kinds("metrics", since)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(steps)), steps
    assert not job.kinds("restored", since)


@EVERY_STYLE
def test_a_host_joins_when_it_is_added_to_the_hostfile(stage: Stage, job: RunningJob) -> None:
    a, b, c, _ = stage.hosts
    before, since = job.workers(), job.mark()
    job.use({a: 1, b: 1, c: 1})
    job.wait_size(3, since)
    job.wait_steps(10)
    kinds = [event["kind"] for event in job.events[since:]]
    assert kinds.index("worker_standby") < kinds.index("rescale_started")
    assert kinds.count("rescale_started") == 1
    (rescale,) = job.kinds("rescale_started", since)
    assert (rescale["from_size"], rescale["to_size"]) == (2, 3)
    assert c in rescale["reason"]
    (joined,) = job.kinds("worker_joined", since)
    assert (joined["host"], joined["local_rank"], joined["rank"]) == (c, 0, 2)
    assert job.workers()[:2] == before, "those that were there went on in the same processes"
    assert not job.kinds("worker_left", since)
    check_steps_never_fall(job, since)


@EVERY_STYLE
def test_a_host_leaves_when_it_is_taken_out_of_the_hostfile(stage: Stage, job: RunningJob) -> None:
    a, b, *_ = stage.hosts
    stays, since = job.worker(b), job.mark()
    job.use({b: 1})
    job.wait_size(1, since)
    left = job.wait_event("worker_left", since)
    assert (left["host"], left["cause"]) == (a, "left")
    job.wait_steps(10)
    assert job.workers() == [stays]
    job.check_nothing_left([a])
    assert not job.kinds("host_lost", since)
    check_steps_never_fall(job, since)


@EVERY_STYLE
def test_a_host_gets_and_loses_slots(stage: Stage, job: RunningJob) -> None:
    a, b, *_ = stage.hosts
    before, since = job.workers(), job.mark()
    job.use({a: 1, b: 2})
    job.wait_size(3, since)
    assert [(w.host, w.slot) for w in job.workers()] == [(a, 0), (b, 0), (b, 1)]
    middle = job.mark()
    job.use({a: 1, b: 1})
    job.wait_size(2, middle)
    job.wait_for(lambda: job.workers() == before, "only the slot that was added is gone")
    check_steps_never_fall(job, since)


@EVERY_STYLE
def test_scale_takes_processes_away_and_brings_them_back(stage: Stage, job: RunningJob) -> None:
    since = job.mark()
    job.command("scale", job.run_id, "1")
    job.wait_size(1, since)
    job.wait_for(lambda: worker_hosts(job) == stage.hosts[:1], "one process on the first host")
    middle = job.mark()
    job.command("scale", job.run_id, "2")
    job.wait_size(2, middle)
    check_steps_never_fall(job, since)


@EVERY_STYLE
def test_a_hostfile_that_cannot_be_read_changes_nothing(stage: Stage, job: RunningJob) -> None:
    before, since = job.workers(), job.mark()
    new = job.hostfile.with_suffix(".new")
    new.write_text(f"{stage.hosts[0]} slots=many\n")
    new.replace(job.hostfile)
    job.wait_for(lambda: warned(job, since, "slots=many"), "a warning that names the mistake")
    job.wait_steps(10)
    job.hostfile.unlink()
    job.wait_for(lambda: warned(job, since, "is gone"), "a warning that there is no hostfile")
    assert job.workers() == before
    assert not job.kinds("rescale_started", since)


@EVERY_STYLE
def test_all_hosts_are_replaced_in_one_edit_and_the_run_ends_well(
    stage: Stage, job: RunningJob
) -> None:
    a, b, c, d = stage.hosts
    since = job.mark()
    job.use({c: 1, d: 1})
    job.wait_for(lambda: worker_hosts(job) == [c, d] and job.size() == 2, "others have taken over")
    job.wait_steps(10)
    check_steps_never_fall(job, since)
    assert {event["cause"] for event in job.kinds("worker_left", since)} == {"left"}
    job.check_nothing_left([a, b])
    audit = job.finish()
    assert audit.complete_epochs == len(audit.epochs) > 3


@EVERY_STYLE
def test_below_min_np_it_waits_and_goes_on(stage: Stage, start_job: StartJob) -> None:
    """By the hostfile, and by the crash of a host; then a signal to its leader ends it."""
    a, b, c, _ = stage.hosts
    job = start_job({a: 1, b: 1}, "--min-np", "2")
    job.wait_size(2)
    keeper, since = job.worker(a), job.mark()
    job.use({a: 1})
    waiting = job.wait_event("waiting", since, have=1)
    assert waiting["need"] == 2
    assert "the hosts have 1 slot" in waiting["reason"]
    job.check_nothing_left([b])
    assert job.workers() == [keeper]
    job.use({a: 1, c: 1})
    job.wait_size(2, since)
    assert job.worker(a) == keeper, "it kept the state in memory"
    job.wait_steps(5)
    check_steps_never_fall(job)
    # Horovod's own driver never gets out of this: horovod issue 3494.
    since = job.mark()
    stage.cluster.crash(c)
    waiting = job.wait_event("waiting", since, have=1)
    assert waiting["need"] == 2
    assert c in waiting["reason"]
    stage.cluster.boot(c)
    job.wait_size(2, since)
    assert job.worker(a) == keeper
    job.wait_steps(5)
    assert not job.kinds("restored", since)
    job.process.send_signal(signal.SIGTERM)
    check_ended_by_a_signal(job)


@styles("loop")
def test_stop_writes_a_checkpoint_and_resume_goes_on_exactly_there(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, c, _ = stage.hosts
    job = start_job({a: 1, b: 1}, "--checkpoint-every", "3600")
    job.wait_size(2)
    job.wait_steps(20)
    job.command("stop", job.run_id)
    assert job.wait() == 130
    (checkpoint,) = job.kinds("checkpoint")
    (finished,) = job.kinds("run_finished")
    assert finished["status"] == "stopped"
    assert finished["steps"] == checkpoint["step"], "the end says how far the state really is"
    assert job.step - 15 <= checkpoint["step"], "of the moment of the stop"
    job.check_nothing_left()
    job.use({b: 1, c: 1, a: 1})
    since = job.mark()
    job.resume()
    job.wait_size(3, since)
    restored = job.wait_event("restored", since)
    assert restored["step"] == checkpoint["step"]
    audit = job.finish()
    assert audit.voided_steps <= 15


def check_ended_by_a_signal(job: RunningJob) -> None:
    assert job.wait() == 130
    (finished,) = job.kinds("run_finished")
    assert finished["status"] == "stopped"
    assert job.kinds("checkpoint")[-1]["step"] >= job.step - 15
    output = job.output.read_text()
    assert "Traceback" not in output
    assert f"its checkpoint is of step {finished['checkpoint_step']}" in output
    assert f"resume with: hvd-elastic run --resume {job.run_id}" in output
    job.check_nothing_left()
    job.check_equal_parameters()
    job.check_audit()


@COSTLY
def test_ctrl_c_ends_everything(stage: Stage, start_job: StartJob) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1})
    job.wait_size(2)
    job.wait_steps(5)
    job.process.send_signal(signal.SIGINT)
    check_ended_by_a_signal(job)


def test_a_second_ctrl_c_does_not_wait_for_the_step(stage: Stage, start_job: StartJob) -> None:
    # The first one alone would wait so long for the step.
    job = start_job({stage.hosts[0]: 1}, "--failure-timeout", "600")
    job.wait_size(1)
    job.wait_steps(5)
    (job.folder / "stuck").touch()
    job.process.send_signal(signal.SIGINT)
    job.wait_event("stop_requested", 0)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    job.check_nothing_left()


def test_ctrl_c_while_hosts_are_still_starting(stage: Stage, start_job: StartJob) -> None:
    job = start_job(dict.fromkeys(stage.hosts, 1))
    job.wait_event("run_started", 0)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    job.check_nothing_left()


BEFORE_THE_LOGGERS = """
import functools, itertools, os, sys, time, torch
import hvd_elastic.torch as hvd
sys.path.insert(0, sys.argv[1])
import wandb
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
loader = hvd.DataLoader(data, 12)
steps = itertools.count()
def loss_function(outputs, targets):
    # Enough are left when the host leaves, however late that is noticed.
    slow = next(steps) > 12 and not os.path.exists(os.path.join(sys.argv[1], "left"))
    time.sleep(0.5 if slow else 0.01)
    return (outputs - targets).square().mean()
"""
WANDB = """
import os
class init:
    def __init__(self, id, resume):
        self.file = open(os.path.join(os.path.dirname(__file__), "log.txt"), "a")
        self.name = f"{id} {os.environ['HVD_ELASTIC_HOST']}"
    def log(self, values, step):
        print(self.name, step, file=self.file, flush=True)
"""


def test_the_documented_logger_moves_with_rank_0(stage: Stage, start_job: StartJob) -> None:
    """Its host leaves, and the function is not entered again."""
    page = (ROOT / "docs/example-scripts.md").read_text().partition("### Loggers")[2]
    recipe = page.partition("```python")[2].partition("```")[0]
    folder = stage.folder / "loggers"
    folder.mkdir()
    (folder / "wandb.py").write_text(WANDB)
    (folder / "train.py").write_text(BEFORE_THE_LOGGERS + recipe)
    a, b, *_ = stage.hosts
    script = [sys.executable, str(folder / "train.py"), str(folder)]
    job = start_job({a: 1, b: 1}, script=script)
    job.wait_size(2)
    job.wait_steps(10)
    job.use({b: 1})
    job.wait_size(1)
    (folder / "left").touch()
    assert job.wait() == 0, job.story()
    lines = [line.split() for line in (folder / "log.txt").read_text().splitlines()]
    assert [int(step) for _, _, step in lines] == list(range(1, 101))
    assert list(dict.fromkeys((run, host) for run, host, _ in lines)) == [
        (job.run_id, a),
        (job.run_id, b),
    ]
