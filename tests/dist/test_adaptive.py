"""The batch adapts while hosts come, go and die, and nothing is read twice or left out."""

from __future__ import annotations

import pytest

from tests.dist.conftest import EVERY_STYLE, StartJob
from tests.dist.running import RunningJob, Stage
from tests.tensorboard_files import read_scalars

pytestmark = pytest.mark.dist

ADAPTIVE = ("--batch-size", "12", "--max-batch-size", "96", "--examples", "600")


def sizes(job: RunningJob) -> list[int]:
    return [plan["global_batch_size"] for plan in job.kinds("batch_plan")]


def wait_larger_batch(job: RunningJob) -> None:
    job.wait_for(lambda: max(sizes(job), default=0) > 12, "a larger batch")


@EVERY_STYLE
def test_the_batch_grows_and_outlives_a_join_a_departure_a_death_and_a_resume(
    stage: Stage, start_job: StartJob
) -> None:
    one, two, three = stage.hosts[:3]
    job = start_job({one: 1, two: 1}, "--tensorboard", script_options=ADAPTIVE)
    job.wait_size(2)
    wait_larger_batch(job)
    grown = sizes(job)[-1]
    since = job.mark()
    job.use({one: 1, two: 1, three: 1})
    job.wait_size(3, since)
    job.wait_steps(30)
    assert all(size > 12 for size in sizes(job)[-1:]), "a rescale does not begin anew"
    since = job.mark()
    job.worker_of_rank(0).kill()  # the one that decides
    job.wait_event("rescale_finished", since)
    job.wait_size(3, since)
    job.wait_steps(30)
    since = job.mark()
    job.use({two: 1, three: 1})
    job.wait_size(2, since)
    job.wait_steps(20)
    since = job.mark()
    job.wait_event("checkpoint", since)
    job.command("stop", job.run_id)
    job.wait()
    since = job.mark()
    job.resume()
    job.wait_size(2, since)
    job.wait_steps(5)
    assert job.kinds("metrics", since)[0]["global_batch_size"] > 12, "it goes on with its batch"
    job.finish()
    check_tensorboard(job, since)
    # What a script reports at the end is told without a throughput.
    metrics = [told for told in job.kinds("metrics") if "goodput" in told][-1]
    assert metrics["noise_scale"] > 0
    assert 0 < metrics["efficiency"] <= 1
    assert metrics["goodput"] == pytest.approx(metrics["throughput"] * metrics["efficiency"])
    assert grown <= 96
    for plan in job.kinds("batch_plan"):
        assert plan["reason"]
        assert plan["lr_scale"] >= 1
    told = job.command("status", job.run_id)
    assert f"\nbatch        {sizes(job)[-1]} examples (12 at first, at most 96)" in told


def test_a_host_that_joins_late_in_the_last_pass_takes_part_in_it(
    stage: Stage, start_job: StartJob
) -> None:
    one, two = stage.hosts[:2]
    options = ("--examples", "600", "--max-batch-size", "12", "--epochs", "2")
    job = start_job({one: 1}, script_options=options)
    stuck = job.folder / "stuck-from"
    stuck.write_text("90")  # long before the first of 100 steps
    done = lambda: (job.kinds("metrics") or [{"done": 0.0}])[-1]["done"]  # noqa: E731
    job.wait_for(lambda: done() > 0.8, "more than half of the last pass")
    since = job.mark()
    job.use({one: 1, two: 1})
    job.wait_event("worker_standby", since)
    job.wait_for((job.folder / "wants-change").exists, "the first one is asked for a change")
    stuck.unlink()
    job.wait_size(2, since)
    assert job.wait() == 0, job.story()
    assert job.kinds("metrics", since)[-1]["size"] == 2
    job.check_audit()


def check_tensorboard(job: RunningJob, since: int) -> None:
    """It shows each step once, as it was last made; a leader resumed at the mark."""
    told = [(event["step"], event["global_batch_size"]) for event in job.kinds("metrics")]
    again = job.kinds("metrics", since)[0]["step"]
    resumed_at = len(job.kinds("metrics")) - len(job.kinds("metrics", since))
    kept = [point for point in told[:resumed_at] if point[0] < again] + told[resumed_at:]
    shown = read_scalars(job.home / "runs" / job.run_id / "tensorboard")
    assert shown["size/global_batch_size"] == kept


def test_a_pass_that_does_not_fit_on_one_rank_is_made_smaller_on_all(
    stage: Stage, start_job: StartJob
) -> None:
    hosts = dict.fromkeys(stage.hosts[:2], 1)
    # At 18 examples a step the last one of an epoch has 20: more than fit, unless in two passes.
    options = (*ADAPTIVE, "--memory", "9", "--examples", "596", "--grad-scaler")
    job = start_job(hosts, script_options=options)
    job.wait_size(2)
    wait_larger_batch(job)
    job.wait_steps(60)
    job.finish()
    last = job.kinds("batch_plan")[-1]
    assert last["atomic_batch_size"] <= 9
    left = [worker["cause"] for worker in job.kinds("worker_left")]
    assert left == ["finished", "finished"], f"nobody had to leave for it; {job.story()}"
