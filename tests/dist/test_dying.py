"""Workers, agents, hosts and leaders that are killed, and runs that go on."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_elastic.agent.template.process import TITLE
from hvd_elastic.programs.processes import command_line, read
from tests.dist.conftest import EVERY_STYLE, StartJob, trains
from tests.dist.jobs import call, write_script
from tests.dist.running import CLEAN_S, RunningJob, Stage, WorkerProcess
from tests.paths import COSTLY, LIMIT_S

pytestmark = pytest.mark.dist

STEPS_IN_A_REPORT = 25
"""Metrics come every 0.25 s, so the last step heard of is a few behind the last one made."""


@pytest.fixture
def job(stage: Stage, shared_jobs: list[RunningJob], style: str) -> Iterator[RunningJob]:
    """A job that trains with two processes on the first host and one on the second."""
    for job in trains(stage, shared_jobs, {stage.hosts[0]: 2, stage.hosts[1]: 1}, style=style):
        for gate in job.folder.glob("*gate-*"):
            gate.unlink()
        yield job


def check_went_on_from_live_state(job: RunningJob, since: int, before: int) -> None:
    """Not from a checkpoint, and at most the step in flight was done again."""
    assert not job.kinds("restored", since)
    steps = [before, *(event["step"] for event in job.kinds("metrics", since))]
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(steps)), steps


def refill(job: RunningJob, since: int, killed: WorkerProcess) -> None:
    """Wait until the slot of a worker that was killed is in use again."""
    job.wait_event("worker_joined", since, host=killed.host, local_rank=killed.slot)
    job.wait_size(3, since)


@EVERY_STYLE
def test_kill_9_of_a_worker_leaves_the_others_of_its_host_alone(
    stage: Stage, job: RunningJob
) -> None:
    a, b, *_ = stage.hosts
    killed, others = job.worker(a, 1), [job.worker(a, 0), job.worker(b)]
    since, before = job.mark(), job.step
    killed.kill()
    left = job.wait_event("worker_left", since)
    assert (left["host"], left["local_rank"]) == (a, 1)
    assert "signal 9" in left["cause"]
    job.wait_event("rescale_finished", since)
    refill(job, since, killed)
    assert [w for w in job.workers() if w in others] == others
    assert not job.kinds("host_lost", since)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
@COSTLY
def test_kill_9_of_the_worker_of_rank_0(job: RunningJob) -> None:
    killed = job.worker_of_rank(0)
    since, before = job.mark(), job.step
    killed.kill()
    refill(job, since, killed)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_kill_9_of_an_agent_ends_its_workers_and_replaces_them(
    stage: Stage, job: RunningJob
) -> None:
    a, *_ = stage.hosts
    old = job.workers(a)
    since, before = job.mark(), job.step
    job.kill_agent(a)
    lost = job.wait_event("host_lost", since)
    assert lost["host"] == a
    job.wait_for(lambda: not {*old} & {*job.workers(a)}, "its workers have ended", CLEAN_S)
    job.wait_for(lambda: len(job.kinds("worker_joined", since)) == 2, "replaced")
    job.wait_size(3, since)
    assert len(job.workers(a)) == 2
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_kill_9_of_all_workers_of_a_host(stage: Stage, job: RunningJob) -> None:
    a, *_ = stage.hosts
    since, before = job.mark(), job.step
    job.kill_workers(a)
    job.wait_event("rescale_finished", since)
    job.wait_for(lambda: len(job.kinds("worker_joined", since)) == 2, "replaced")
    job.wait_size(3, since)
    assert not job.kinds("host_lost", since), "its agent is alive"
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_a_host_crashes_and_comes_back(stage: Stage, job: RunningJob) -> None:
    a, *_ = stage.hosts
    since, before = job.mark(), job.step
    stage.cluster.crash(a)
    job.wait_event("host_lost", since, host=a)
    job.wait_event("rescale_finished", since, size=1)
    job.wait_steps(10)
    stage.cluster.boot(a)
    job.wait_size(3, since)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_kill_9_of_all_workers_goes_back_to_the_checkpoint(job: RunningJob) -> None:
    job.wait_event("checkpoint", job.mark())
    since = job.mark()
    workers = job.kill_workers()
    restored = job.wait_event("restored", since)
    newest = max(event["step"] for event in job.kinds("checkpoint"))
    assert 0 < restored["step"] <= newest
    job.wait_size(3, since)
    job.wait_steps(5)
    assert not {*workers} & {*job.workers()}
    assert job.check_audit().voided_steps > 0 or restored["step"] == newest


@EVERY_STYLE
def test_a_killed_worker_is_replaced_by_a_fork_of_the_template(
    stage: Stage, job: RunningJob
) -> None:
    _, b, *_ = stage.hosts

    def template() -> int | None:
        names = {pid: read(pid, "comm").strip().decode() for pid in stage.cluster.pids(b)}
        return next((pid for pid, name in names.items() if name == TITLE), None)

    def arguments_at(pid: int) -> bytes:
        """Address of the arguments, which a fork inherits, and each new program has another."""
        return read(pid, "stat").rpartition(b")")[2].split()[45]

    # It imports at a low priority: beside busy processes that takes minutes.
    pid = job.wait_for(template, "a template", 900)
    arguments = arguments_at(pid)
    killed = job.worker(b)
    shown = command_line(killed.pid)
    since, before = job.mark(), job.step
    killed.kill()
    refill(job, since, killed)
    folder = job.home / "runs" / job.run_id / "logs"  # a worker that is silent has no log
    logs = "".join(log.read_text() for log in folder.glob("*"))
    assert "without a template" not in logs
    assert "absl::InitializeLog" not in logs
    replaced = job.worker(b)
    assert arguments_at(replaced.pid) == arguments
    assert command_line(replaced.pid) == shown
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
@pytest.mark.parametrize("who", [pytest.param("newcomer", marks=COSTLY), "member"])
def test_kill_9_while_a_generation_forms(stage: Stage, job: RunningJob, who: str) -> None:
    a, b, c, _ = stage.hosts
    gate = job.folder / f"gate-{c}"
    gate.touch()
    since, before = job.mark(), job.step
    job.use({a: 2, b: 1, c: 1})
    job.wait_for(lambda: [*job.folder.glob(f"at-gate-{c}*")], "the newcomer stands before the door")
    job.wait_event("rescale_started", since, to_size=4)
    assert not job.kinds("rescale_finished", since)
    killed = job.worker(c) if who == "newcomer" else job.worker(a, 1)
    killed.kill()
    gate.unlink()
    job.wait_event("worker_joined", since, host=killed.host, local_rank=killed.slot)
    job.wait_size(4, since)
    job.wait_steps(5)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
@COSTLY
def test_kill_9_of_a_newcomer_in_the_moment_it_is_announced(stage: Stage, job: RunningJob) -> None:
    a, b, c, _ = stage.hosts
    since, before = job.mark(), job.step
    job.use({a: 2, b: 1, c: 1})
    job.wait_event("worker_standby", since, host=c)
    killed = job.worker(c)
    killed.kill()
    job.wait_event("worker_left", since, host=c)
    job.wait_for(lambda: job.worker(c) != killed if job.workers(c) else False, "started again")
    job.wait_size(4, since)
    job.wait_steps(5)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_kill_9_of_a_worker_that_is_only_starting(stage: Stage, job: RunningJob) -> None:
    a, b, c, _ = stage.hosts
    since, before = job.mark(), job.step
    job.use({a: 2, b: 1, c: 1})
    job.wait_for(lambda: job.workers(c), "a worker is being started")
    job.worker(c).kill()
    job.wait_event("worker_left", since, host=c)
    assert not job.kinds("rescale_started", since), "the others have not noticed"
    job.wait_size(4, since)
    check_went_on_from_live_state(job, since, before)


@EVERY_STYLE
def test_the_run_that_lost_so_much_ends_well(job: RunningJob) -> None:
    audit = job.finish()
    assert audit.complete_epochs == len(audit.epochs) > 3


def test_kill_9_of_the_leader_ends_everything_and_resume_finishes_at_another_size(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, c, _ = stage.hosts
    # The processes that read for a worker have temporary folders and sockets of their own.
    options = ("--leader-grace", "0")
    job = start_job({a: 2, b: 1}, *options, script_options=("--num-workers", "1"))
    job.wait_size(3)
    job.wait_for(lambda: len(job.kinds("checkpoint")) > 1, "two checkpoints")
    checkpoint = job.kinds("checkpoint")[-1]["step"]
    job.process.kill()
    job.wait()
    job.check_nothing_left(but_spools=True)
    since = job.mark()
    job.use({c: 1, b: 1})
    job.resume()
    restored = job.wait_event("restored", since)
    assert checkpoint <= restored["step"] <= job.step + STEPS_IN_A_REPORT
    job.wait_size(2, since)
    assert [worker.host for worker in job.workers()] == [b, c]
    job.wait_steps(5)
    job.finish(but_spools=True)  # on the host that is not part of it any more


@COSTLY
def test_kill_9_of_the_leader_while_a_generation_forms(stage: Stage, start_job: StartJob) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1}, "--leader-grace", "0")
    job.wait_size(1)
    (job.folder / f"gate-{b}").touch()
    job.use({a: 1, b: 1})
    job.wait_for(lambda: [*job.folder.glob(f"at-gate-{b}*")], "a generation is being formed")
    job.process.kill()
    job.wait()
    job.check_nothing_left(but_spools=True)


KILLED_READER = """
import os, signal, sys
from pathlib import Path
import torch
import hvd_elastic.torch as hvd

killed = Path(sys.argv[1])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index == 205 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2), torch.ones(1)

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = hvd.DataLoader(Data(), 10, num_workers=1)

@hvd.run
def train(state):
    for epoch in hvd.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()

train(hvd.State(model=model, optimizer=optimizer))
"""


def test_a_killed_process_of_the_loader_costs_its_rank_alone(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILLED_READER)
    options = ["--np", 2, "--run-id", "job", "--audit", "--checkpoint-every", 0]
    words = [sys.executable, script, tmp_path / "killed"]
    done = call("run", *options, "--", *words, home=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    assert "is killed by signal: Killed. The kernel does that" in printed
    assert "was killed by signal 9" in printed
    assert "run succeeded after 80 steps, 800 examples" in printed
    assert "Traceback" not in printed
    report = call("report", "job", "--json", home=tmp_path)
    assert json.loads(report.stdout)["audit"]["ok"]
