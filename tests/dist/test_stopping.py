"""A run that is stopped leaves a checkpoint of all that was trained, whoever of it still lives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hvd_elastic.launch.checkpoints import newest_valid
from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage

pytestmark = [pytest.mark.dist, pytest.mark.alone, pytest.mark.timeout(300)]

NO_CHECKPOINTS = ("--checkpoint-every", "600")
"""But the last one."""


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


def test_a_frozen_rank_0_is_not_the_only_one_that_is_asked(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, *NO_CHECKPOINTS, "--failure-timeout", "2")
    job.wait_size(2)
    job.wait_steps(5)
    os.kill(job.worker(a).pid, signal.SIGSTOP)
    job.command("stop", "--no-wait", job.run_id)
    assert kept(job) >= made(job)
    job.check_nothing_left()


def test_who_waits_for_more_hosts_writes_its_state_too(stage: Stage, start_job: StartJob) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, *NO_CHECKPOINTS, "--min-np", "2", "--failure-timeout", "2")
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
    return bool(int(mask, 16) & 1 << signal.SIGHUP - 1)


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
