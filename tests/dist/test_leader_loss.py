"""The leader is killed; training goes on, and another leader takes it over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.virtual.plan import interface_name
from tests.dist.conftest import EVERY_STYLE, StartJob, trains
from tests.dist.running import DEADLINE_S, RunningJob, Stage
from tests.paths import COSTLY, ROOT

pytestmark = pytest.mark.dist

GRACE_S = 3.0
SOON_S = 10.0


@pytest.fixture
def job(stage: Stage, shared_jobs: list[RunningJob], style: str) -> Iterator[RunningJob]:
    """A job that trains with one process on each of the first two hosts, and has a leader."""
    # Only so many processes as slots, though another host could be had.
    options = ("--max-np", "2", "--checkpoint-dir", str(place_of(stage, style)))
    program = (str(ROOT / "tests" / "dist" / "scripts" / "failing_leader.py"),)
    hosts = dict.fromkeys(stage.hosts[:2], 1)
    yield from trains(stage, shared_jobs, hosts, *options, program=program, style=style)


@pytest.fixture
def quick_job(stage: Stage, shared_jobs: list[RunningJob], style: str) -> Iterator[RunningJob]:
    """The next one, in which silence is soon noticed."""
    hosts = dict.fromkeys(stage.hosts[:2], 1)
    yield from trains(stage, shared_jobs, hosts, "--failure-timeout", f"{SOON_S:g}", style=style)


def place_of(stage: Stage, style: str) -> Path:
    """Where the run that is led from several machines keeps its checkpoints."""
    return stage.folder / f"led-{style}"


def kill_leader(job: RunningJob) -> None:
    job.process.kill()
    job.wait()


def take_over(job: RunningJob, *options: str) -> int:
    since = job.mark()
    job.resume(*options, alive=True)
    job.wait_event("taken_over", since)
    assert not job.kinds("restored", since)
    return since


def left(job: RunningJob) -> Callable[[], bool]:
    return lambda: not job.workers()


@EVERY_STYLE
def test_a_leader_that_fails_leaves_training_alone(job: RunningJob) -> None:
    workers, voided = job.workers(), job.check_audit().voided_steps
    (job.folder / "FAIL").touch()
    assert job.wait() == 1
    assert "ZeroDivisionError: a defect" in job.output.read_text(), "a defect has its traceback"
    said = job.kinds("warning")[-1]["message"]
    assert f"hvd-elastic run --resume {job.run_id} leads on" in said
    until_steps_without_leader(job, 20)
    take_over(job)
    assert job.workers() == workers
    job.wait_steps(5)
    assert job.check_audit().voided_steps == voided


@EVERY_STYLE
def test_the_next_leader_goes_on_in_the_same_processes(stage: Stage, job: RunningJob) -> None:
    _, b, *_ = stage.hosts
    workers, voided = job.workers(), job.check_audit().voided_steps
    kill_leader(job)
    until_steps_without_leader(job, 50)
    before = max(record["step"] for record in job.digests())
    since = take_over(job)
    assert job.workers() == workers
    job.wait_for(lambda: job.step > before, "what was trained meanwhile is on record")
    assert not job.kinds("rescale_started", since), "nobody noticed"
    assert not job.kinds("worker_left", since)
    # It leads as the first one did.
    since, killed = job.mark(), job.worker(b)
    killed.kill()
    job.wait_event("rescale_finished", since)
    job.wait_size(2, since)
    assert job.check_audit().voided_steps <= voided + 1, "at most the step in flight of the kill"


@EVERY_STYLE
def test_a_run_that_is_led_is_not_led_twice(job: RunningJob) -> None:
    with pytest.raises(AssertionError, match="has a live leader"):
        job.command("run", "--resume", job.run_id)
    job.wait_steps(5)


@EVERY_STYLE
def test_what_happens_without_a_leader_is_mended_by_the_next(stage: Stage, job: RunningJob) -> None:
    a, b, *_ = stage.hosts
    killed, others = job.worker(b), job.workers(a)
    kill_leader(job)
    until_steps_without_leader(job, 20)
    killed.kill()
    since = take_over(job)
    job.wait_size(2, since)
    assert job.workers(a) == others
    assert job.worker(b) != killed


@EVERY_STYLE
def test_a_host_that_crashes_without_a_leader(stage: Stage, job: RunningJob) -> None:
    a, b, *_ = stage.hosts
    survivor = job.worker(a)
    kill_leader(job)
    stage.cluster.crash(b)
    since = take_over(job)
    job.wait_event("rescale_finished", since, size=1)
    assert job.workers() == [survivor]
    stage.cluster.boot(b)
    job.wait_size(2, since)


@EVERY_STYLE
def test_the_next_leader_has_another_hostfile(stage: Stage, job: RunningJob) -> None:
    a, _, c, _ = stage.hosts
    kept = job.worker(a)
    kill_leader(job)
    job.use({a: 1, c: 1})
    since = take_over(job)
    job.wait_size(2, since)
    # A process that has left the ranks ends a moment after training goes on without it.
    job.wait_for(lambda: [w.host for w in job.workers()] == [a, c], "the other one has ended")
    assert job.worker(a) == kept


def on_another_machine(
    stage: Stage, job: RunningJob, hostfile: Path, then: str = ""
) -> dict[str, Any]:
    """Arguments of ``subprocess`` functions that resume a job where none of its runs is seen.

    Args:
        then: shell text that follows.
    """
    run = [sys.executable, "-m", "hvd_elastic.cli.app", "run", "--resume", job.run_id]
    run += ["--hostfile", str(hostfile), "--ssh-config", str(stage.cluster.ssh_config)]
    hidden = f'mount -t tmpfs none {job.home}/runs && "$@"{then}'
    return {
        "args": ["unshare", "-m", "sh", "-c", hidden, "sh", *run],
        "env": job.environment(),
        "cwd": job.folder,
        "stdin": subprocess.DEVNULL,
    }


@EVERY_STYLE
@pytest.mark.root
def test_another_machine_does_not_lead_a_run_that_is_led(
    stage: Stage, job: RunningJob, style: str
) -> None:
    """Nor on a host that the run does not use, and that could be had; and not even there alone."""
    a, _, c, _ = stage.hosts
    place = place_of(stage, style)
    workers = job.workers()
    other = job.folder / "other-hosts"
    resume = on_another_machine(stage, job, other, f"; code=$?; ls {job.home}/runs; exit $code")
    leads = {f"{c}\n{a}\n": f"host {a} is led", f"{c}\n": f"checkpoints in {place} are kept"}
    for hosts, how in leads.items():
        other.write_text(hosts)
        while True:
            done = subprocess.run(**resume, capture_output=True, text=True, timeout=DEADLINE_S)
            if "could not be asked" not in done.stderr:
                break  # else the machine is busy
        assert done.returncode == 1, done.stdout + done.stderr
        said = " ".join((done.stdout + done.stderr).split())
        assert f"{how} by process {job.process.pid} on " in said
        assert "ends, and has started nothing" in said
        assert job.run_id not in done.stdout.splitlines(), "its run folder is gone"
        assert not job.workers(c)
        assert job.workers() == workers
    job.wait_steps(5)


@EVERY_STYLE
def test_training_that_ends_without_a_leader_ends_well(
    stage: Stage, job: RunningJob, style: str
) -> None:
    """The end of this module's job."""
    kill_leader(job)
    (job.folder / "enough").touch()
    job.wait_for(lambda: not job.workers(), "training ends", ended_too=True)
    job.resume(alive=True)
    job.finish()
    assert not (place_of(stage, style) / "leader.json").exists()


@EVERY_STYLE
@pytest.mark.root
def test_a_leader_whose_own_cable_is_pulled_comes_back_to_its_run(
    stage: Stage, quick_job: RunningJob
) -> None:
    if stage.cluster.loopback:
        pytest.skip("hosts on the loopback network have no cables to pull")
    job = quick_job
    since, workers = job.mark(), job.workers()
    cable = ("ip", "link", "set", interface_name(stage.cluster.state.subnet))
    subprocess.run([*cable, "down"], check=True)
    try:
        job.wait_event("leader_cut_off", since)
        until_steps_without_leader(job, 50)
    finally:
        subprocess.run([*cable, "up"], check=True)
    job.wait_event("taken_over", since, size=2)
    assert job.workers() == workers
    job.wait_steps(20)
    for kind in ("rescale_started", "worker_left", "host_lost", "restored"):
        assert not job.kinds(kind, since), job.story()


@EVERY_STYLE
@pytest.mark.root
def test_a_frozen_leader_goes_on_after_the_one_that_took_over_has_ended(
    stage: Stage, quick_job: RunningJob
) -> None:
    job = quick_job
    workers = job.workers()
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        time.sleep(SOON_S)  # until then it may come back
        resume = on_another_machine(stage, job, job.hostfile)
        seen = (job.folder / "second").read_text

        def begin_second() -> subprocess.Popen[Any]:
            with (job.folder / "second").open("wb") as output:
                second = subprocess.Popen(**resume, stdout=output, stderr=subprocess.STDOUT)
            job.wait_for(
                lambda: "took over the run" in seen() or second.poll() is not None, "it takes over"
            )
            return second

        second = begin_second()
        for _ in range(20):
            # A busy host may still wait for the first, and a busy machine asks it in vain.
            refused = re.search(r"is\s+led\s+by|could\s+not\s+be\s+asked", seen())
            if "took over the run" in seen() or not refused:
                break
            second = begin_second()
        assert job.workers() == workers, seen()
        (job.folder / "enough").touch()
        assert second.wait(DEADLINE_S) == 0, seen()
        assert "run succeeded" in seen()
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    since = job.mark()
    assert job.wait() == 1, job.story()
    ended = job.kinds("run_finished")[-1]
    assert f"run {job.run_id} was taken over by process " in ended["message"]
    assert ended["led_elsewhere"]
    for kind in ("worker_standby", "rescale_started", "restored"):
        assert not job.kinds(kind, since), job.story()
    job.check_nothing_left()


def until_steps_without_leader(job: RunningJob, steps: int) -> None:
    """Training goes on: the workers say so by themselves."""
    made = lambda: max((record["step"] for record in job.digests()), default=0)  # noqa: E731
    wanted = made() + steps
    job.wait_for(lambda: made() >= wanted, "training goes on without a leader", ended_too=True)


@pytest.mark.parametrize("window", [pytest.param("pipe", marks=COSTLY), "terminal"])
def test_nobody_reads_what_the_leader_prints(
    stage: Stage, start_job: StartJob, window: str
) -> None:
    ours, theirs = os.pipe() if window == "pipe" else os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # in case the tests run under nohup
    job = start_job({stage.hosts[0]: 1}, "--checkpoint-every", "600", stdout=theirs)
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    job.wait_size(1)
    job.wait_steps(5)
    os.close(ours)
    job.wait_steps(100)
    if window == "pipe":
        job.finish()
        return
    job.process.send_signal(signal.SIGHUP)  # what a shell sends when its window is closed
    assert job.wait() == 130
    ended = job.kinds("run_finished")[-1]
    assert ended["checkpoint_step"] == ended["steps"] >= 100
    job.resume()
    job.wait_steps(5)
    job.finish()


@EVERY_STYLE
@pytest.mark.parametrize("when", [pytest.param("starting", marks=COSTLY), "forming"])
def test_the_leader_is_killed_before_training_or_while_the_world_changes(
    stage: Stage, start_job: StartJob, when: str
) -> None:
    a, b, *_ = stage.hosts
    gate = stage.folder / "none"
    if when == "starting":
        job = start_job({a: 1, b: 1})
        job.wait_for(lambda: len(job.workers()) == 2, "workers are being started")
    else:
        job = start_job({a: 1})
        job.wait_size(1)
        gate = job.folder / f"gate-{b}"
        gate.touch()
        job.use({a: 1, b: 1})
        job.wait_for(lambda: [*job.folder.glob(f"at-gate-{b}*")], "a generation is being formed")
    kill_leader(job)
    gate.unlink(missing_ok=True)
    since = take_over(job)
    job.wait_size(2, since)
    job.wait_steps(5)
    job.finish()


@EVERY_STYLE
@pytest.mark.parametrize(
    ("broken", "forgotten"),
    [
        pytest.param(False, True, id="training, resumed elsewhere"),
        pytest.param(True, False, id="broken", marks=COSTLY),
    ],
)
def test_after_the_grace_time_all_ends_with_a_checkpoint(
    stage: Stage, start_job: StartJob, broken: bool, forgotten: bool
) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--leader-grace", str(GRACE_S), "--checkpoint-every", "600")
    job.wait_size(2)
    job.wait_steps(5)
    kill_leader(job)
    until_steps_without_leader(job, 1)  # there may be time for no more
    if broken:
        job.worker(b).kill()
    job.wait_for(left(job), "the grace time is over", ended_too=True)
    job.check_nothing_left(but_spools=True)
    made = max(record["step"] for record in job.digests())
    if forgotten:
        job.lose_run_folder()
    since = job.mark()
    job.resume_elsewhere() if forgotten else job.resume()
    restored = job.wait_event("restored", since)
    assert restored["step"] >= made - 1, "the last checkpoint was left on the host"
    job.wait_steps(5)
    job.finish(all_recorded=not forgotten)


def test_another_machine_takes_over_what_was_led_by_one_that_is_gone(
    stage: Stage, start_job: StartJob
) -> None:
    """With its disk: of the run folder nothing is left, of the run all that trains."""
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, script_options=("--max-batch-size", "12"))
    job.wait_size(2)
    job.wait_steps(5)
    workers = job.workers()
    kill_leader(job)
    job.lose_run_folder()
    since = job.mark()
    job.resume_elsewhere(alive=True)
    job.wait_event("taken_over", since, size=2)
    assert job.workers() == workers
    job.wait_event("batch_plan", since)  # without it --policy goodput knows no limits
    job.wait_for(lambda: job.audit().recorded, "the records begin")
    since = job.mark()
    job.worker(b).kill()
    gone = job.wait_event("worker_left", since, host=b)
    job.wait_size(2, job.events.index(gone))
    job.finish(all_recorded=False)
