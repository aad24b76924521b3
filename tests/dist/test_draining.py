"""Hosts that will be taken away: told by the user, SIGTERM, a command on the host, and a cloud."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.dist.conftest import StartJob
from tests.dist.running import RunningJob, Stage
from tests.paths import COSTLY

pytestmark = pytest.mark.dist


def test_a_job_moves_off_its_hosts_and_back(stage: Stage, start_job: StartJob) -> None:
    a, b, c, _ = stage.hosts
    job = start_job({a: 1, b: 1, c: 1}, "--np", "2")
    job.wait_size(2)
    since = job.mark()
    # With time left, the replacement is warm before anybody is told to leave.
    told = json.loads(job.command("drain", job.run_id, b, "--in", "600s", "--json"))
    assert told["drained"] is True
    job.wait_size(2, since)
    kinds = [event["kind"] for event in job.events[since:]]
    order = ["host_draining", "worker_standby", "rescale_started", "host_drained"]
    assert [kind for kind in kinds if kind in order] == order, job.story()
    assert job.kinds("rescale_started", since)[-1]["hosts"] == [a, c]
    job.check_nothing_left([b])
    assert f"{b}: drained (asked to by hvd-elastic drain)" in job.command("status", job.run_id)
    # The machine of the second host is shut down: there is no other host left for its worker.
    since = job.mark()
    os.kill(job.agent_pid(c), signal.SIGTERM)
    job.wait_event("host_drained", since, host=c)
    assert job.kinds("host_draining", since)[0]["cause"] == "its agent got SIGTERM"
    job.wait_size(1, since)
    assert not job.kinds("host_lost")
    # What was given back is used again.
    since = job.mark()
    job.command("drain", job.run_id, b, "--undo")
    job.wait_size(2, since)
    assert job.kinds("rescale_started", since)[-1]["hosts"] == [a, b]
    job.finish()


def test_all_hosts_go_and_nothing_is_lost(stage: Stage, start_job: StartJob) -> None:
    a, b, c, _ = stage.hosts
    notice = stage.folder / "taken"
    options = ("--checkpoint-every", "600", "--preemption-command", f"cat {notice}")
    job = start_job({a: 1, b: 1}, *options)
    job.wait_size(2)
    job.wait_steps(10)
    since = job.mark()
    new = notice.with_suffix(".new")
    new.write_text("11")
    new.replace(notice)  # an empty file is no notice of a time
    try:
        for host in (a, b):
            job.wait_event("host_drained", since, host=host)
    finally:
        notice.unlink()
    draining = job.kinds("host_draining", since)[0]
    assert draining["leave_in_s"] == 11.0
    saved = job.kinds("checkpoint", since)
    assert saved, "what training stopped with"
    job.check_nothing_left([a, b])
    complete = f"the checkpoint of step {saved[-1]['step']} is complete"

    def waits() -> bool:
        said = [event["reason"].replace("hosts ", "") for event in job.kinds("waiting", since)]
        return any(f"({a}, {b} drained" in reason and complete in reason for reason in said[-1:])

    job.wait_for(waits, f"it waits for hosts, and {complete}")
    job.use({a: 1, b: 1, c: 1})
    restored = job.wait_event("restored", since)
    assert restored["step"] == saved[-1]["step"]
    job.wait_steps(5)
    assert job.kinds("rescale_started", since)[-1]["hosts"] == [c]
    job.finish()


def test_a_host_that_the_cloud_takes_away_is_left(stage: Stage, start_job: StartJob) -> None:
    if stage.cluster.loopback:
        pytest.skip("the address of the metadata service needs hosts with networks of their own")
    a, b, c, _ = stage.hosts
    says = stage.folder / "preempted"
    says.write_text("FALSE")
    script = Path(__file__).with_name("scripts") / "metadata_service.py"
    with ExitStack() as cleanup:
        service = stage.cluster.popen_on(b, [sys.executable, str(script), str(says)])
        cleanup.callback(service.wait)
        cleanup.callback(stage.cluster.run_on, b, ["pkill", "-f", script.name])
        job = start_job({a: 1, b: 1, c: 1}, "--np", "2", "--preemption", "gcp")
        job.wait_size(2)
        job.wait_steps(5)
        assert not job.kinds("host_draining")
        since = job.mark()
        says.write_text("TRUE")
        job.wait_event("host_drained", since, host=b)
        draining = job.kinds("host_draining", since)[0]
        assert (draining["host"], draining["cause"]) == (b, "Google preempts it")
        assert draining["leave_in_s"] == 30.0
        job.wait_size(2, since)
        assert job.kinds("rescale_started", since)[-1]["hosts"] == [a, c]
        # The other hosts have no such service, which is said once for each of them.
        job.wait_for(lambda: len(_unanswered(job)) == 2, "two warnings")
    job.finish()


def _unanswered(job: RunningJob) -> list[str]:
    said = [event["message"] for event in job.kinds("warning")]
    return [each for each in said if "--preemption gcp would see no notice" in each]


@COSTLY
def test_a_machine_that_was_shut_down_is_used_again_by_resume(
    stage: Stage, start_job: StartJob
) -> None:
    a, b, *_ = stage.hosts
    job = start_job({a: 1, b: 1}, "--min-np", "2", "--checkpoint-every", "600")
    job.wait_size(2)
    job.wait_steps(5)
    job.command("drain", job.run_id, b, "--no-wait")
    since = job.mark()
    made = max(record["step"] for record in job.digests())
    for pid in (job.worker(a).pid, job.agent_pid(a)):
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    job.wait_event("host_draining", since, host=a)
    for number in (signal.SIGTERM, signal.SIGHUP):
        job.process.send_signal(number)
    assert job.wait() == 130
    ended = job.kinds("run_finished")[-1]
    assert ended["checkpoint_step"] >= made, "nothing is lost, since the worker outlived it"
    since = job.mark()
    job.resume()
    job.wait_event("host_returned", since, host=a)
    reason = job.wait_event("waiting", since)["reason"]
    assert f"host {b} drained" in reason, "that was asked for, and is not taken back"
    job.command("drain", job.run_id, b, "--undo")
    job.wait_size(2, since)
    job.finish()
